"""The cost of static and tuned fleets until a target is reached.

Gradients are computed, but time is virtual: an update takes ceil(K / p) successive gradients and
one message per worker. All fleets begin with K workers.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np
import torch

from common.core.modes import GroupSizeTuner, Scatter, rate_scale
from common.core.vectors import squared_norm
from common.data.fields import records_per_pass
from common.data.records import batches
from common.learning.gradients import GradientComputer
from common.learning.tasks import build_model, make_task
from common.learning.trainer import Trainer
from common.spot.provisioning.autoscale import FleetSize, RoundTimes, workers_wanted
from load.throughput.learning import LOOK_EVERY, Judge, Learning

GRADIENT_S, ONCE_S, MESSAGE_S = 0.04, 0.004, 0.0015
MOST_UPDATES = 2_000
# Rounds that K is kept, as in a job.
ROUNDS = 20


def update_s(fleet: FleetSize) -> float:
    """Virtual seconds of an update."""
    gradients = ceil(fleet.group_size / fleet.workers)
    return gradients * GRADIENT_S + ONCE_S + fleet.workers * MESSAGE_S


class Seen(NamedTuple):
    """An update, as the fleet's manager observes it."""

    version: int
    now_s: float
    scatter: Scatter
    # |gradient summed over all samples|^2
    square: float


class Static:
    """A manager that never changes the fleet."""

    def __init__(self, workers: int) -> None:
        self.fleet = FleetSize(workers, workers)

    def rate(self) -> float:
        """Factor of the learning rate, which was chosen for the first fleet."""
        return 1.0

    def see(self, seen: Seen) -> None:
        """Observe an update. Changes nothing."""


class Tuned(Static):
    """Like `tuner` of a job: K by the noise scale, p by measured times."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._most = workers
        self._tuner = GroupSizeTuner(workers, 2, workers, ROUNDS)
        self._times = RoundTimes()

    def rate(self) -> float:
        """Factor of the learning rate, by the noise scale."""
        return rate_scale(self.fleet.group_size, self._most, self._tuner.noise_scale)

    def see(self, seen: Seen) -> None:
        """Observe an update and tune K and p."""
        self._tuner.observe(seen.scatter, seen.square)
        self._times.observe(self.fleet, seen.version, GRADIENT_S, seen.now_s, backlog=True)
        takes_s = self._times.update_s(self._tuner.group_size, GRADIENT_S)
        workers = self.fleet.workers
        if takes_s is not None:
            workers = workers_wanted(takes_s, workers, self._most)
        self.fleet = FleetSize(workers, self._tuner.group_size)


def cost(learning: Learning, manager: Static) -> float:
    """Return the worker-seconds until the target is reached, or infinity."""
    task = make_task(learning.task, learning.options)
    split = learning.data()
    judge = Judge(learning, split.test)
    record_bytes = sum(column[:1].nbytes for column in split.train.values())
    computer = GradientComputer(
        task,
        build_model(task, 0),
        torch.device("cpu"),
        pass_records=records_per_pass(record_bytes),
    )
    count = computer.model.parameter_count
    trainer = Trainer(computer.model.state.numpy().copy(), count, learning.optimizer)
    drawn = batches(split.train, learning.batch_size, np.random.default_rng(0))
    now_s = spent = 0.0
    for version in range(1, MOST_UPDATES + 1):
        fleet = manager.fleet
        computer.load(trainer.weights())
        messages = min(fleet)
        samples, squares = 0, 0.0
        for place in range(messages):
            share = len(range(place, fleet.group_size, messages))
            found = computer.compute([next(drawn) for _ in range(share)])
            trainer.add(version, found.vector, found.samples)
            samples += found.samples
            squares += squared_norm(found.vector, count) / found.samples
        square = trainer.square(version)
        trainer.apply(version, scale=manager.rate())
        now_s += update_s(fleet)
        spent += fleet.workers * update_s(fleet)
        scatter = Scatter(messages, fleet.group_size, samples, squares)
        manager.see(Seen(version, now_s, scatter, square))
        if version % LOOK_EVERY == 0:
            weights = np.frombuffer(trainer.weights(), np.float32)
            if judge.metric(weights) <= learning.target:
                return spent
    return float("inf")
