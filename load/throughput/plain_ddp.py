"""Ranks of plain PyTorch DDP over gloo, without faults: the reference for groups.

    python load/throughput/plain_ddp.py WEIGHTS SECONDS UPDATES RANK RANKS FOLDER

Each rank is a single-threaded process that trains the counting model with SGD. Gradients are timed
waits, as in the job that is compared. Ranks meet in a folder, and each prints the median time of an
update.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch.nn.parallel import DistributedDataParallel

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[2]))

from common.testing.counting import CountingTask
from load.throughput.ranks import as_rank

# Updates that are not counted, because they create buckets and allocate memory.
_FIRST = 3
_IDS = 8  # ids per batch


def train(weights: int, seconds: float, updates: int) -> float:
    """Train. Returns the median time of an update, in seconds."""
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
    """Train, and print the result as JSON."""
    weights, seconds, updates, *place = sys.argv[1:]
    with as_rank(*place):
        print(json.dumps({"update_s": train(int(weights), float(seconds), int(updates))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
