"""Redis in memory, for tests and simulations, under the same contract.

A `MemoryRedis` is the server; each `MemoryBoard` is one process's view of one job. Values are kept
in wire format, so that nothing passes here that would not pass in Redis.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from common.core.liveness import STATUSES, Device, Heartbeat
from common.core.messages import LeaderStatus, ModelId, Reply, TriggerId, UpdateTrigger, WorkerId
from common.errors import UnavailableError
from common.redis.boards import field_of, parsed_record
from common.redis.port import Board, LiveStatus, live_status
from common.telemetry.logging import Rejections
from common.wire import messages as wire

if TYPE_CHECKING:
    from common.core.job_placement import JobDemand, WorkerPlacement

T = TypeVar("T")

# The limits of `common.redis.exchange` and `common.redis.board`.
_MODELS_KEPT = 4
_TRIGGERS_KEPT = 100
_SNAPSHOTS_KEPT = 3
_LONGEST_LEASE = 10


@dataclass
class JobKeys:
    """Everything of one job on the server. Public, so that a test can put garbage into it."""

    models: dict[ModelId, bytes] = field(default_factory=dict)
    offered: bytes | None = None
    # Triggers by stream, ascending by id.
    triggers: dict[str, dict[TriggerId, bytes]] = field(default_factory=dict)
    # Reasons and deadlines.
    unable: dict[str, tuple[str, float]] = field(default_factory=dict)
    leader_status: bytes | None = None
    # Heartbeats and deadlines by worker.
    heartbeats: dict[WorkerId, tuple[Heartbeat, float]] = field(default_factory=dict)
    # Holder and deadline.
    lease: tuple[str, float] | None = None
    # Both by epoch.
    snapshots: dict[int, bytes] = field(default_factory=dict)
    whole_snapshots: dict[int, bytes] = field(default_factory=dict)
    # Entries by name.
    groups: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)


class MemoryRedis:
    """The server that several boards share.

    Args:
        clock: Monotonic time in seconds. Heartbeats and leases expire by it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        # Guards the fields below.
        self.changed = threading.Condition()
        self.jobs: dict[str, JobKeys] = {}
        # Values by field; see `common.redis.boards`.
        self.spread: dict[str, bytes] = {}
        # Encoded replies by replica.
        self.replies = dict[str, list[bytes]]()
        self.away = False

    def kill(self) -> None:
        """Become unavailable: every call fails until `restart`."""
        with self.changed:
            self.away = True
            self.changed.notify_all()

    def restart(self) -> None:
        """Become available again, without any data."""
        with self.changed:
            self.jobs, self.spread, self.away = {}, {}, False
            self.replies.clear()
            self.changed.notify_all()

    def reach(self) -> None:
        """Check that the server is available. The caller must hold the lock.

        Raises:
            UnavailableError: If the server is unavailable.
        """
        if self.away:
            raise UnavailableError("the server is unavailable")

    def notices(self, job: str) -> JobKeys:
        """Return a job's data on the server. The caller must hold the lock.

        Raises:
            UnavailableError: If the server is unavailable.
        """
        self.reach()
        return self.jobs.setdefault(job, JobKeys())

    def poll(self, look: Callable[[], list[T]], timeout_s: float) -> list[T]:
        """Call `look` until it finds something or the time is over; return the result."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while not (found := look()) and (left_s := deadline - time.monotonic()) > 0:
                self.changed.wait(left_s)
            return found


class MemoryBoards:
    """The boards of all jobs in a `MemoryRedis`. Safe to use from several threads."""

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
        """Do nothing: there are no connections."""


class MemoryReplies:
    """Replies to one replica (`common.redis.port.Replies`)."""

    def __init__(self, server: MemoryRedis, replica: str) -> None:
        self._server = server
        self._replica = replica
        self._rejections = Rejections()

    def pop(self, max_replies: int, timeout_s: float) -> list[tuple[str, Reply]]:
        """Take replies, each with its job; wait for the first one only."""

        def take() -> list[tuple[str, Reply]]:
            self._server.reach()
            waiting = self._server.replies.get(self._replica, [])
            taken, waiting[:] = waiting[:max_replies], waiting[max_replies:]
            parsed = (self._rejections.parse("reply", wire.decode_reply, it) for it in taken)
            return [each for each in parsed if each is not None]

        return self._server.poll(take, timeout_s)


class MemoryExchange:
    """Makes calls for many jobs (`common.redis.port.Exchange`), each at once and alone."""

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
        """Take or renew the lease, and report once if it is ours."""
        _answer_at_once(lambda: self._open_board(job).hold_lease(holder, ttl_s), on_answer)

    def release_lease(self, job: str, holder: str) -> None:
        """Release the lease; nothing is reported."""
        _answer_at_once(lambda: self._open_board(job).release_lease(holder), lambda _: None)

    def put_leader_status(
        self,
        job: str,
        leader_status: LeaderStatus,
        on_answer: Callable[[bool | Exception], None],
        *,
        soon: bool,  # noqa: ARG002 -- as above
    ) -> None:
        """Write the leader's status, and report if there was one before."""
        _answer_at_once(lambda: self._open_board(job).put_leader_status(leader_status), on_answer)

    def alive(
        self,
        job: str,
        on_answer: Callable[[dict[WorkerId, Heartbeat] | Exception], None],
        *,
        soon: bool,  # noqa: ARG002 -- as above
    ) -> None:
        """Read the workers' heartbeats and report them."""
        _answer_at_once(self._open_board(job).heartbeats, on_answer)

    def close(self) -> None:
        """Do nothing: no call waits."""


