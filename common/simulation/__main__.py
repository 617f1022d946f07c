"""Run the protocol under thousands of fault schedules: `python -m common.simulation --help`."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from time import perf_counter

from rich.console import Console
from rich.progress import track

from common.simulation.cluster import Cluster, Outcome
from common.simulation.scenario import from_seed
from common.simulation.shrink import shrink

EXAMPLES = """examples:
  python -m common.simulation --seeds 0 1000     check seeds 0 to 999
  python -m common.simulation --story 42         tell what happens under seed 42
  python -m common.simulation --shrink 42        find the smallest world in which seed 42 still fails
"""
EXIT_VIOLATED = 1


def run_seed(seed: int) -> Outcome:
    """Run one seed; here, so that a pool can import it."""
    return Cluster(from_seed(seed)).run()


def run_seeds(seeds: range, console: Console) -> list[Outcome]:
    """Run many on all cores, with a progress bar."""
    with multiprocessing.Pool() as pool:
        runs = pool.imap_unordered(run_seed, seeds, chunksize=8)
        return list(track(runs, "seeds", len(seeds), console=console))


def main() -> int:
    """Parse the command line and do what it says; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m common.simulation",
        description="Run the protocol in virtual time under random faults and check its invariants.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", nargs=2, type=int, metavar=("FROM", "TO"), default=(0, 1000))
    what.add_argument("--story", type=int, metavar="SEED")
    what.add_argument("--shrink", type=int, metavar="SEED")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    if arguments.story is not None or arguments.shrink is not None:
        return _tell(arguments.story, arguments.shrink, console)
    began = perf_counter()
    outcomes = run_seeds(range(*arguments.seeds), console)
    failures = [outcome for outcome in outcomes if outcome.failure]
    print(  # noqa: T201 -- a command's output
        f"{len(outcomes)} seeds, {len(failures)} failures, "
        f"{sum(o.updates for o in outcomes)} updates, {sum(o.takeovers for o in outcomes)} leaders, "
        f"{sum(o.quarantined for o in outcomes)} quarantined, {perf_counter() - began:.1f} s"
    )
    for kind, times in Counter(outcome.kind for outcome in failures).most_common():
        shortest = min((o for o in failures if o.kind == kind), key=lambda o: o.seconds)
        print(f"  {kind}: {times}; --story {shortest.seed}: {shortest.failure}")  # noqa: T201 -- likewise
    return EXIT_VIOLATED if failures else 0


def _tell(story: int | None, to_shrink: int | None, console: Console) -> int:
    scenario = from_seed(story if story is not None else to_shrink or 0)
    if to_shrink is not None:
        scenario = shrink(scenario, lambda line: console.print(line, highlight=False))
    print(scenario)  # noqa: T201 -- a command's output
    outcome = Cluster(scenario, lambda now, text: print(f"{now:8.3f}  {text}")).run()  # noqa: T201
    print(outcome)  # noqa: T201 -- likewise
    return EXIT_VIOLATED if outcome.failure else 0


if __name__ == "__main__":
    sys.exit(main())
