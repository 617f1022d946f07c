"""Redis in memory: the notice board for tests and simulations, held to the same contract.

A `MemoryRedis` is the server, each `MemoryBoard` of it one process's view of one job. What is kept
are the bytes of the wire, so that nothing passes here that would not pass there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from common.core.liveness import STATUSES, Heartbeat
from common.core.messages import LeaderStatus, ModelId, Reply, TriggerId, UpdateTrigger, WorkerId
from common.errors import UnavailableError
from common.redis.boards import field_of, parsed_record
from common.redis.port import Board, LiveStatus, live_status
from common.telemetry.logging import Rejections
from common.wire import messages as wire

if TYPE_CHECKING:
    from common.core.job_placement import JobDemand, WorkerPlacement

T = TypeVar("T")

_MODELS_KEPT = 4  # these five as in Redis
_TRIGGERS_KEPT = 100
_SNAPSHOTS_KEPT = 3
_LONGEST_LEASE = 10


@dataclass
class JobKeys:
    """Everything that one job has on the server; open, so that a test can put garbage into it."""

    models: dict[ModelId, bytes] = field(default_factory=dict)
    offered: bytes | None = None
    # By stream; ascending.
    triggers: dict[str, dict[TriggerId, bytes]] = field(default_factory=dict)
    unable: dict[str, tuple[str, float]] = field(default_factory=dict)  # why, until when
    leader_status: bytes | None = None
    # By worker, and until when.
    heartbeats: dict[WorkerId, tuple[Heartbeat, float]] = field(default_factory=dict)
    lease: tuple[str, float] | None = None  # holder, until when
    snapshots: dict[int, bytes] = field(default_factory=dict)  # by epoch
    whole_snapshots: dict[int, bytes] = field(default_factory=dict)  # likewise
    groups: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)  # entries, by name


class MemoryRedis:
    """The server that several boards share.

    Args:
        clock: Seconds that never go back; beats and leases run out by it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.changed = threading.Condition()  # guards all that follows
        self.jobs: dict[str, JobKeys] = {}
        self.spread: dict[str, bytes] = {}  # see `common.redis.memory`
        self.replies = dict[str, list[bytes]]()  # by replica
        self.away = False

    def kill(self) -> None:
        """Go away; every call fails until `restart`."""
        with self.changed:
            self.away = True
            self.changed.notify_all()

    def restart(self) -> None:
        """Come back empty."""
        with self.changed:
            self.jobs, self.spread, self.away = {}, {}, False
            self.replies.clear()
            self.changed.notify_all()

    def reach(self) -> None:
        """See that the server answers; the lock must be held.

        Raises:
            UnavailableError: If it does not.
        """
        if self.away:
            raise UnavailableError("the server is unavailable")

    def notices(self, job: str) -> JobKeys:
        """Return what a job has on the server; the lock must be held.

        Raises:
            UnavailableError: If the server does not answer.
        """
        self.reach()
        return self.jobs.setdefault(job, JobKeys())

    def poll(self, look: Callable[[], list[T]], timeout_s: float) -> list[T]:
        """Look until something is found or the time is over; return what is found."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while not (found := look()) and (left_s := deadline - time.monotonic()) > 0:
                self.changed.wait(left_s)
            return found


class MemoryBoards:
    """The boards of all jobs in a `MemoryRedis`; may be shared between threads."""

    def __init__(self, server: MemoryRedis) -> None:
        self._server = server

    def board(self, job: str) -> MemoryBoard:
        return MemoryBoard(self._server, job)

    def live_statuses(self, boards: Sequence[Board]) -> list[LiveStatus | Exception]:
        return list(map(live_status, boards))

    def replies(self, replica: str) -> MemoryReplies:
        return MemoryReplies(self._server, replica)

    def exchange(self) -> MemoryExchange:
        return MemoryExchange(self._server)

    def roster(self) -> MemoryRoster:
        return MemoryRoster(self._server)

    def rendezvous(self, job: str) -> MemoryRendezvous:
        return MemoryRendezvous(self._server, job)

    def close(self) -> None:
        """There are no connections."""


class MemoryReplies:
    """What workers sent to one replica (`common.redis.port.Replies`)."""

    def __init__(self, server: MemoryRedis, replica: str) -> None:
        self._server = server
        self._replica = replica
        self._rejections = Rejections()

    def pop(self, max_replies: int, timeout_s: float) -> list[tuple[str, Reply]]:
        """Take replies, each with its job; waits for the first one only."""

        def take() -> list[tuple[str, Reply]]:
            self._server.reach()
            waiting = self._server.replies.get(self._replica, [])
            taken, waiting[:] = waiting[:max_replies], waiting[max_replies:]
            parsed = (self._rejections.parse("reply", wire.decode_reply, it) for it in taken)
            return [each for each in parsed if each is not None]

        return self._server.poll(take, timeout_s)


class MemoryExchange:
    """Asks the boards of many jobs (`common.redis.port.Exchange`): each at once, by itself."""

    def __init__(self, server: MemoryRedis) -> None:
        self._server = server

    def _open_board(self, job: str) -> MemoryBoard:
        return MemoryBoard(self._server, job)

    def hold_lease(
        self,
        job: str,
        holder: str,
        ttl_s: float,
        on_answer: Callable[[bool | Exception], None],
        *,
        soon: bool,  # noqa: ARG002 -- everything is sent soon here
    ) -> None:
        """Take or prolong the lease; told once whether it is ours."""
        _answer_at_once(lambda: self._open_board(job).hold_lease(holder, ttl_s), on_answer)

    def release_lease(self, job: str, holder: str) -> None:
        """Give the lease back; nobody is told."""
        _answer_at_once(lambda: self._open_board(job).release_lease(holder), lambda _: None)

    def put_leader_status(
        self,
        job: str,
        leader_status: LeaderStatus,
        on_answer: Callable[[bool | Exception], None],
        *,
        soon: bool,  # noqa: ARG002 -- likewise
    ) -> None:
        """Write the leader's status; told whether one was there."""
        _answer_at_once(lambda: self._open_board(job).put_leader_status(leader_status), on_answer)

    def alive(
        self,
        job: str,
        on_answer: Callable[[dict[WorkerId, Heartbeat] | Exception], None],
        *,
        soon: bool,  # noqa: ARG002 -- likewise
    ) -> None:
        """Look for the heartbeats of workers, and report them."""
        _answer_at_once(self._open_board(job).heartbeats, on_answer)

    def close(self) -> None:
        """Nothing waits."""


