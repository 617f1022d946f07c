"""The pipeline's baseline: a plain PyTorch loop over decoded records in memory.

    python load/throughput/baseline.py CASE DATA

A single-threaded process. It reads a line with a number of seconds from standard input, trains for
that time and prints a line with records and seconds. It ends when its input ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[2]))

from common.learning.tasks import build_model, make_task
from load.throughput.cases import CASES, Case, find_records
from services.worker.memory import keep_freed_memory


def training_step(case: Case, data: Path | None) -> Callable[[], int]:
    """Return a function that trains on the next batch and returns its number of records.

    It gets every fair advantage: batches are ready slices in memory, no metric is computed, and the
    optimizer is fused.
    """
    records = {
        name: torch.from_numpy(column) for name, column in find_records(case, data, seed=1).items()
    }
    task = make_task(case.task, case.options)
    module = build_model(task, seed=0)
    optimizer = torch.optim.Adam(module.parameters(), case.learning_rate, fused=True)
    b = case.batch_size
    ends = len(next(iter(records.values()))) // b * b
    at = 0

    def step() -> int:
        nonlocal at
        batch = {name: column[at : at + b] for name, column in records.items()}
        optimizer.zero_grad()
        task.losses(task.forward(module, batch), batch).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        at = (at + b) % ends
        return b

    return step


def serve(step: Callable[[], int], settle: Callable[[], object] = int) -> None:
    """Train for each time that the standard input requests, until it ends.

    Args:
        step: Trains once, and returns the number of records.
        settle: Waits until all work is done that the steps have queued.
    """
    for line in sys.stdin:
        started, records = time.perf_counter(), 0
        ends = started + float(line)
        while time.perf_counter() < ends:
            records += step()
        settle()
        print(records, time.perf_counter() - started, flush=True)


def main() -> int:
    """Serve until the standard input ends."""
    keep_freed_memory()  # like the workers
    torch.set_num_threads(1)
    case, data = sys.argv[1:]
    step = training_step(CASES[case], Path(data) if data else None)
    step()
    serve(step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
