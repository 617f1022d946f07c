"""A job on real processes that is disturbed on purpose, and put in order again each time.

The counting model with a timed wait as its gradient, K of its batches always waiting: what a round
takes is known, and what it takes longer is what the disturbance costs.
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

_BATCH_SIZE = 8  # b: what is measured is the protocol, not how fast records are moved
_IDS = 64  # of records
_UNDISTURBED_ROUNDS = (
    10  # with one trigger each, evenly shared, everybody in one at least: all is well
)
_EVEN_ROUNDS = 5
_TIMEOUT_S = 120.0  # for processes that load torch on a busy machine
_ROUND_S = 30.0  # no round takes longer, whatever happens


@dataclass(frozen=True)
class Conditions:
    """Under which a job is disturbed; all of them are stated with a result."""

    workers: int = 4
    group_size: int = 4  # K
    gradient_s: float = 0.05  # of one batch, a timed wait
    partitions: int = 8
    weights: int = 64  # of the model, which travels inside the trigger
    aggregation: Aggregation = "board"
    # Batches that a worker may hold, in K: with a job's default of 2 some queue runs dry every
    # thirty rounds, and another worker is asked for two batches.
    waiting_groups: int = 5

    @property
    def share(self) -> int:
        """Batches of a round in the fullest hands, where all workers take part evenly."""
        return -(-self.group_size // self.workers)

    def job(self, name: str, topic: str) -> JobSpec:
        """The job."""
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
        """Batches that a worker may hold."""
        return self.waiting_groups * self.group_size

    def records_in(self, seconds: float) -> int:
        """How many records the job can use in a time."""
        return int(seconds / self.gradient_s * self.group_size * _BATCH_SIZE)

    def as_data(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            **asdict(self),
            "batch_size": _BATCH_SIZE,
            "waiting_batches": self.waiting_batches,
        }


class Drill:
    """A job, its coordinators and workers, and a witness of its rounds.

    Args:
        name: The job's name; its stream is `<name>-records`.
        seconds: How long the backlog lasts at least.
        coordinators: How many replicas.
        replica: Which program they are, and what its options end with.
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
        """End all."""
        self.witness.close()
        stop_all([*self.workers, *self.coordinators])

    def await_undisturbed(self) -> list[SeenRound]:
        """Wait until everybody takes part in rounds that nothing disturbs; gives the last of them.

        Raises:
            NotMeasuredError: If it does not come to that, or the backlog ends.
        """
        last = list[SeenRound]()

        def is_undisturbed() -> bool:
            last[:] = self.witness.rounds()[-_UNDISTURBED_ROUNDS - 1 : -1]
            return self._is_undisturbed(last)

        self._await(is_undisturbed, "all workers take part in undisturbed rounds")
        return last

    def members(self) -> int:
        """How many took part in the newest round, where members add up among themselves."""
        rounds = self.witness.rounds()
        group = rounds[-1].triggers[-1][1].group if rounds else None
        return len(group.membership.members) if group else 0

    def await_members(self) -> None:
        """Wait until all workers are members, and an update was made so; busy ones may lag.

        Raises:
            NotMeasuredError: If it does not come to that, or the backlog ends.
        """

        def whole() -> bool:
            rounds = self.witness.rounds()[-2:]
            applied = [each for each in rounds if each.applied_at is not None]
            return bool(applied) and self.members() == len(self.workers)

        self._await(whole, "all workers are members")

    def await_even(self) -> None:
        """Wait until all are members, and each round of the last ones asked everybody alike.

        Before that some hold no batches yet: their partitions are on the way to them.

        Raises:
            NotMeasuredError: If it does not come to that, or the backlog ends.
        """
        self.await_members()
        share = self.conditions.share

        def even() -> bool:
            last = self.witness.rounds()[-_EVEN_ROUNDS - 1 : -1]
            return len(last) == _EVEN_ROUNDS and all(each.most_asked() <= share for each in last)

        self._await(even, "all workers are asked alike")

    def await_order(self, worker: EmbeddedService) -> SeenRound:
        """Wait for the next round that asks something of a worker."""
        return self.witness.await_begun(
            lambda round_: bool(round_.asked_of(worker.name)), _ROUND_S, f"work for {worker.name}"
        )

    def await_attempt(self) -> SeenRound:
        """Wait until members are told to add the next gradients up among themselves."""
        return self.witness.await_attempt(_ROUND_S)

    def await_leader(self, after: int) -> SeenRound:
        """Wait for the first round of a later epoch."""
        return self.witness.await_begun(
            lambda round_: round_.model.epoch > after, _ROUND_S, "a trigger of another leader"
        )

    def await_later(self, epoch: int) -> SeenRound:
        """Wait for the first round of a later epoch, which may have begun before."""

        def found() -> list[SeenRound]:
            return [each for each in self.witness.rounds() if each.model.epoch > epoch]

        await_until(lambda: bool(found()), _ROUND_S, "a trigger of another leader")
        return found()[0]

    def taken_back(self) -> int:
        """Updates that a later Lead took back, by what both topics say."""
        control = read_decoded(self._on.log, control_topic(self.job), wire.decode_claim)
        updates = read_decoded(self._on.log, updates_topic(self.job), wire.decode_audit)
        return audit(self._first, control, updates).taken_back

    def await_applied(self, *rounds: SeenRound) -> None:
        """Wait until these rounds are over."""
        self.witness.await_applied(list(rounds), _ROUND_S)

    def bring_back(self, worker: EmbeddedService) -> None:
        """Start a worker again; `await_undisturbed` awaits batches announced from now on."""
        leader_status = self._board.get_leader_status()
        self._since[worker.name] = (
            leader_status.control_position if leader_status is not None else 0
        )
        worker.restart()

    def start_another(self, number: int) -> EmbeddedService:
        """Start one more worker, which whoever asked for it ends."""
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
        """Wait for something while all processes run and records are left."""

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
    """Whether a worker was asked for a batch that it announced in its present life."""
    return any(b.worker == worker and b.offset >= since for b in round_.asked_of(worker))
