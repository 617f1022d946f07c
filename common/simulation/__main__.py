"""Run the protocol under thousands of fault schedules: `python -m common.simulation --help`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from time import perf_counter

from rich.console import Console
from rich.progress import track

from common.simulation.faults.cluster import (
    Cluster,
    Outcome,
    run_group_seed,
    run_seed,
    run_seeds,
    run_slices_seed,
    run_store_seed,
    shrink,
    store_scenario,
)
from common.simulation.faults.scenario import Scenario, from_seed, grouped, sliced

EXAMPLES = """examples:
  python -m common.simulation --seeds 0 1000     check seeds 0 to 999
  python -m common.simulation --first            stop at the first seed that fails
  python -m common.simulation --group            members hold the weights and add gradients up
  python -m common.simulation --slices           likewise, each slice of them has owners
  python -m common.simulation --store            object storage answers wrongly
  python -m common.simulation --story 42         tell what happens under seed 42
  python -m common.simulation --shrink 42        find the smallest world that still fails as 42 does
"""
EXIT_VIOLATED = 1
ENOUGH = 100  # seeds that try all ways to make an update: else something is not tried any more


def main() -> int:
    """Parse the command line and do what it says; returns the exit status."""
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
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument("--group", action="store_true", help="members hold the weights")
    layout.add_argument("--slices", action="store_true", help="members own slices of the weights")
    layout.add_argument("--store", action="store_true", help="object storage answers wrongly")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    group = next((kind for kind in ("slices", "group", "store") if getattr(arguments, kind)), "")
    if arguments.story is not None or arguments.shrink is not None:
        seed = arguments.shrink if arguments.story is None else arguments.story
        scenario = grouped(from_seed(seed)) if group else from_seed(seed)
        scenario = sliced(scenario) if arguments.slices else scenario
        scenario = store_scenario(seed) if arguments.store else scenario
        return _tell(scenario, console, small=arguments.story is None)
    began = perf_counter()
    run = {
        "": run_seed,
        "group": run_group_seed,
        "slices": run_slices_seed,
        "store": run_store_seed,
    }[group]
    outcomes = _check(range(*arguments.seeds), run, console, first=arguments.first)
    _report(outcomes, perf_counter() - began, group)
    failed = any(outcome.failure for outcome in outcomes) or (
        len(outcomes) >= ENOUGH and not all(_ways(outcomes, group).values())
    )
    return EXIT_VIOLATED if failed else 0


def _ways(outcomes: list[Outcome], group: str) -> dict[str, int]:
    """How many updates were made in each way that is not the paper's, or not as the one before."""
    if group == "store":
        return {way: sum(getattr(o, way) for o in outcomes) for way in ("named", "awaited")}
    if group:
        among = sum((outcome.among for outcome in outcomes), Counter[str]())
        members = ["broken", "adopted", "copied", "torn", "fallen back", "switched"]
        return {way: among[way] for way in members + ["moved"] * (group == "slices")}
    ways = ("stale", "lone", "walked", "switched", "changed", "tuned")
    return {way: sum(getattr(o, way) for o in outcomes) for way in ways}


def _check(
    seeds: range, run: Callable[[int], Outcome], console: Console, *, first: bool
) -> list[Outcome]:
    """Run all seeds with a progress bar, or until one fails."""
    outcomes = list[Outcome]()
    for outcome in track(run_seeds(seeds, run), "seeds", len(seeds), console=console):
        outcomes.append(outcome)
        if first and outcome.failure:
            break
    return outcomes


def _report(outcomes: list[Outcome], seconds: float, group: str) -> None:
    failures = [outcome for outcome in outcomes if outcome.failure]
    totals = (
        f"{len(outcomes)} seeds",
        f"{len(failures)} failures",
        f"{sum(outcome.updates for outcome in outcomes)} updates",
        *(f"{count} {way}" for way, count in _ways(outcomes, group).items()),
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


def _tell(scenario: Scenario, console: Console, *, small: bool) -> int:
    if small:
        try:
            scenario = shrink(scenario, lambda line: console.print(line, highlight=False))
        except ValueError as error:
            console.print(error, highlight=False)
            return 0
    print(scenario)  # noqa: T201 -- a command's output
    outcome = Cluster(scenario, lambda now, text: print(f"{now:8.3f}  {text}")).run()  # noqa: T201
    print(outcome)  # noqa: T201 -- likewise
    return EXIT_VIOLATED if outcome.failure else 0


if __name__ == "__main__":
    sys.exit(main())
