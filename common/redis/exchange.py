"""Asks Redis for many jobs at once (`common.redis.port.Exchange`), with one pool for all.

A call of a job takes one to three steps, each a few commands. A packet holds a step of every call
that is under way, so a process that leads a hundred jobs sends no more packets than one that leads
one. One thread does it: while a packet is on its way, the next one gathers.

The same thread sees when a process that holds leases ends: whoever asks for leases listens to the
channel of its name, as workers do (docs/explain/decisions/2026-11-21-presence-by-connection.md).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from common.core.messages import ModelId
from common.errors import OutsideError
from common.redis.access import redis_access
from common.redis.board import WAIT_S, RedisBoard, entry_id, replica_channel, replies_key
from common.redis.boards import Call, RedisBoards, call_together
from common.redis.server import RedisServer
from common.telemetry.logging import Rejections
from common.wire import messages as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from common.config.settings import Settings
    from common.core.liveness import Heartbeat
    from common.core.messages import LeaderStatus, Reply, UpdateTrigger, WorkerId
    from common.redis.access import RedisClient
    from common.redis.board import Steps
    from common.redis.port import LeaderBoards
    from common.redis.server import Attendance

_MODELS_KEPT = 4  # of one leader: a late reader of the round before still finds its weights
_TRIGGERS_KEPT = 100  # a worker that is further behind has nothing to add to those rounds
_SNAPSHOTS_KEPT = 3  # of as many leaders: the newest may be taken back, or torn
_MODEL_TTL_MS = 3_600_000  # an hour: those of a leader that is gone; a living one puts it again
_TRIGGERS_TTL_MS = 600_000  # ten minutes after the last: a round asks again much sooner
# A leader's status that is as it was is written again so often, for whatever became of it in a
# failover; in between it is only seen to be there, by its first bytes: its epoch and position.
_PUT_AGAIN_S = 1.0
_LIKE_BYTES = 40
# XADD's ways to say that an id is not above the newest: the second where that is the last of all.
_NOT_NEWER = ("equal or smaller than the target stream top item", "exhausted the last possible ID")
_SHORTEST_S = 0.002  # 0.001 is zero to Redis 6.2, which cuts off what it computes: wait for ever
LAZY_S = 0.05  # what is not urgent waits so long for company
LOOK_S = 0.025  # between looks whether holders of leases listen; one takes 0.1 ms
# Looks in a row that find nobody: in between, one whose connection alone broke listens again.
LOOKS = 2
SLOW_LOOK_S = 1.0  # where no other process holds a lease, or this one is not heard itself


def open_leader_boards(settings: Settings) -> LeaderBoards:
    """Open what a process that leads jobs uses of Redis: see `open_boards`."""
    return RedisLeaderBoards(settings.redis, access=redis_access(settings))


class RedisLeaderBoards(RedisBoards):
    """The `LeaderBoards` port; may be shared between threads."""

    def board(self, job: str) -> RedisLeaderBoard:
        """Open a job's board; to close it lets go of its own only."""
        return RedisLeaderBoard(self.url, job, shared=self.client)

    def replies(self, replica: str) -> RedisReplies:
        """Open what is sent to a replica."""
        return RedisReplies(self.client, replica)

    def exchange(self) -> RedisExchange:
        """Open an exchange."""
        return RedisExchange(self.server, self.board)


class RedisLeaderBoard(RedisBoard):
    """The `LeaderBoard` port; may be shared between threads."""

    def put_model(self, model: ModelId, weights: bytes | memoryview) -> None:
        """Publish a model; this leader's version of four updates ago is forgotten."""
        forgotten = ModelId(model.epoch, model.version - _MODELS_KEPT)
        self._server.ask(
            ("SET", self._model(model), memoryview(weights).cast("B"), "PX", _MODEL_TTL_MS),
            ("UNLINK", self._model(forgotten)),
        )

    def post_trigger(self, trigger: UpdateTrigger, stream: str = "") -> bool:
        """Append to a stream of triggers; False where something else keeps this id out."""
        key, name = self._triggers(stream), entry_id(trigger.id)
        data = wire.encode_trigger(trigger)
        try:
            self._server.ask(
                ("XADD", key, "MAXLEN", _TRIGGERS_KEPT, name, "trigger", data),
                ("PEXPIRE", key, _TRIGGERS_TTL_MS),
            )
        except OutsideError as error:
            if not any(said in str(error) for said in _NOT_NEWER):
                raise
            newest = self._server.ask(("XREVRANGE", key, "+", "-", "COUNT", 1))[0]
            ours: bool = newest == [(name.encode(), {b"trigger": data})]
            return ours  # the answer to an earlier call was lost
        return True

    def put_leader_status(self, leader_status: LeaderStatus) -> bool:
        """Write the leader's status; False where none was there."""
        return self.follow(self.putting_leader_status(leader_status))

    def putting_leader_status(self, leader_status: LeaderStatus) -> Steps[bool]:
        """`put_leader_status`, in steps."""
        key, last = self._keys + "leader-status", self._leader_status
        if last is None or last[1] != leader_status:
            last = self._leader_status = wire.encode_leader_status(leader_status), leader_status
        elif monotonic() < self._put_at + _PUT_AGAIN_S:
            begins = (yield (("GETRANGE", key, 0, _LIKE_BYTES - 1),))[0]
            if begins == last[0][:_LIKE_BYTES]:
                return True
        before = (yield (("SET", key, last[0], "GET"),))[0]
        self._put_at = monotonic()
        return before is not None

    def put_snapshot(self, epoch: int, data: bytes, holder: str) -> bool:
        """Keep this leader's newest hot snapshot; those of leaders long gone are forgotten."""
        index, free = self._keys + "snapshots", (None, holder.encode())
        put = ("SET", self._snapshot(epoch), data), ("SADD", index, epoch)
        if not self._server.ask_while(self._keys + "lease", free, *put):
            return False
        old = sorted(self._epochs(index))[:-_SNAPSHOTS_KEPT]
        if old:
            keys = (*map(self._snapshot, old), *map(self._whole_snapshot, old))
            self._server.ask(("UNLINK", *keys), ("SREM", index, *old))
        return True


