"""Makes Redis calls for many jobs at once (`common.redis.port.Exchange`), over one pool.

A call for a job takes one to three steps, each with a few commands. A packet holds a step of every
call under way, so a process that leads a hundred jobs sends no more packets than one that leads a
single job. One thread sends packets: while one is under way, it gathers calls for the next.

The same thread detects the end of processes that hold leases: every process that requests leases
subscribes to the channel of its name, as workers do
(docs/explain/decisions/2026-11-21-presence-by-connection.md).
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

# Versions kept for each leader: a late reader of the previous round still finds its weights.
_MODELS_KEPT = 4
# A worker that is further behind could add nothing to those rounds.
_TRIGGERS_KEPT = 100
# Number of leaders whose snapshots are kept, because the newest may be unusable.
_SNAPSHOTS_KEPT = 3
# An hour: models of an ended leader expire, and a living leader puts its model again.
_MODEL_TTL_MS = 3_600_000
# Ten minutes after the last trigger: rounds are repeated much sooner.
_TRIGGERS_TTL_MS = 600_000
# Interval at which an unchanged leader status is written again, in case a failover lost
# it. In between, only its first bytes (epoch and position) are compared.
_PUT_AGAIN_S = 1.0
_LIKE_BYTES = 40
# XADD's errors for an id that is not above the newest one. The second is its error if the newest
# one is the last possible id.
_NOT_NEWER = ("equal or smaller than the target stream top item", "exhausted the last possible ID")
# Redis 6.2 truncates 0.001 to zero, which means an unlimited wait.
_SHORTEST_S = 0.002
# Delay of calls that are not urgent, so that they share packets.
LAZY_S = 0.05
# Polling interval of the subscriptions of lease holders; a poll takes 0.1 ms.
LOOK_S = 0.025
# Consecutive polls without a subscriber after which a holder has ended. A holder that has only lost
# its connection subscribes again in between.
LOOKS = 2
# Interval if no other process holds a lease, or if this process's own subscription is missing.
SLOW_LOOK_S = 1.0


def open_leader_boards(settings: Settings) -> LeaderBoards:
    """Open the use of Redis by a process that leads jobs; see `open_boards`."""
    return RedisLeaderBoards(settings.redis, access=redis_access(settings))


class RedisLeaderBoards(RedisBoards):
    """The `LeaderBoards` port. Safe to use from several threads."""

    def board(self, job: str) -> RedisLeaderBoard:
        """Open a job's board. Closing it releases its own resources only."""
        return RedisLeaderBoard(self.url, job, shared=self.client)

    def replies(self, replica: str) -> RedisReplies:
        """Open the replies to a replica."""
        return RedisReplies(self.client, replica)

    def exchange(self) -> RedisExchange:
        """Open an exchange."""
        return RedisExchange(self.server, self.board)


class RedisLeaderBoard(RedisBoard):
    """The `LeaderBoard` port. Safe to use from several threads."""

    def put_model(self, model: ModelId, weights: bytes | memoryview) -> None:
        """Publish a model, and delete this leader's version of four updates ago."""
        forgotten = ModelId(model.epoch, model.version - _MODELS_KEPT)
        self._server.ask(
            ("SET", self._model(model), memoryview(weights).cast("B"), "PX", _MODEL_TTL_MS),
            ("UNLINK", self._model(forgotten)),
        )

    def post_trigger(self, trigger: UpdateTrigger, stream: str = "") -> bool:
        """Append to a stream of triggers; False if another entry blocks the id."""
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
            # True if the entry is ours and only the earlier answer was lost.
            return ours
        return True

    def put_leader_status(self, leader_status: LeaderStatus) -> bool:
        """Write the leader's status; return False if there was none before."""
        return self.follow(self.putting_leader_status(leader_status))

    def putting_leader_status(self, leader_status: LeaderStatus) -> Steps[bool]:
        """Run `put_leader_status` in steps."""
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
        """Store this leader's newest hot snapshot; False if another replica holds the lease."""
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
    """Replies to one replica (`common.redis.port.Replies`).

    Args:
        shared: Shared connections.
        replica: Name of the replica.
    """

    def __init__(self, shared: RedisClient, replica: str) -> None:
        self._key = replies_key(replica)
        self._rejections = Rejections()
        self._server = RedisServer(shared, self._key, self._reject_key)

    def pop(self, max_replies: int, timeout_s: float) -> list[tuple[str, Reply]]:
        """Take replies, each with its job; wait for the first one only."""
        deadline = monotonic() + timeout_s
        while True:
            left_s = deadline - monotonic()
            if left_s > 0:
                # One packet: the second command runs once the first one has its answer.
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
        self._rejections.reject("type", f"{key} is not a Redis list of replies")


