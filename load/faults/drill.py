"""A job on real processes that is disturbed on purpose and restored each time.

The job uses the counting model with a timed wait as its gradient, and K of its batches always wait.
So the duration of a round is known, and any delay is the cost of the disturbance.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from common.core.audit import audit
from common.data.codecs import codec_of
from common.embedded.services import EmbeddedService, stop_all
from common.kafka.names import control_topic, updates_topic
from common.kafka.read import read_decoded
from common.redis.board import open_board
from common.wire import messages as wire
from load.harness.counting import Aggregation, aggregated, counting_spec
from load.harness.stack import Servers, await_until, check
from load.harness.witness import SeenRound, Witness
from load.throughput.backlog import check_left, produce

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.jobs.spec import JobSpec

# b. Small, because the drill measures the protocol and not how fast records move.
_BATCH_SIZE = 8
_IDS = 64  # distinct ids of records
_UNDISTURBED_ROUNDS = (
    # Number of successive rounds. Each must have one trigger and be shared evenly, and each worker
    # must be in at least one of them.
    10
)
_EVEN_ROUNDS = 5
# Includes processes that load torch on a busy machine.
_TIMEOUT_S = 120.0
# No round takes longer, whatever happens.
_ROUND_S = 30.0


@dataclass(frozen=True)
class Conditions:
    """Conditions of a drill. Each is reported with the result."""

    workers: int = 4
    group_size: int = 4  # K
    gradient_s: float = 0.05  # one batch, a timed wait
    partitions: int = 8
    # Number of weights of the model, which travels inside the trigger.
    weights: int = 64
    aggregation: Aggregation = "board"
    # Batches that a worker may hold, in units of K. With a job's default of 2, some queue runs dry
    # every thirty rounds, and another worker computes two batches.
    waiting_groups: int = 5

    @property
    def share(self) -> int:
        """Largest number of batches per worker in a round that is shared evenly."""
        return -(-self.group_size // self.workers)

    def job(self, name: str, topic: str) -> JobSpec:
        """Return the job."""
        return counting_spec(
            self.weights,
            self.gradient_s,
            name=name,
            streams=[topic],
            batch_size=_BATCH_SIZE,
            group_size=self.group_size,
            waiting_batches=self.waiting_batches,
            aggregation=aggregated(self.aggregation),
        )

    @property
    def waiting_batches(self) -> int:
        """Number of batches that a worker may hold."""
        return self.waiting_groups * self.group_size

    def records_in(self, seconds: float) -> int:
        """Return the number of records that the job can use in this time."""
        return int(seconds / self.gradient_s * self.group_size * _BATCH_SIZE)

    def as_data(self) -> dict[str, Any]:
        """Return the conditions for the JSON file."""
        return {
            **asdict(self),
            "batch_size": _BATCH_SIZE,
            "waiting_batches": self.waiting_batches,
        }


class Drill:
    """A job, its coordinators and workers, and a witness of its rounds.

    Args:
        name: The job's name. Its stream is `<name>-records`.
        seconds: Minimum time that the backlog lasts.
        coordinators: Number of replicas.
        replica: Program of the replicas, and the options appended to its command.
    """

    def __init__(
        self,
        on: Servers,
        name: str,
        conditions: Conditions,
        *,
        seconds: float,
        coordinators: int = 1,
        replica: tuple[str, ...] = ("coordinator",),
    ) -> None:
        self.conditions = conditions
        self.job = name
        self._on = on
        self._board = open_board(on.settings, name)
        self._records = conditions.records_in(seconds)
        topic = f"{name}-records"
        spec = conditions.job(name, topic)
        ids = np.arange(_IDS)
        produce(
            on.log,
            topic,
            conditions.partitions,
            codec_of(spec.records).encode({"id": ids}),
            self._records,
        )
        self._first = on.submit(spec).first
        self.witness = Witness(self._board, on.log, name)
        self.coordinators = [
            on.start(replica[0], f"{name}-coordinator-{n}", *replica[1:])
            for n in range(coordinators)
        ]
        self.workers = [
            on.start("worker", f"{name}-worker-{n}", "--job", name)
            for n in range(conditions.workers)
        ]
        self._since = dict.fromkeys((worker.name for worker in self.workers), 0)

    def close(self) -> None:
        """Stop all processes."""
        self.witness.close()
        stop_all([*self.workers, *self.coordinators])

    def await_undisturbed(self) -> list[SeenRound]:
        """Wait until all workers take part in undisturbed rounds. Returns the last of these rounds.

        Raises:
            NotMeasuredError: If this does not happen, or the backlog ends.
        """
        last = list[SeenRound]()

        def is_undisturbed() -> bool:
            last[:] = self.witness.rounds()[-_UNDISTURBED_ROUNDS - 1 : -1]
            return self._is_undisturbed(last)

        self._await(is_undisturbed, "all workers take part in undisturbed rounds")
        return last

    def members(self) -> int:
        """Return the number of members in the newest round, if members add up among themselves."""
        rounds = self.witness.rounds()
        group = rounds[-1].triggers[-1][1].group if rounds else None
        return len(group.membership.members) if group else 0

    def await_members(self) -> None:
        """Wait until all workers are members, and one of the last two rounds has been applied.

        Raises:
            NotMeasuredError: If this does not happen, or the backlog ends.
        """

        def whole() -> bool:
            rounds = self.witness.rounds()[-2:]
            applied = [each for each in rounds if each.applied_at is not None]
            return bool(applied) and self.members() == len(self.workers)

        self._await(whole, "all workers are members")

    def await_even(self) -> None:
        """Wait until all workers are members and the last rounds were shared evenly.

        Before that some workers hold no batches, because their partitions are not assigned yet.

        Raises:
            NotMeasuredError: If this does not happen, or the backlog ends.
        """
        self.await_members()
        share = self.conditions.share

        def even() -> bool:
            last = self.witness.rounds()[-_EVEN_ROUNDS - 1 : -1]
            return len(last) == _EVEN_ROUNDS and all(each.most_asked() <= share for each in last)

        self._await(even, "all workers receive equally many orders")

    def await_order(self, worker: EmbeddedService) -> SeenRound:
        """Wait for the next round that assigns a batch to a worker."""
        return self.witness.await_begun(
            lambda round_: bool(round_.asked_of(worker.name)), _ROUND_S, f"work for {worker.name}"
        )

    def await_attempt(self) -> SeenRound:
        """Wait until members receive the order to add up the next gradients."""
        return self.witness.await_attempt(_ROUND_S)

    def await_leader(self, after: int) -> SeenRound:
        """Wait for the first round of a later epoch."""
        return self.witness.await_begun(
            lambda round_: round_.model.epoch > after, _ROUND_S, "a trigger of another leader"
        )

    def await_later(self, epoch: int) -> SeenRound:
        """Return the first round of a later epoch, even if it has already begun."""

        def found() -> list[SeenRound]:
            return [each for each in self.witness.rounds() if each.model.epoch > epoch]

        await_until(lambda: bool(found()), _ROUND_S, "a trigger of another leader")
        return found()[0]

    def taken_back(self) -> int:
        """Return the number of updates that a later Lead rolled back, according to both topics."""
        control = read_decoded(self._on.log, control_topic(self.job), wire.decode_claim)
        updates = read_decoded(self._on.log, updates_topic(self.job), wire.decode_audit)
        return audit(self._first, control, updates).taken_back

    def await_applied(self, *rounds: SeenRound) -> None:
        """Wait until these rounds are over."""
        self.witness.await_applied(list(rounds), _ROUND_S)

    def bring_back(self, worker: EmbeddedService) -> None:
        """Restart a worker. `await_undisturbed` then requires a batch claimed after the restart."""
        leader_status = self._board.get_leader_status()
        self._since[worker.name] = (
            leader_status.control_position if leader_status is not None else 0
        )
        worker.restart()

    def start_another(self, number: int) -> EmbeddedService:
        """Start one more worker. The caller stops it."""
        return self._on.start("worker", f"{self.job}-other-{number}", "--job", self.job)

    def await_gradient(self, worker: EmbeddedService) -> SeenRound:
        """Wait for the first update with a gradient of a worker that was started."""

        def took_part() -> list[SeenRound]:
            return [
                each
                for each in self.witness.rounds()
                if each.applied_at is not None and each.asked_of(worker.name)
            ]

        self._await(lambda: bool(took_part()), f"a gradient of {worker.name}", worker)
        return took_part()[0]

    def pids(self) -> list[int]:
        """Process ids of the services."""
        return [service.pid for service in (*self.coordinators, *self.workers)]

    def _await(self, condition: Callable[[], bool], what: str, *others: EmbeddedService) -> None:
        """Wait for a condition while all processes run and records are left."""

        def met() -> bool:
            check([*self.coordinators, *self.workers, *others])
            return condition()

        await_until(met, _TIMEOUT_S, what)
        check_left(self._board, self._records)

    def _is_undisturbed(self, last: list[SeenRound]) -> bool:
        if len(last) < _UNDISTURBED_ROUNDS:
            return False
        if any(each.applied_at is None or len(each.triggers) > 1 for each in last):
            return False
        if any(each.most_asked() > self.conditions.share for each in last):
            return False
        return all(
            any(_takes_part(name, since, each) for each in last)
            for name, since in self._since.items()
        )


def _takes_part(worker: str, since: int, round_: SeenRound) -> bool:
    """True if the round used a batch that the worker claimed after its last start."""
    return any(b.worker == worker and b.offset >= since for b in round_.asked_of(worker))
