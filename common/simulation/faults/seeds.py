"""Run many seeds on all cores."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

from common.simulation.faults.cluster import Cluster, Outcome
from common.simulation.faults.scenario import from_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 4  # seeds that a process takes at once: some 50 ms


def run_seed(seed: int) -> Outcome:
    """Run one seed."""
    return Cluster(from_seed(seed)).run()


def run_seeds(seeds: range) -> Iterator[Outcome]:
    """Run many; begins no more when nobody asks for more."""
    # Not forked from this process: it may have threads, and they would not survive it. And none is
    # killed, as a `multiprocessing.Pool` does at its end: one that holds a lock then leaves it so.
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(mp_context=context) as pool:
        yield from pool.map(run_seed, seeds, chunksize=CHUNK)