def _answer_at_once(ask: Callable[[], T], on_answer: Callable[[T | Exception], None]) -> None:
    answer: T | Exception
    try:
        answer = ask()
    except UnavailableError as error:
        answer = error
    on_answer(answer)


class MemoryBoard:
    """One job's notice board in a `MemoryRedis`; may be shared between threads."""

    def __init__(self, server: MemoryRedis, job: str) -> None:
        self._server = server
        self._job = job
        self._rejections = Rejections()
        self._workers = set[WorkerId]()  # that beat through this board

    def put_model(self, model: ModelId, weights: bytes | memoryview) -> None:
        """Publish a model; this leader's version of four updates ago is forgotten."""
        with self._server.changed:
            models = self._notices().models
            models[model] = bytes(weights)
            models.pop(ModelId(model.epoch, model.version - _MODELS_KEPT), None)

    def get_model(self, model: ModelId) -> bytes | None:
        with self._server.changed:
            return self._notices().models.get(model)

    def offer_model(self, model: ModelId, weights: bytes | memoryview) -> None:
        with self._server.changed:
            self._notices().offered = wire.encode_offer(model, weights)

    def offered_model(self, known: ModelId | None = None) -> tuple[ModelId, bytes] | None:
        with self._server.changed:
            offer = self._notices().offered
        if not offer or (known is not None and offer.startswith(wire.encode_offer(known, b""))):
            return None
        return self._rejections.parse("offer", wire.decode_offer, offer)

    def post_trigger(self, trigger: UpdateTrigger, stream: str = "") -> bool:
        data = wire.encode_trigger(trigger)
        with self._server.changed:
            triggers = self._notices().triggers.setdefault(stream, {})
            newest = max(triggers, default=TriggerId(-1, 0))
            if newest >= trigger.id:
                return newest == trigger.id and triggers[newest] == data
            triggers[trigger.id] = data
            for old in sorted(triggers)[:-_TRIGGERS_KEPT]:
                del triggers[old]
            self._server.changed.notify_all()
            return True

    def triggers(self, after: TriggerId, timeout_s: float, stream: str = "") -> list[UpdateTrigger]:
        def look() -> list[UpdateTrigger]:
            nonlocal after
            there = self._notices().triggers.get(stream, {})
            newer = {it: data for it, data in there.items() if it > after}
            after = max(newer, default=after)  # garbage alone: go on behind it
            return self._parsed(newer.values())

        return self._server.poll(look, timeout_s)

    def push_reply(self, reply: Reply, to: str) -> None:
        data = wire.encode_reply(self._job, reply)
        with self._server.changed:
            self._notices()
            self._server.replies.setdefault(to, []).append(data)
            self._server.changed.notify_all()

    def put_leader_status(self, leader_status: LeaderStatus) -> bool:
        with self._server.changed:
            notices = self._notices()
            before, notices.leader_status = (
                notices.leader_status,
                wire.encode_leader_status(leader_status),
            )
            return before is not None

    def get_leader_status(self) -> LeaderStatus | None:
        with self._server.changed:
            data = self._notices().leader_status
        if data is None:
            return None
        return self._rejections.parse("leader status", wire.decode_leader_status, data)

    def beat(self, worker: WorkerId, status: str, ttl_s: float, digest: str = "") -> None:
        """Say that a worker lives, for `ttl_s`, and what `Heartbeat` has."""
        with self._server.changed:
            until = self._server.clock() + ttl_s
            self._notices().heartbeats[worker] = Heartbeat(status, digest), until
            self._workers.add(worker)

    def heartbeats(self) -> dict[WorkerId, Heartbeat]:
        """Return the beat of each worker that has not run out."""
        with self._server.changed:
            heartbeats, now = self._notices().heartbeats, self._server.clock()
            for worker in [worker for worker, (_, until) in heartbeats.items() if until <= now]:
                del heartbeats[worker]
            found = {worker: beat for worker, (beat, _) in heartbeats.items()}
        for worker, beat in list(found.items()):
            if beat.status not in STATUSES:
                self._rejections.reject("status", f"alive is {beat!r}, expected {STATUSES}")
                del found[worker]
        return found

    def hold_lease(self, holder: str, ttl_s: float) -> bool:
        with self._server.changed:
            notices, now = self._notices(), self._server.clock()
            current, until = notices.lease or (holder, now)
            if current != holder and 0 < until - now <= _LONGEST_LEASE * ttl_s:
                return False
            notices.lease = (holder, now + ttl_s)
            return True

    def release_lease(self, holder: str) -> None:
        with self._server.changed:
            notices = self._notices()
            if notices.lease is not None and notices.lease[0] == holder:
                notices.lease = None

    def is_leased(self) -> bool:
        """Whether anybody holds the lease."""
        with self._server.changed:
            lease = self._notices().lease
            return lease is not None and self._server.clock() < lease[1]

    def put_unable(self, process: str, reason: str, ttl_s: float) -> None:
        """Say, for so long, why a process cannot lead the job, or join it."""
        with self._server.changed:
            self._notices().unable[process] = (reason, self._server.clock() + ttl_s)

    def unable(self) -> dict[str, str]:
        """Why processes cannot do their part, by what they call themselves."""
        with self._server.changed:
            unable, now = self._notices().unable, self._server.clock()
            return {replica: why for replica, (why, until) in unable.items() if now < until}

    def put_snapshot(self, epoch: int, data: bytes, holder: str) -> bool:
        """Keep this leader's newest hot snapshot; False where another holds the lease."""
        with self._server.changed:
            current, until = self._notices().lease or (holder, 0.0)
            if current != holder and self._server.clock() < until:
                return False
            snapshots = self._notices().snapshots
            snapshots[epoch] = data
            for old in sorted(snapshots)[:-_SNAPSHOTS_KEPT]:
                del snapshots[old]
                self._notices().whole_snapshots.pop(old, None)
            return True

    def put_whole_snapshot(self, epoch: int, data: bytes) -> None:
        """Keep a hot snapshot of this leader with the weights."""
        with self._server.changed:
            self._notices().whole_snapshots[epoch] = data

    def snapshots(
        self, epoch: int | None = None, most: int | None = None, *, whole: bool = False
    ) -> list[bytes]:
        with self._server.changed:
            notices = self._notices()
            found = dict(sorted(notices.snapshots.items(), reverse=True))
            if whole:
                found |= {e: d for e, d in notices.whole_snapshots.items() if e in found}
            return [data[:most] for each, data in found.items() if epoch in (None, each)]

    def wipe(self) -> None:
        with self._server.changed:
            self._notices()
            del self._server.jobs[self._job]

    def close(self) -> None:
        """Take its beats with it, as the end of its process would."""
        with self._server.changed:
            for worker in self._workers:
                self._server.jobs[self._job].heartbeats.pop(worker, None)

    def _notices(self) -> JobKeys:
        return self._server.notices(self._job)

    def _parsed(self, data: Iterable[bytes]) -> list[UpdateTrigger]:
        parsed = (self._rejections.parse("trigger", wire.decode_trigger, each) for each in data)
        return [trigger for trigger in parsed if trigger is not None]