class RedisReplies:
    """What workers sent to one replica (`common.redis.port.Replies`).

    Args:
        shared: Connections, shared with others.
        replica: Its name.
    """

    def __init__(self, shared: RedisClient, replica: str) -> None:
        self._key = replies_key(replica)
        self._rejections = Rejections()
        self._server = RedisServer(shared, self._key, self._reject_key)

    def pop(self, max_replies: int, timeout_s: float) -> list[tuple[str, Reply]]:
        """Take replies, each with its job; waits for the first one only."""
        deadline = monotonic() + timeout_s
        while True:
            left_s = deadline - monotonic()
            if left_s > 0:
                # in one packet: the second command is served once the first one has its answer
                first, others = self._server.ask(
                    ("BLPOP", self._key, f"{max(_SHORTEST_S, min(left_s, WAIT_S)):.3f}"),
                    ("LPOP", self._key, max_replies - 1),
                )
            else:
                first, others = None, self._server.ask(("LPOP", self._key, max_replies))[0]
            received = [first[1]] if first else []
            received += others or []
            parsed = (self._rejections.parse("reply", wire.decode_reply, each) for each in received)
            found = [each for each in parsed if each is not None]
            if found or left_s <= 0:
                return found

    def _reject_key(self, key: str) -> None:
        self._rejections.reject("type", f"{key} holds another type than replies")


class LeaseHolders:
    """Which processes that hold leases have ended; for one thread.

    That nobody listens says so only of a holder that was heard before, on a server which has heard
    this process all the while. So it is after no failover, of no older program, and not where what
    is asked is not what listens: a cluster's nodes know their own listeners only.

    Args:
        server: That is asked.
        name: Of this process: it listens, too.
    """

    def __init__(self, server: RedisServer, name: str) -> None:
        self._server = server
        self._channel = replica_channel(name.encode())
        self._own: Attendance = server.attendance(self._channel)
        self._missed = dict[bytes, int]()  # looks in a row that did not find a holder heard before
        self.is_subscribed = False  # this process itself, at the last look
        self.ended: Collection[bytes] = ()

    @property
    def broke(self) -> bool:
        """Whether this process was heard, and is not any more."""
        return self.is_subscribed and not self._own.stands()

    def look(self, holders: Collection[bytes]) -> None:
        """Be heard, and look which of these holders have ended.

        Raises:
            UnavailableError: If the server is unavailable.
            OutsideError: If it does not let us in, or does not tell.
        """
        if not self._own.stands():
            self.end()
            self._own.keep()
        channels = [self._channel, *map(replica_channel, holders)]
        counts = self._server.ask(("PUBSUB", "NUMSUB", *channels))[0][1::2]
        self.is_subscribed = bool(counts[0]) and self._own.stands()
        if not self.is_subscribed:
            self.end()
            return
        self._missed = {
            holder: 0 if count else self._missed[holder] + 1
            for holder, count in zip(holders, counts[1:], strict=True)
            if count or holder in self._missed
        }
        self.ended = [holder for holder, missed in self._missed.items() if missed >= LOOKS]

    def end(self) -> None:
        """Listen no more, and forget who was heard."""
        self._own.end()
        self.is_subscribed, self._missed, self.ended = False, {}, ()


@dataclass(slots=True)
class _Refused:
    """A lease that was asked for, and that another process holds."""

    holder: bytes
    again: Call
    until: float  # when it counts as given up, where nobody has asked again