class LeaseHolders:
    """Detects which processes that hold leases have ended; for one thread.

    A missing subscriber counts only if the holder was subscribed before, on a server on which this
    process has been subscribed all the while. So nobody is taken for dead after a failover, or for
    running an older program, or if the node that is asked does not know the subscriber (cluster
    nodes only know their own).

    Args:
        server: The server.
        name: Name of this process, which subscribes, too.
    """

    def __init__(self, server: RedisServer, name: str) -> None:
        self._server = server
        self._channel = replica_channel(name.encode())
        self._own: Attendance = server.attendance(self._channel)
        # For each holder that was found once: number of consecutive polls since that did not find
        # it.
        self._missed = dict[bytes, int]()
        # True if this process was subscribed at the last poll.
        self.is_subscribed = False
        self.ended: Collection[bytes] = ()

    @property
    def broke(self) -> bool:
        """True if this process was subscribed, and is not any more."""
        return self.is_subscribed and not self._own.stands()

    def look(self, holders: Collection[bytes]) -> None:
        """Stay subscribed, and find out which of these holders have ended.

        Raises:
            UnavailableError: If the server is unavailable.
            OutsideError: If the server does not accept us, or refuses the command.
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
        """Unsubscribe, and forget which holders were found."""
        self._own.end()
        self.is_subscribed, self._missed, self.ended = False, {}, ()


@dataclass(slots=True)
class _Refused:
    """A requested lease that another process holds."""

    holder: bytes
    again: Call
    # When the request expires unless it is repeated.
    until: float


class RedisExchange:
    """Frequent calls of many jobs. Safe to use from several threads.

    Args:
        server: The server of all boards.
        open_board: Opens a job's board.
    """

    def __init__(self, server: RedisServer, open_board: Callable[[str], RedisLeaderBoard]) -> None:
        self._server = server
        self._open_board = open_board
        self._boards = dict[str, RedisLeaderBoard]()
        # Calls by job and kind, in order.
        self._calls = dict[tuple[str, str], Call]()
        self._send_at = float("inf")
        self._closed = False
        # Guards the fields above.
        self._changed = threading.Condition(threading.Lock())
        # Used by the exchange's thread only: refused leases by job.
        self._refused = dict[str, _Refused]()
        # None until a lease is requested.
        self._holders: LeaseHolders | None = None
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
        """Take or renew the lease; report if it is ours, and again if it becomes ours later."""

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
        """Release the lease; nothing is reported."""

        def steps(board: RedisLeaderBoard) -> Steps[None]:
            self._refused.pop(job, None)
            yield from board.releasing_lease(holder)

        # Replaces a request of the lease that was not sent yet.
        self._ask(job, "lease", steps, lambda _: None, soon=True)

    def put_leader_status(
        self,
        job: str,
        leader_status: LeaderStatus,
        on_answer: Callable[[bool | Exception], None],
        *,
        soon: bool,
    ) -> None:
        """Write the leader's status, and report if there was one before."""
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
        """Read the workers' heartbeats and report them."""
        self._ask(job, "alive", RedisLeaderBoard.looking_for_workers, on_answer, soon=soon)

    def close(self) -> None:
        """Send the waiting calls, then end."""
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
            # The later call goes to the end.
            self._calls.pop((job, what), None)
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
        """Wait for calls, or until the holders are due for a poll; return None at the end."""
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
        """Find out which lease holders have ended, and request their leases again."""
        holders, now = self._holders, monotonic()
        if holders is None or (now < self._look_at and not holders.broke):
            return
        self._refused = {job: it for job, it in self._refused.items() if now < it.until}
        try:
            holders.look({refused.holder for refused in self._refused.values()})
        # The next call reports the error.
        except OutsideError:
            holders.end()
        self._look_at = now + (LOOK_S if self._refused and holders.is_subscribed else SLOW_LOOK_S)
        again = {j: it.again for j, it in self._refused.items() if it.holder in holders.ended}
        with self._changed:
            # A newer call for the lease replaces this one.
            for job, call in again.items():
                self._calls.setdefault((job, "lease"), call)
                self._send_at = 0.0
