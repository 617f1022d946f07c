"""What the pipeline is compared to: a plain PyTorch loop over decoded records in memory.

    python load/throughput/baseline.py CASE DATA

A process of one thread that waits on its standard input: a line with a number of seconds lets it
train for so long, then it answers with a line of records and seconds. It ends with its input.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # run by path: this checkout's packages

from common.learning.tasks import build_model, make_task
from load.throughput.cases import CASES, Case, find_records
from services.worker.memory import keep_freed_memory


def training_step(case: Case, data: Path | None) -> Callable[[], int]:
    """Make a function that trains on the next batch and says how many records that was.

    It is given every advantage that is fair: batches are slices that lie ready in memory, no metric
    is computed, the optimizer is the fused one.
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


def main() -> int:
    """Serve until the standard input ends."""
    keep_freed_memory()  # as the workers do
    torch.set_num_threads(1)
    case, data = sys.argv[1:]
    step = training_step(CASES[case], Path(data) if data else None)
    step()
    for line in sys.stdin:
        started, records = time.perf_counter(), 0
        ends = started + float(line)
        while (now := time.perf_counter()) < ends:
            records += step()
        print(records, now - started, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
