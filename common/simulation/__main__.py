"""Run the protocol under thousands of fault schedules: `python -m common.simulation --help`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from hashlib import sha256
from time import perf_counter

from rich.console import Console
from rich.progress import track

from common.simulation.faults.cluster import Cluster, Outcome, run_seeds, shrink
from common.simulation.faults.scenario import WORLDS, Scenario

_HELP = {
    "group": "members hold the weights and sum gradients among themselves",
    "slices": "members hold the weights, and each slice of them has owners",
    "forged": "members hold the weights, and an attacker forges their reports",
    "frozen": "processes freeze for seconds",
    "store": "object storage returns wrong answers",
    "builds": "some workers have another build of the task",
}
EXAMPLES = """examples:
  python -m common.simulation --seeds 0 1000     check seeds 0 to 999
  python -m common.simulation --first            stop at the first seed that fails
  python -m common.simulation --group            check another kind of world
  python -m common.simulation --story 42         tell what happens under seed 42
  python -m common.simulation --digest           print a SHA-256 of what all seeds came to
  python -m common.simulation --shrink 42        find the smallest world that still fails as 42 does
"""
EXIT_VIOLATED = 1
# A run of at least this number of seeds must reach every kind of event that `_ways` counts.
# Otherwise that kind is no longer tested.
ENOUGH = 100


def main() -> int:
    """Parse the command line, run the command, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m common.simulation",
        description="Run the protocol in virtual time under random faults; check its invariants.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", nargs=2, type=int, metavar=("FROM", "TO"), default=(0, 1000))
    what.add_argument("--story", type=int, metavar="SEED")
    what.add_argument("--shrink", type=int, metavar="SEED")
    worlds = parser.add_mutually_exclusive_group()
    for option, text in _HELP.items():
        worlds.add_argument(
            f"--{option}", dest="world", action="store_const", const=option, help=text
        )
    parser.add_argument(
        "--digest",
        action="store_true",
        help="print a SHA-256 of all outcomes; refactoring must not change it",
    )
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    world = arguments.world or ""
    if arguments.story is not None or arguments.shrink is not None:
        seed = arguments.shrink if arguments.story is None else arguments.story
        return _narrate(WORLDS[world](seed), console, small=arguments.story is None)
    began = perf_counter()
    outcomes = _check(range(*arguments.seeds), world, console, first=arguments.first)
    _report(outcomes, perf_counter() - began, world)
    if arguments.digest:
        print(_digest(outcomes))  # noqa: T201 -- a command's output
    failed = any(outcome.failure for outcome in outcomes) or (
        len(outcomes) >= ENOUGH and not all(_ways(outcomes, world).values())
    )
    return EXIT_VIOLATED if failed else 0


def _ways(outcomes: list[Outcome], world: str) -> dict[str, int]:
    """Count the events that at least one world of this kind must reach."""
    if world == "store":
        return {way: sum(getattr(o, way) for o in outcomes) for way in ("named", "awaited")}
    if world in ("group", "slices", "forged"):
        among = sum((outcome.among for outcome in outcomes), Counter[str]())
        members = ["broken", "adopted", "copied", "torn", "fallen back", "switched"]
        return {way: among[way] for way in members + ["moved"] * (world == "slices")}
    ways = ("stale", "single_worker", "local_steps", "switched", "changed", "tuned")
    return {way: sum(getattr(o, way) for o in outcomes) for way in ways}


def _digest(outcomes: list[Outcome]) -> str:
    digest = sha256()
    for outcome in outcomes:
        digest.update(f"{outcome.values()}\n".encode())
    return digest.hexdigest()


def _check(seeds: range, world: str, console: Console, *, first: bool) -> list[Outcome]:
    """Run all seeds with a progress bar, or stop at the first failure."""
    outcomes = list[Outcome]()
    for outcome in track(run_seeds(seeds, world), "seeds", len(seeds), console=console):
        outcomes.append(outcome)
        if first and outcome.failure:
            break
    return outcomes


def _report(outcomes: list[Outcome], seconds: float, world: str) -> None:
    failures = [outcome for outcome in outcomes if outcome.failure]
    totals = (
        f"{len(outcomes)} seeds",
        f"{len(failures)} failures",
        f"{sum(outcome.updates for outcome in outcomes)} updates",
        *(f"{count} {way}" for way, count in _ways(outcomes, world).items()),
        f"{sum(outcome.takeovers for outcome in outcomes)} leaders",
        f"{sum(outcome.quarantined for outcome in outcomes)} batches quarantined",
        f"{sum(outcome.requeued for outcome in outcomes)} taken back",
        f"{sum(outcome.refused for outcome in outcomes)} claims refused",
        f"{seconds:.1f} s",
    )
    lines = [", ".join(totals)]
    for kind, times in Counter(outcome.kind for outcome in failures).most_common():
        shortest = min((o for o in failures if o.kind == kind), key=lambda o: o.seconds)
        lines.append(f"  {kind}: {times}; --story {shortest.seed}: {shortest.failure}")
    print(*lines, sep="\n")  # noqa: T201 -- a command's output


def _narrate(scenario: Scenario, console: Console, *, small: bool) -> int:
    if small:
        try:
            scenario = shrink(scenario, lambda line: console.print(line, highlight=False))
        except ValueError as error:
            console.print(error, highlight=False)
            return 0
    print(scenario)  # noqa: T201 -- a command's output
    outcome = Cluster(scenario, lambda now, text: print(f"{now:8.3f}  {text}")).run()  # noqa: T201
    print(outcome)  # noqa: T201 -- a command's output
    return EXIT_VIOLATED if outcome.failure else 0


if __name__ == "__main__":
    sys.exit(main())
