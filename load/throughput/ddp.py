"""One rank of plain PyTorch DDP, dense, over gloo: the reference for sparse messages.

    python load/throughput/ddp.py SET RANK RANKS FOLDER

Each rank is a single-threaded process with the rows in memory, and ranks meet in a folder. Between
steps rank 0 evaluates on the test rows, as often as for a job's versions, until the target is
reached. Then each rank prints its cost. All clocks stand still during evaluations, and begin after
the first.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[2]))

from common.data.records import count
from common.learning.tasks import build_model, make_task
from load.throughput.learning import LOOK_EVERY, MOST_UPDATES, SETS, Judge
from load.throughput.ranks import as_rank


def look_up(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Look up rows as PyTorch does by default: DDP averages a gradient of all rows."""
    return embedding(numbers, rows)


def train(name: str, rank: int, ranks: int) -> dict[str, float]:
    """Train until the target is reached. Returns the cost since the first evaluation.

    It gets every fair advantage: batches are ready slices in memory, gradients are not copied
    between buckets, and the optimizer is fused.
    """
    learning = SETS[name].among(ranks)
    split = learning.data()
    records = {name: torch.from_numpy(column) for name, column in split.train.items()}
    task = make_task(learning.task, learning.options)
    module = build_model(task, 0)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    settings = learning.optimizer
    options: dict[str, Any] = {"lr": settings.learning_rate, **settings.options}
    optimizer = torch.optim.SGD(module.parameters(), fused=True, **options)
    judge = Judge(learning, split.test) if rank == 0 else None
    b = learning.batch_size
    ends = count(split.train) // b * b
    found = {"seconds": 0.0, "processor_s": 0.0}
    metric, updates = torch.tensor(float("inf")), 0
    while metric > learning.target and updates < MOST_UPDATES:
        wall_s, processor_s = time.perf_counter(), time.process_time()
        for _ in range(LOOK_EVERY):
            at = (updates * ranks + rank) * b % ends
            batch = {name: column[at : at + b] for name, column in records.items()}
            optimizer.zero_grad()
            task.losses(task.forward(model, batch), batch).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            updates += 1
        if updates > LOOK_EVERY:
            found["seconds"] += time.perf_counter() - wall_s
            found["processor_s"] += time.process_time() - processor_s
        if judge is not None:
            with torch.no_grad():
                weights = parameters_to_vector(module.parameters())
            metric = torch.tensor(judge.metric(weights.numpy()))
        distributed.broadcast(metric, 0)
    # Each rank of a ring sends each part of the gradient once per other rank, first as partial
    # sums and then as the total.
    sent = 2 * (ranks - 1) / ranks * 4 * sum(each.numel() for each in module.parameters())
    return found | {"bytes": sent * updates, "updates": updates, "metric": float(metric)}


def main() -> int:
    """Train, and print the cost as JSON."""
    name, *place = sys.argv[1:]
    with as_rank(*place), patch("common.learning.sparse_tasks.look_up", look_up):
        print(json.dumps(train(name, int(place[0]), int(place[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
