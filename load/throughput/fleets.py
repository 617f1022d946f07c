"""What a fleet costs until a target is reached: as it is, tuned, and by MLLess's scale-in.

Gradients are computed, time is virtual: an update takes ceil(K / p) gradients one after the other,
and a message of each worker. All fleets begin with as many workers as K.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import curve_fit

from common.core.modes import GroupSizeTuner, Scatter, rate_scale
from common.core.vectors import squared_norm
from common.data.records import batches
from common.learning.gradients import GradientComputer
from common.learning.tasks import build_model, make_task
from common.learning.trainer import Trainer
from common.spot.provisioning.sizing import Fleet, RoundTimes, workers_wanted
from load.throughput.learning import LOOK_EVERY, Judge, Learning

_Array: TypeAlias = npt.NDArray[np.float64]

GRADIENT_S, ONCE_S, MESSAGE_S = 0.04, 0.004, 0.0015
MOST_UPDATES = 2_000
ROUNDS = 20  # that K is kept, as in a job


def update_s(fleet: Fleet) -> float:
    """Virtual seconds of an update."""
    gradients = ceil(fleet.group_size / fleet.workers)
    return gradients * GRADIENT_S + ONCE_S + fleet.workers * MESSAGE_S


class Seen(NamedTuple):
    """An update, as who decides on the fleet sees it."""

    version: int
    now_s: float
    scatter: Scatter
    square: float  # |gradient summed over all samples|^2
    loss: float  # mean per sample, before it


class Static:
    """Decides on the fleet: it stays what it is."""

    def __init__(self, workers: int) -> None:
        self.fleet = Fleet(workers, workers)

    def rate(self) -> float:
        """Factor of the learning rate, which belongs to the first fleet: as it is."""
        return 1.0

    def see(self, seen: Seen) -> None:
        """Take in an update: change nothing."""


class Tuned(Static):
    """K by the noise scale, p by measured times: `tuner` of a job."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._most = workers
        self._tuner = GroupSizeTuner(workers, 2, workers, ROUNDS)
        self._times = RoundTimes()

    def rate(self) -> float:
        """By the noise scale."""
        return rate_scale(self.fleet.group_size, self._most, self._tuner.noise_scale)

    def see(self, seen: Seen) -> None:
        """Tune both."""
        self._tuner.observe(seen.scatter, seen.square)
        self._times.observe(self.fleet, seen.version, GRADIENT_S, seen.now_s, backlog=True)
        takes_s = self._times.update_s(self._tuner.group_size, GRADIENT_S)
        workers = self.fleet.workers
        if takes_s is not None:
            workers = workers_wanted(takes_s, workers, self._most)
        self.fleet = Fleet(workers, self._tuner.group_size)


class ScaleIn(Static):
    """MLLess, section 4: after the loss curve's knee a worker less per epoch, and K with it.

    As long as the curve that the first workers were on is not left behind by more than a share.
    Epochs and the time looked ahead are an eighth of the paper's, as runs here are short.
    """

    KNEE, FROM, OVER = 2e-3, 40, 20  # slope per update, relative, over so many, from so many on
    EPOCH_S, AHEAD_S, SHARE, SMOOTHING = 5.0, 2.5, 0.1, 0.1

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._losses = list[float]()  # smoothed
        self._first: Callable[[int], float] | None = None  # curve of all workers
        self._since = 0  # updates when the last one went
        self._ahead = int(self.AHEAD_S / update_s(self.fleet))
        self._epoch_at_s = 0.0

    def see(self, seen: Seen) -> None:
        """Let a worker go, if it is time and it is hardly missed."""
        losses, workers = self._losses, self.fleet.workers
        before = losses[-1] if losses else seen.loss
        losses.append(before + self.SMOOTHING * (seen.loss - before))
        if self._first is None:
            if len(losses) > self.FROM:
                fall = (losses[-1 - self.OVER] - losses[-1]) / self.OVER / losses[-1]
                if fall < self.KNEE:
                    self._first = _curve(_power, losses)
                    self._let_go(seen)
        elif seen.now_s >= self._epoch_at_s and workers > 1:
            self._epoch_at_s = seen.now_s + self.EPOCH_S
            own = losses[self._since :]
            ahead = int(self.AHEAD_S / update_s(self.fleet))
            then = self._first(len(losses) + self._ahead)
            if abs(then - _curve(_slow, own)(len(own) + ahead)) < self.SHARE * then:
                self._let_go(seen)

    def _let_go(self, seen: Seen) -> None:
        workers = self.fleet.workers - 1
        self.fleet = Fleet(workers, workers)
        self._since, self._epoch_at_s = len(self._losses), seen.now_s + self.EPOCH_S


def _power(t: _Array, a: float, b: float, c: float, d: float) -> _Array:
    return 1 / (a * t**b + c) + d  # its equation 2


def _slow(t: _Array, a: float, b: float, c: float, d: float) -> _Array:
    return 1 / (a * t**2 + b * t + c) + d  # its equation 3


def _curve(shape: Callable[..., _Array], losses: list[float]) -> Callable[[int], float]:
    """Fit a curve to losses; a flat one where none fits."""
    updates = np.arange(1.0, len(losses) + 1)
    start = [0.01, 0.5, 1 / max(losses[0] - 0.9 * losses[-1], 1e-3), 0.9 * losses[-1]]
    try:
        found, _ = curve_fit(shape, updates, losses, start, bounds=(0, np.inf), maxfev=4_000)
    except (RuntimeError, TypeError):  # no convergence, or fewer losses than parameters
        return lambda _: losses[-1]
    return lambda update: float(shape(np.array(update, float), *found))


def cost(learning: Learning, manager: Static) -> float:
    """Worker-seconds until the target is reached; infinite where it is not."""
    task = make_task(learning.task, learning.options)
    split = learning.data()
    judge = Judge(learning, split.test)
    computer = GradientComputer(task, build_model(task, 0), torch.device("cpu"))
    count = computer.model.parameter_count
    trainer = Trainer(computer.model.state.numpy().copy(), count, learning.optimizer)
    drawn = batches(split.train, learning.batch_size, np.random.default_rng(0))
    now_s = spent = 0.0
    for version in range(1, MOST_UPDATES + 1):
        fleet = manager.fleet
        computer.load(trainer.weights())
        messages = min(fleet)
        samples, squares, loss_sum = 0, 0.0, 0.0
        for place in range(messages):
            share = len(range(place, fleet.group_size, messages))
            found = computer.compute([next(drawn) for _ in range(share)])
            trainer.add(version, found.vector, found.samples)
            samples += found.samples
            squares += squared_norm(found.vector, count) / found.samples
            loss_sum += found.loss_sum
        square = trainer.square(version)
        trainer.apply(version, scale=manager.rate())
        now_s += update_s(fleet)
        spent += fleet.workers * update_s(fleet)
        scatter = Scatter(messages, fleet.group_size, samples, squares)
        manager.see(Seen(version, now_s, scatter, square, loss_sum / samples))
        if version % LOOK_EVERY == 0:
            weights = np.frombuffer(trainer.weights(), np.float32)
            if judge.metric(weights) <= learning.target:
                return spent
    return float("inf")