def _answer_at_once(ask: Callable[[], T], on_answer: Callable[[T | Exception], None]) -> None:
    answer: T | Exception
    try:
        answer = ask()
    except UnavailableError as error:
        answer = error
    on_answer(answer)


class MemoryBoard:
    """One job's board in a `MemoryRedis`. Safe to use from several threads."""

    def __init__(self, server: MemoryRedis, job: str) -> None:
        self._server = server
        self._job = job
        self._rejections = Rejections()
        # Workers that send heartbeats through this board.
        self._workers = set[WorkerId]()

    def put_model(self, model: ModelId, weights: bytes | memoryview) -> None:
        """Publish a model, and forget this leader's version of four updates ago."""
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
            # Entries that do not parse are skipped like read ones.
            after = max(newer, default=after)
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

    def beat(
        self,
        worker: WorkerId,
        status: str,
        ttl_s: float,
        digest: str = "",
        device: Device | None = None,
        life: str = "",
    ) -> None:
        """Record that a worker lives, for `ttl_s`, with the contents of a `Heartbeat`."""
        with self._server.changed:
            until = self._server.clock() + ttl_s
            self._notices().heartbeats[worker] = Heartbeat(status, digest, device, life), until
            self._workers.add(worker)

    def heartbeats(self) -> dict[WorkerId, Heartbeat]:
        """Return the heartbeats that have not expired."""
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
        """Return True if any replica holds the lease."""
        with self._server.changed:
            lease = self._notices().lease
            return lease is not None and self._server.clock() < lease[1]

    def put_unable(self, process: str, reason: str, ttl_s: float) -> None:
        """Report, for `ttl_s`, why a process cannot lead or join the job."""
        with self._server.changed:
            self._notices().unable[process] = (reason, self._server.clock() + ttl_s)

    def unable(self) -> dict[str, str]:
        """Return why processes cannot do their part, by process name."""
        with self._server.changed:
            unable, now = self._notices().unable, self._server.clock()
            return {replica: why for replica, (why, until) in unable.items() if now < until}

    def put_snapshot(self, epoch: int, data: bytes, holder: str) -> bool:
        """Store this leader's newest hot snapshot; False if another replica holds the lease."""
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
        """Store a hot snapshot of this leader, with weights; a member of its group writes it."""
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
        """Remove this board's heartbeats, as the end of its process would."""
        with self._server.changed:
            for worker in self._workers:
                self._server.jobs[self._job].heartbeats.pop(worker, None)

    def _notices(self) -> JobKeys:
        return self._server.notices(self._job)

    def _parsed(self, data: Iterable[bytes]) -> list[UpdateTrigger]:
        parsed = (self._rejections.parse("trigger", wire.decode_trigger, each) for each in data)
        return [trigger for trigger in parsed if trigger is not None]


class MemoryRendezvous:
    """The rendezvous of a job's groups. Safe to use from several threads."""

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
    """One process's view of the records. Safe to use from several threads."""

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
