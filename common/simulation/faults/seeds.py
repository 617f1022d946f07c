"""Run many seeds on all cores."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

from common.simulation.faults.cluster import Cluster, Outcome
from common.simulation.faults.scenario import from_seed

if TYPE_CHECKING:
    from collections.abc import Iterator


def run_seed(seed: int) -> Outcome:
    """Run one seed."""
    return Cluster(from_seed(seed)).run()


def run_seeds(seeds: range) -> Iterator[Outcome]:
    """Run many, in any order; stops when nobody asks for more."""
    # Not forked from this process: it may have threads, and they would not survive it.
    with multiprocessing.get_context("forkserver").Pool() as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=4)