class RedisExchange:
    """What many jobs ask again and again; may be shared between threads.

    Args:
        server: That all their boards share.
        open_board: Opens a job's board.
    """

    def __init__(self, server: RedisServer, open_board: Callable[[str], RedisLeaderBoard]) -> None:
        self._server = server
        self._open_board = open_board
        self._boards = dict[str, RedisLeaderBoard]()
        self._calls = dict[tuple[str, str], Call]()  # by job and what is asked, in order
        self._send_at = float("inf")
        self._closed = False
        self._changed = threading.Condition(threading.Lock())  # guards what is above
        # The thread's own: of leases that others hold, by job.
        self._refused = dict[str, _Refused]()
        self._holders: LeaseHolders | None = None  # once a lease was asked for
        self._look_at = 0.0
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def hold_lease(
        self,
        job: str,
        holder: str,
        ttl_s: float,
        on_answer: Callable[[bool | Exception], None],
        *,
        soon: bool,
    ) -> None:
        """Take or prolong the lease; told whether it is ours, and where it is not, once it is."""

        def steps(board: RedisLeaderBoard) -> Steps[bool]:
            if self._holders is None:
                self._holders = LeaseHolders(self._server, holder)
            has_it = yield from board.holding_lease(holder, ttl_s, self._holders.ended)
            if has_it in {b"", holder.encode()}:
                self._refused.pop(job, None)
                return bool(has_it)
            if not self._refused:
                self._look_at = 0.0
            again = Call(board, partial(steps, board), on_answer)
            self._refused[job] = _Refused(has_it, again, monotonic() + ttl_s)
            return False

        self._ask(job, "lease", steps, on_answer, soon=soon)

    def release_lease(self, job: str, holder: str) -> None:
        """Give the lease back; nobody is told."""

        def steps(board: RedisLeaderBoard) -> Steps[None]:
            self._refused.pop(job, None)
            yield from board.releasing_lease(holder)

        # A lease that was asked for before and is not sent yet need not be.
        self._ask(job, "lease", steps, lambda _: None, soon=True)

    def put_leader_status(
        self,
        job: str,
        leader_status: LeaderStatus,
        on_answer: Callable[[bool | Exception], None],
        *,
        soon: bool,
    ) -> None:
        """Write the leader's status; told whether one was there."""
        self._ask(
            job,
            "leader status",
            lambda board: board.putting_leader_status(leader_status),
            on_answer,
            soon=soon,
        )

    def alive(
        self,
        job: str,
        on_answer: Callable[[dict[WorkerId, Heartbeat] | Exception], None],
        *,
        soon: bool,
    ) -> None:
        """Look for the heartbeats of workers, and report them."""
        self._ask(job, "alive", RedisLeaderBoard.looking_for_workers, on_answer, soon=soon)

    def close(self) -> None:
        """Send what waits, then end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _ask(
        self,
        job: str,
        what: str,
        steps: Callable[[RedisLeaderBoard], Steps[Any]],
        on_answer: Callable[[Any], None],
        *,
        soon: bool,
    ) -> None:
        with self._changed:
            if job not in self._boards:
                self._boards[job] = self._open_board(job)
            self._calls.pop((job, what), None)  # the later one goes to the end
            board = self._boards[job]
            self._calls[job, what] = Call(board, partial(steps, board), on_answer)
            send_at = 0.0 if soon else monotonic() + LAZY_S
            if send_at < self._send_at:
                self._send_at = send_at
                self._changed.notify()

    def _run(self) -> None:
        while (calls := self._gathered()) is not None:
            if call_together(self._server, calls):
                self._look()
        if self._holders is not None:
            self._holders.end()

    def _gathered(self) -> list[Call] | None:
        """Wait for calls, or until it is time to look for holders; None at the end."""
        with self._changed:
            while not self._closed and (left_s := self._due() - monotonic()) > 0:
                self._changed.wait(left_s if left_s < float("inf") else None)
            calls = list(self._calls.values())
            self._calls.clear()
            self._send_at = float("inf")
            return calls if calls or not self._closed else None

    def _due(self) -> float:
        return min(self._send_at, self._look_at) if self._refused else self._send_at

    def _look(self) -> None:
        """See which holders of leases have ended, and ask for their leases again."""
        holders, now = self._holders, monotonic()
        if holders is None or (now < self._look_at and not holders.broke):
            return
        self._refused = {job: it for job, it in self._refused.items() if now < it.until}
        try:
            holders.look({refused.holder for refused in self._refused.values()})
        except OutsideError:  # whoever asks for something next is told
            holders.end()
        self._look_at = now + (LOOK_S if self._refused and holders.is_subscribed else SLOW_LOOK_S)
        again = {j: it.again for j, it in self._refused.items() if it.holder in holders.ended}
        with self._changed:
            for job, call in again.items():  # unless something else was asked meanwhile
                self._calls.setdefault((job, "lease"), call)
                self._send_at = 0.0
