"""What a group is held against: ranks of plain PyTorch DDP over gloo, without faults.

    python load/throughput/plain_ddp.py WEIGHTS SECONDS UPDATES RANK RANKS FOLDER

Each rank is a process of one thread that trains the counting model with SGD, gradients a timed wait
as in the job beside it. They meet in a folder; each prints how long an update took in the median.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))  # run by path: this checkout's packages

from common.testing.counting import CountingTask
from load.throughput.ranks import as_rank

_FIRST = 3  # updates that are not counted: buckets are made, memory is taken
_IDS = 8  # of a batch


def train(weights: int, seconds: float, updates: int) -> float:
    """Train; the median time of an update, s."""
    task = CountingTask(weights, seconds=seconds)
    module = task.build()
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, fused=True)
    records = {"id": torch.arange(_IDS)}
    took = list[float]()
    for _ in range(_FIRST + updates):
        begun = time.perf_counter()
        optimizer.zero_grad()
        task.losses(task.forward(model, records), records).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        took.append(time.perf_counter() - begun)
    return median(took[_FIRST:])


def main() -> int:
    """Train, and print what it took as JSON."""
    weights, seconds, updates, *place = sys.argv[1:]
    with as_rank(*place):
        print(json.dumps({"update_s": train(int(weights), float(seconds), int(updates))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
