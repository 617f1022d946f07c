"""What a job's synchronisation costs and brings: bytes, batches per second, cost to a target.

    python load/synchronisation.py                        # exits 1 where a figure falls short
    python load/synchronisation.py --only traffic_lr_mb --json out/synchronisation.json

Traffic is counted of encoded messages, both ways, on the tasks that workers run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by path: this checkout's packages

from rich.progress import track

from common.core.messages import Gradient, ModelId, WorkerId
from common.datasets.records import batches
from common.learning.gradients import GradientComputer
from common.learning.significance import Compression, View
from common.learning.tasks import build_model, make_task
from common.learning.trainer import Trainer
from common.wire.messages import encode_offer, encode_reply
from common.wire.vectors import encode_sparse, smallest
from load.harness import report
from load.throughput.learning import (
    CLICKS,
    LOOK_EVERY,
    MOST_UPDATES,
    RATINGS,
    Judge,
    Learning,
)

RECOMMENDED = Compression(significance=1.5)
_WORKER = WorkerId("worker-0")


@dataclass
class Traffic:
    """What crossed the wire until the target was reached."""

    updates: int = 0
    up: int = 0  # bytes
    down: int = 0
    reached: bool = False
    metric: float = float("inf")

    @property
    def megabytes(self) -> float:
        """Both ways; infinite where the target was not reached."""
        return (self.up + self.down) / 1e6 if self.reached else float("inf")


def traffic(learning: Learning, compression: Compression | None, *, sparse: bool = True) -> Traffic:
    """Train until the target is reached, and count what would cross the wire.

    Args:
        learning: What is learned, and how far.
        compression: Which changes of the weights workers are told; None: all of them.
        sparse: Whether gradients, and the weights' changes, may be sent sparse.
    """
    task = make_task(learning.task, learning.options)
    split = learning.data()
    judge = Judge(learning, split.test)
    computer = GradientComputer(task, build_model(task, 0), torch.device("cpu"))
    first = computer.model.state.numpy().copy()
    trainer = Trainer(first, computer.model.parameter_count, learning.optimizer)
    view = View(first, computer.model.parameter_count, compression or Compression(significance=0))
    drawn = batches(split.train, learning.batch_size, np.random.default_rng(0))
    found = Traffic()
    while not found.reached and found.updates < MOST_UPDATES:
        for worker in range(learning.workers):
            computer.load(view.weights)
            summed = computer.compute([next(drawn)])
            vector = smallest(summed.vector) if sparse else summed.vector
            gradient = Gradient(
                _WORKER,
                ModelId(1, found.updates),
                (found.updates * learning.workers + worker,),
                summed.samples,
                summed.loss_sum,
                summed.metric_sums,
                summed.seconds,
                vector=vector,
            )
            found.up += len(encode_reply("load", gradient))
            trainer.add(found.updates, vector, summed.samples)
        trainer.apply(found.updates)
        found.updates += 1
        weights = np.frombuffer(trainer.weights(), np.float32)
        told = view.follow(weights, found.updates)
        whole = encode_offer(ModelId(1, found.updates), trainer.weights())
        message = whole if told is None or not sparse else encode_sparse(told)
        found.down += learning.workers * len(message)
        if found.updates % LOOK_EVERY == 0:
            found.metric = judge.metric(weights)
            found.reached = found.metric <= learning.target
    return found


def traffic_lr_mb() -> report.Figure:
    """Clicks to test loss 0.507: dense 1,537, as it is without compression 52."""
    return report.Figure("MB both ways, clicks", traffic(CLICKS, RECOMMENDED).megabytes, 1, most=22)


def traffic_pmf_mb() -> report.Figure:
    """Ratings to test RMSE 0.815: dense 532, without compression 295."""
    found = traffic(RATINGS, RECOMMENDED).megabytes
    return report.Figure("MB both ways, ratings", found, 1, most=60)


FIGURES = {each.__name__: each for each in (traffic_lr_mb, traffic_pmf_mb)}


def main() -> int:
    """Measure, report, judge."""
    parser = report.parser(
        __doc__, "python load/synchronisation.py --only traffic_lr_mb", kafka=False
    )
    parser.add_argument("--only", choices=FIGURES, nargs="+", default=list(FIGURES))
    given = parser.parse_args()
    machine = report.machine()
    found = {name: FIGURES[name]() for name in track(given.only, "figures", transient=True)}
    answer = report.Found("Synchronisation", list(found.values()), {})
    answer.draw()
    result = {name: figure.value for name, figure in found.items()}
    return report.conclude(given.json, machine, result, answer.short())


if __name__ == "__main__":
    sys.exit(report.run(main))
