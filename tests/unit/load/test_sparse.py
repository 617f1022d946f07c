"""`load/sparse.py` gives DOLL and PyTorch's DDP the same rows per update, and compares times."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.learning.sparse_tasks import look_up as sparse_look_up
from common.learning.tasks import make_task
from load.sparse import Side, job_of, ratios
from load.throughput.ddp import look_up
from load.throughput.learning import CLICKS, RATINGS, SETS


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_rows_per_update_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    for learning in (CLICKS, RATINGS):
        among = learning.among(workers)
        rows = learning.batch_size * learning.workers
        assert among.batch_size * among.workers == rows


def test_ratings_model_has_at_least_ten_megabytes() -> None:
    learning = SETS["ratings_like"]
    model = make_task(learning.task, learning.options).build()
    assert sum(4 * each.numel() for each in model.parameters()) >= 10e6


def test_job_has_the_batch_size_and_options_of_ddp() -> None:
    learning = RATINGS.among(2)
    train = {
        "user": np.zeros(3, np.int32),
        "item": np.zeros(3, np.int32),
        "rating": np.zeros(3, np.float32),
    }
    job = job_of("ratings_like", learning, train)

    assert (job.batch_size, job.group_size) == (384, 2)
    assert job.task_options == dict(learning.options)
    assert job.optimizer.options == dict(learning.optimizer.options)
    assert job.compression is not None
    assert job.compression.significance == 1.5


def test_ratios_divide_our_values_by_those_of_ddp() -> None:
    ours = Side(3.0, 10.0, {"coordinator": 1.0, "worker-0": 0.5}, 100, 0.5)
    ddp = Side(2.0, 40.0, {"rank-0": 1.0, "rank-1": 2.0}, 90, 0.5)
    assert ratios(ours, ddp) == {"time_ratio": 1.5, "bytes_ratio": 0.25, "cost_ratio": 0.5}


def test_ddp_look_up_returns_the_same_rows_with_a_dense_gradient() -> None:
    rows = torch.nn.Parameter(torch.arange(8.0).reshape(4, 2))
    numbers = torch.tensor([2, 0, 2])
    look_up(rows, numbers).sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    assert not rows.grad.is_sparse
    assert rows.grad.tolist() == [[1, 1], [0, 0], [2, 2], [0, 0]]
    assert torch.equal(look_up(rows, numbers), sparse_look_up(rows, numbers))