class MemoryRendezvous:
    """Where members of a job's groups find each other; may be shared between threads."""

    def __init__(self, server: MemoryRedis, job: str) -> None:
        self._server = server
        self._job = job

    def leave(self, name: str, key: str, value: bytes) -> None:
        with self._server.changed:
            self._left(name).append((key, value))
            self._server.changed.notify_all()

    def entries(self, name: str, after: str, timeout_s: float) -> list[tuple[str, str, bytes]]:
        known = int(after or 0)
        left = self._server.poll(lambda: self._left(name)[known:], timeout_s)
        return [(str(n), *entry) for n, entry in enumerate(left, known + 1)]

    def _left(self, name: str) -> list[tuple[str, bytes]]:
        return self._server.notices(self._job).groups.setdefault(name, [])


class MemoryRoster:
    """One process's view of them; may be shared between threads."""

    def __init__(self, server: MemoryRedis) -> None:
        self._server = server
        self._rejections = Rejections()

    def put(self, records: Sequence[JobDemand | WorkerPlacement]) -> None:
        fields = dict(map(field_of, records))
        with self._server.changed:
            self._records().update(fields)

    def read(self) -> list[JobDemand | WorkerPlacement]:
        with self._server.changed:
            fields = dict(self._records())
        found = (parsed_record(*each, self._rejections) for each in fields.items())
        return [record for record in found if record is not None]

    def remove(self, jobs: Collection[str] = (), workers: Collection[str] = ()) -> None:
        with self._server.changed:
            for field in (*(f"job:{it}" for it in jobs), *(f"worker:{it}" for it in workers)):
                self._records().pop(field, None)

    def _records(self) -> dict[str, bytes]:
        self._server.reach()
        return self._server.spread
