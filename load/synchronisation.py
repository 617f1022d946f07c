"""Measures effects of a job's synchronisation: bytes, batches per second, cost to a target.

    python load/synchronisation.py                        # exits 1 if a figure falls short
    python load/synchronisation.py --only traffic_lr_mb --json out/synchronisation.json

Traffic is the size of encoded messages, both ways, on the tasks that workers run.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from common.config.synchronisation import SYNCHRONOUS, SynchronisationSpec
from common.core.messages import Gradient, ModelId, WorkerId
from common.core.spans import Partition
from common.data.records import batches
from common.learning.gradients import GradientComputer
from common.learning.optimizers import OptimizerSettings
from common.learning.significance import Compression, KnownWeights
from common.learning.tasks import build_model, make_task
from common.learning.trainer import Trainer
from common.spot.experiments.arrivals import SimulatedStream, even
from common.spot.experiments.by_protocol import Reassign
from common.spot.experiments.learning import Sgd, Training
from common.spot.experiments.protocol import (
    Delays,
    GradientTimeDraws,
    Learner,
    Protocol,
    SimulatedJob,
    VirtualTime,
)
from common.spot.experiments.results import LearningPoint
from common.wire.messages import encode_offer, encode_reply
from common.wire.vectors import encode_sparse, smallest
from load.harness import report
from load.harness.stack import NotMeasuredError
from load.throughput import slow_worker
from load.throughput.fleets import Static, Tuned, cost
from load.throughput.learning import (
    CLICKS,
    LOOK_EVERY,
    MOST_UPDATES,
    RATINGS,
    Judge,
    Learning,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.core import commands as do
    from common.core.settings import Mode

RECOMMENDED = Compression(significance=1.5)
_WORKER = WorkerId("worker-0")


@dataclass
class Traffic:
    """Bytes sent until the target was reached."""

    updates: int = 0
    up: int = 0  # bytes
    down: int = 0
    reached: bool = False
    metric: float = float("inf")

    @property
    def megabytes(self) -> float:
        """Both ways. Infinite if the target was not reached."""
        return (self.up + self.down) / 1e6 if self.reached else float("inf")


def traffic(learning: Learning, compression: Compression | None, *, sparse: bool = True) -> Traffic:
    """Train until the target is reached, and count the bytes that messages would take.

    Args:
        learning: Task and target.
        compression: Selects the changes of weights sent to workers. None sends all of them.
        sparse: True if gradients and changes of weights may be sent sparse.
    """
    task = make_task(learning.task, learning.options)
    split = learning.data()
    judge = Judge(learning, split.test)
    computer = GradientComputer(task, build_model(task, 0), torch.device("cpu"))
    first = computer.model.state.numpy().copy()
    trainer = Trainer(first, computer.model.parameter_count, learning.optimizer)
    view = KnownWeights(
        first, computer.model.parameter_count, compression or Compression(significance=0)
    )
    drawn = batches(split.train, learning.batch_size, np.random.default_rng(0))
    found = Traffic()
    while not found.reached and found.updates < MOST_UPDATES:
        for worker in range(learning.workers):
            computer.load(view.weights)
            summed = computer.compute([next(drawn)])
            vector = smallest(summed.sparse) if sparse else summed.vector
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
        changes = view.follow(weights, found.updates)
        whole = encode_offer(ModelId(1, found.updates), trainer.weights())
        message = whole if changes is None or not sparse else encode_sparse(changes)
        found.down += learning.workers * len(message)
        if found.updates % LOOK_EVERY == 0:
            found.metric = judge.metric(weights)
            found.reached = found.metric <= learning.target
    return found


# --- batches per second, in virtual time ----------------------------------------------------------

GRADIENT_S = 0.05  # one batch
_ROUNDS = 400
# Minimum number of rounds per worker in `_per_worker`.
_ROUNDS_EACH = 60
# Share of the updates that are not counted, because not all workers are at work yet.
_BEGINNING = 0.2
_PAIRS = 3
# Standard deviation of a gradient's time relative to its mean.
_JITTER = 0.2
# Records/s of a backlog.
_PLENTY_PER_S = 1e5
_LINK_S = 0.004  # one message
# Number of updates of all runs, and of those staler than allowed.
_audited = Counter[str]()


def _backlogs(count: int) -> list[SimulatedStream]:
    return [SimulatedStream(Partition("s", n), even(_PLENTY_PER_S, 0.5)) for n in range(count)]


def _protocol(
    time: VirtualTime,
    job: SimulatedJob,
    streams: Sequence[SimulatedStream],
    learner: Learner,
    variation: float = _JITTER,
    link_s: float = 0.0,
) -> Protocol:
    times = GradientTimeDraws(GRADIENT_S, variation, np.random.default_rng(1))
    return Protocol(time, job, list(streams), times, learner, Delays(link_s=link_s))


def _run(time: VirtualTime, protocol: Protocol) -> None:
    time.run()
    _audited.update(updates=len(protocol.staleness), too_stale=protocol.too_stale)


def batches_per_s(
    speeds: Sequence[float], job: SimulatedJob, *, variation: float = _JITTER, link_s: float = 0.0
) -> float:
    """Return the batches/s that a fleet puts into updates, with a backlog in all streams."""
    time, streams = VirtualTime(), _backlogs(len(speeds))
    protocol = _protocol(time, job, streams, Learner(), variation, link_s)
    for speed, stream in zip(speeds, streams, strict=True):
        protocol.join(speed).own([stream])
    _run(time, protocol)
    begun = round(_BEGINNING * job.updates)
    applied_s = protocol.update_times_s
    return job.group_size * (job.updates - 1 - begun) / (applied_s[-1] - applied_s[begun])


def _gain_with_a_slow_one(given: SynchronisationSpec) -> float:
    """Return the gain in batches/s over a fleet whose every update waits for the slow worker."""
    all_slow = batches_per_s([0.25] * 8, SimulatedJob(8, 1, _ROUNDS, GRADIENT_S), variation=0.0)
    job = SimulatedJob(8, 1, _ROUNDS, GRADIENT_S, given)
    return batches_per_s([*[1.0] * 7, 0.25], job) / all_slow


def _per_worker(size: int) -> float:
    """Return batches/s per worker with four local steps.

    All workers share a link, and each message occupies it for 4 ms.
    """
    local_steps = SynchronisationSpec(mode="asynchronous", local_rate=0.1)
    job = SimulatedJob(4, 1, max(_ROUNDS, _ROUNDS_EACH * size), GRADIENT_S, local_steps)
    return batches_per_s([1.0] * size, job, link_s=_LINK_S) / size


@dataclass
class _Counted(Learner):
    """Counts updates and the rounds that were begun and discarded.

    Args:
        applied: Called after each update with the number of updates so far.
    """

    applied: Callable[[int], None]
    updates: int = 0
    discarded: int = 0

    def apply(self, command: do.Apply, now: float) -> None:
        """Count an update."""
        del command, now
        self.updates += 1
        self.applied(self.updates)

    def discard(self, round_: int) -> None:
        """Count a discarded round."""
        del round_
        self.discarded += 1


_ALL_ROUNDS = 4000
_BY_RULE = {
    "when": {"busy_below": 0.4},
    "mode": "asynchronous",
    "group_size": 4,
    "staleness": 64,
    "local_rate": 0.1,
}


def switches() -> report.Figure:
    """Count the switches of mode: 16 workers share a link, and 8 of them leave half-way.

    A rule chooses four local steps while workers compute for less than 40 % of their time.

    Raises:
        NotMeasuredError: If a switch discarded a round.
    """
    time, streams = VirtualTime(), _backlogs(16)
    given = SynchronisationSpec.model_validate({"rules": (_BY_RULE,)})
    job = SimulatedJob(16, 1, _ALL_ROUNDS, GRADIENT_S, given)

    modes: list[Mode | None] = []

    def applied(updates: int) -> None:
        leader = protocol.coordinator.leader
        modes.append(None if leader is None else leader.mode)
        if updates == _ALL_ROUNDS:
            time.stop()
        elif updates == _ALL_ROUNDS // 2:
            for gone, other in zip(machines[:8], machines[8:], strict=True):
                protocol.preempt(gone)
                other.own(list(gone.streams.values()))

    learner = _Counted(applied)
    protocol = _protocol(time, job, streams, learner, link_s=_LINK_S)
    machines = [protocol.join(1.0) for _ in streams]
    for machine, stream in zip(machines, streams, strict=True):
        machine.own([stream])
    _run(time, protocol)
    if learner.discarded:
        raise NotMeasuredError(f"{learner.discarded} rounds were lost at a switch")
    found = sum(one != two for one, two in pairwise(modes))
    name = f"switches in {learner.updates:,} rounds of 16, then 8"
    return report.Figure(name, found, 0, least=2, most=2)


# --- a fleet that grows ---------------------------------------------------------------------------

_SLOTS = 8
_JOIN_EVERY_S = 4.0
_LONGEST_S = 120.0
_SEEDS = 5
# A single worker trains at this rate. At 30 it diverges.
_GROWING = replace(RATINGS, optimizer=OptimizerSettings("sgd", 20.0), workers=_SLOTS, target=0.8185)


def seconds_to_target(
    learning: Learning, given: SynchronisationSpec, rate: float, seed: int
) -> float:
    """Return the time to the target with K = 1, while workers join one after the other.

    Args:
        learning: Task and target. Its `workers` streams are shared by the workers present.
        given: Synchronisation mode.
        rate: Factor of the learning rate.
        seed: Seed of the first weights and of the timing.

    Returns:
        Virtual seconds, or inf if the target was not reached.
    """
    time, split = VirtualTime(), learning.data()
    judge = Judge(learning, split.test)

    def look(version: int, now: float, weights: memoryview) -> LearningPoint:
        metric = judge.metric(weights)
        if metric <= learning.target:
            time.stop()
        return LearningPoint(version, now, 0.0, metric)

    optimizer = replace(learning.optimizer, learning_rate=learning.optimizer.learning_rate * rate)
    task = make_task(learning.task, learning.options)
    training = Training(task, split.train, optimizer, look, LOOK_EVERY)
    learner = Sgd(training, learning.workers, given.fixed_staleness, seed)
    streams = _backlogs(learning.workers)
    most = round(_LONGEST_S * learning.workers / GRADIENT_S)
    job = SimulatedJob(1, learning.batch_size, most, GRADIENT_S, given)
    protocol = _protocol(time, job, streams, learner)

    group = Reassign(time, streams)

    def join(place: int) -> None:
        group.join(place, protocol.join(1.0))

    for place in range(learning.workers):
        time.at(place * _JOIN_EVERY_S, join, place)
    time.at(_LONGEST_S, time.stop)
    _run(time, protocol)
    last = learner.curve[-1]
    return last.at_s if last.loss <= learning.target else float("inf")


def damped_over_slots(learning: Learning, seeds: int) -> float:
    """Return the time to the target at rate / (1 + staleness), relative to that at rate / slots."""
    mode = SynchronisationSpec(mode="asynchronous", staleness=8 * learning.workers)
    damped = mode.model_copy(update={"damped": True})
    medians_s = [
        median([seconds_to_target(learning, given, rate, seed) for seed in range(seeds)])
        for given, rate in ((damped, 1.0), (mode, 1 / learning.workers))
    ]
    return medians_s[0] / medians_s[1]


# --- cost of a fleet, in virtual time -------------------------------------------------------------

_FLEET = 24  # workers, and K
_LEARNED = {
    "clicks": replace(
        CLICKS, batch_size=64, target=0.5005, optimizer=replace(CLICKS.optimizer, learning_rate=1.0)
    ),
    "ratings": replace(RATINGS, batch_size=32, target=0.8185),
}


def _tuned_cost(name: str, most: float) -> report.Figure:
    learning = _LEARNED[name]
    share = cost(learning, Tuned(_FLEET)) / cost(learning, Static(_FLEET))
    return report.Figure(f"{name}: cost over a static fleet's, Tuned", share, 2, most=most)


def audit_stale() -> report.Figure:
    """Return the number of updates in all other figures that were staler than allowed.

    Raises:
        NotMeasuredError: If no other figure was measured.
    """
    if not _audited["updates"]:
        raise NotMeasuredError("audit_stale needs another figure of virtual time beside it")
    name = f"updates staler than they may be, of {_audited['updates']:,}"
    return report.Figure(name, _audited["too_stale"], 0, most=0)


FIGURES: dict[str, Callable[[], report.Figure]] = {
    # Targets: test loss 0.507 and test RMSE 0.815. Dense messages take 1,537 and 532 MB,
    # uncompressed sparse ones 52 and 295.
    "traffic_lr_mb": lambda: report.Figure(
        "MB both ways, clicks", traffic(CLICKS, RECOMMENDED).megabytes, 1, most=22
    ),
    "traffic_pmf_mb": lambda: report.Figure(
        "MB both ways, ratings", traffic(RATINGS, RECOMMENDED).megabytes, 1, most=60
    ),
    # One of eight workers is four times slower, K = 8. `slow_worker_real` uses processes whose
    # gradients sleep.
    "slow_worker_s0": lambda: report.Figure(
        "batches/s, one slow, s = 0", _gain_with_a_slow_one(SYNCHRONOUS), 2, least=1.9
    ),
    "slow_worker_s1": lambda: report.Figure(
        "batches/s, one slow, s = 1",
        _gain_with_a_slow_one(SynchronisationSpec(mode="stale")),
        2,
        least=3.0,
    ),
    "slow_worker_real": lambda: report.Figure(
        "batches/s, one slow, s = 1, processes", slow_worker.gain("apache", _PAIRS), 2, least=2.3
    ),
    # One worker makes 19.1 batches/s. With 32, the link allows each 15.6, which is 0.82: one
    # gradient of four batches takes two messages.
    "fleet_32_share": lambda: report.Figure(
        "batches/s per worker, 32 over 1", _per_worker(32) / _per_worker(1), 2, least=0.85
    ),
    "fleet_32_link": lambda: report.Figure(
        "batches/s of 32 over the link's", _per_worker(32) / (4 / (2 * _LINK_S) / 32), 2, least=0.95
    ),
    # A worker joins every four seconds, up to eight. Ratings, K = 1, medians of five seeds.
    "growing_fleet": lambda: report.Figure(
        "s to target, fleet 1 to 8, damped", damped_over_slots(_GROWING, _SEEDS), 2, most=0.75
    ),
    "switches": switches,
    # Targets: test loss 0.5005 and test RMSE 0.8185, starting at K = p = 24, with messages of 1.5
    # ms.
    "tuner_lr_cost": lambda: _tuned_cost("clicks", 0.25),
    "tuner_pmf_cost": lambda: _tuned_cost("ratings", 1.0),
    "audit_stale": audit_stale,
}


def main() -> int:
    """Measure, report, and check the bars."""
    parser = report.parser(
        __doc__, "python load/synchronisation.py --only traffic_lr_mb", kafka=False
    )
    parser.add_argument("--only", choices=FIGURES, nargs="+", default=list(FIGURES))
    given = parser.parse_args()
    # Batches are too small for more threads.
    torch.set_num_threads(1)
    return report.measure_figures("Synchronisation", given, FIGURES)


if __name__ == "__main__":
    sys.exit(report.run(main))
