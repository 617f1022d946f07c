"""Measures the gain of `stale` if one of eight worker processes is four times slower."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from common.embedded.services import stop_all
from common.redis.board import open_board
from common.testing.costless import CostlessTask
from load.harness.counting import costless_spec
from load.harness.stack import Servers, servers
from load.harness.updates import UpdatesMeter
from load.throughput.backlog import check_left, produce

if TYPE_CHECKING:
    from torch import Tensor, nn

ENTRYPOINT = "load.throughput.slow_worker:SleepingTask"
_TOPIC, _WORKERS, _SLOWER = "records", 8, 4.0
_GRADIENT_S = 0.15
_MEASURED_S, _JOIN_S = 8.0, 120.0
_RECORDS = 20_000


class SleepingTask(CostlessTask):
    """A task whose gradient is a timed wait, longer in processes that a file names.

    Args:
        weights: See `CostlessTask`.
        seconds: Length of the wait for each record.
        slow: File with the ids of slow processes.
    """

    def __init__(self, weights: int, seconds: float, slow: str) -> None:
        super().__init__(weights)
        self._seconds, self._slow = seconds, Path(slow)

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Wait, then do as `CostlessTask`."""
        slow = str(os.getppid()) in self._slow.read_text().split()
        # A batch has one record, and one pass may compute several small batches.
        batches = len(records["x"])
        time.sleep(batches * self._seconds * (_SLOWER if slow else 1.0))
        return super().forward(module, records)


def gain(kafka: str, pairs: int) -> float:
    """Return the median gain in batches/s of s = 1 over a fleet that waits for the slow worker.

    If each worker computes its own batches, K = 8, all are as slow as the slowest. So the reference
    is measured with all workers slow.

    Args:
        kafka: See `servers`.
        pairs: Number of runs of each. The order changes from pair to pair.

    Raises:
        NotMeasuredError: If the job did not run.
    """
    gains = list[float]()
    with servers(kafka, tasks=(ENTRYPOINT,), forks=True) as on:
        slow = on.logs / "slow"
        slow.touch()
        produce(on.log, _TOPIC, _WORKERS, [bytes(4)], _RECORDS)
        coordinator, *workers = on.start_all(_WORKERS)
        pids = [str(worker.pid) for worker in workers]
        try:
            for pair in range(pairs):
                modes = {"synchronous": pids, "stale": pids[:1]}
                found = dict[str, float]()
                for mode in sorted(modes, reverse=bool(pair % 2)):
                    slow.write_text(" ".join(modes[mode]))
                    names = {worker.name for worker in workers}
                    found[mode] = _batches_per_s(on, f"{mode}-{pair}", mode, slow, names)
                gains.append(found["stale"] / found["synchronous"])
        finally:
            stop_all([coordinator, *workers])
    return median(gains)


def _batches_per_s(on: Servers, name: str, mode: str, slow: Path, workers: set[str]) -> float:
    task = {"entrypoint": ENTRYPOINT, "weights": 100, "seconds": _GRADIENT_S, "slow": str(slow)}
    sizes = {"batch_size": 1, "group_size": _WORKERS}
    on.submit(costless_spec(name, _TOPIC, task=task, synchronisation={"mode": mode}, **sizes))
    with closing(UpdatesMeter(on.log, name)) as meter:
        meter.await_workers(workers, 0, _JOIN_S)
        pace = meter.measure(_MEASURED_S)
    with closing(open_board(on.settings, name)) as board:
        check_left(board, _RECORDS)
    on.stop_jobs(name)
    return pace.samples_per_s
