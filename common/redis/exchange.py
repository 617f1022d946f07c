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
from typing import TYPE_CHECKING, Any, cast

from common.errors import OutsideError
from common.redis.access import RedisAccess
from common.redis.board import RedisBoard, RedisReplies, replica_channel
from common.redis.port import Board, LiveStatus
from common.redis.rendezvous import RedisRendezvous
from common.redis.roster import RedisRoster
from common.redis.server import RedisServer, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from common.core.liveness import Heartbeat
    from common.core.messages import LeaderStatus, WorkerId
    from common.redis.board import Steps
    from common.redis.server import Attendance, Command

LAZY_S = 0.05  # what is not urgent waits so long for company
LOOK_S = 0.025  # between looks whether holders of leases listen; one takes 0.1 ms
# Looks in a row that find nobody: in between, one whose connection alone broke listens again.
LOOKS = 2
SLOW_LOOK_S = 1.0  # where no other process holds a lease, or this one is not heard itself
_OPEN = RedisAccess()


@dataclass(slots=True)
class _Call:
    """One call of one job."""

    board: RedisBoard
    steps: Callable[[RedisBoard], Steps[Any]]
    on_answer: Callable[[Any], None]


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
    again: _Call
    until: float  # when it counts as given up, where nobody has asked again


@dataclass(slots=True)
class _UnderWay:
    """A call, where it is."""

    call: _Call
    steps: Steps[Any]
    commands: tuple[Command, ...]


class RedisBoards:
    """Opens the boards of all jobs of a process; may be shared between threads.

    Args:
        url: `redis://host:port/db`, `rediss://...` or `unix://path`.
        access: As whom we come, and whom we trust, beyond what the URL says.

    Raises:
        UserError: If the URL or a file of `access` cannot be used.
    """

    def __init__(self, url: str, access: RedisAccess = _OPEN) -> None:
        self._url = url
        self._client = connect(url, access)

    def board(self, job: str) -> RedisBoard:
        """Open a job's board; to close it lets go of its own only."""
        return RedisBoard(self._url, job, shared=self._client)

    def live_statuses(self, boards: Sequence[Board]) -> list[LiveStatus | Exception]:
        """Look at several of these boards in a few packets; of each, what it says or why not."""
        found = dict[Board, LiveStatus | Exception]()
        calls = [
            _Call(board, RedisBoard.reading_live_status, partial(found.__setitem__, board))
            for board in cast("Sequence[RedisBoard]", boards)
        ]
        _exchange(
            RedisServer(self._client, "doll:", _ignore),
            [_UnderWay(call, call.steps(call.board), ()) for call in calls],
        )
        return [found[board] for board in boards]

    def replies(self, replica: str) -> RedisReplies:
        """Open what is sent to a replica."""
        return RedisReplies(self._client, replica)

    def exchange(self) -> RedisExchange:
        """Open an exchange."""
        return RedisExchange(RedisServer(self._client, "doll:", _ignore), self.board)

    def roster(self) -> RedisRoster:
        """Open the records of all jobs and workers."""
        return RedisRoster(self._client)

    def rendezvous(self, job: str) -> RedisRendezvous:
        """Open where members of a job's groups find each other."""
        return RedisRendezvous(self._client, job)

    def close(self) -> None:
        """Let go of all connections."""
        self._client.close()


class RedisExchange:
    """What many jobs ask again and again; may be shared between threads.

    Args:
        server: That all their boards share.
        open_board: Opens a job's board.
    """

    def __init__(self, server: RedisServer, open_board: Callable[[str], RedisBoard]) -> None:
        self._server = server
        self._open_board = open_board
        self._boards = dict[str, RedisBoard]()
        self._calls = dict[tuple[str, str], _Call]()  # by job and what is asked, in order
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

        def steps(board: RedisBoard) -> Steps[bool]:
            if self._holders is None:
                self._holders = LeaseHolders(self._server, holder)
            has_it = yield from board.holding_lease(holder, ttl_s, self._holders.ended)
            if has_it in {b"", holder.encode()}:
                self._refused.pop(job, None)
                return bool(has_it)
            if not self._refused:
                self._look_at = 0.0
            again = _Call(board, steps, on_answer)
            self._refused[job] = _Refused(has_it, again, monotonic() + ttl_s)
            return False

        self._ask(job, "lease", steps, on_answer, soon=soon)

    def release_lease(self, job: str, holder: str) -> None:
        """Give the lease back; nobody is told."""

        def steps(board: RedisBoard) -> Steps[None]:
            self._refused.pop(job, None)
            yield from board.releasing_lease(holder)

        # A lease that was asked for before and is not sent yet need not be.
        self._ask(job, "lease", steps, _ignore, soon=True)

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
        self._ask(job, "alive", RedisBoard.looking_for_workers, on_answer, soon=soon)

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
        steps: Callable[[RedisBoard], Steps[Any]],
        on_answer: Callable[[Any], None],
        *,
        soon: bool,
    ) -> None:
        with self._changed:
            if job not in self._boards:
                self._boards[job] = self._open_board(job)
            self._calls.pop((job, what), None)  # the later one goes to the end
            self._calls[job, what] = _Call(self._boards[job], steps, on_answer)
            send_at = 0.0 if soon else monotonic() + LAZY_S
            if send_at < self._send_at:
                self._send_at = send_at
                self._changed.notify()

    def _run(self) -> None:
        while (calls := self._gathered()) is not None:
            under_way = [_UnderWay(call, call.steps(call.board), ()) for call in calls]
            if _exchange(self._server, under_way):
                self._look()
        if self._holders is not None:
            self._holders.end()

    def _gathered(self) -> list[_Call] | None:
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


def _exchange(server: RedisServer, under_way: list[_UnderWay]) -> bool:
    """Make calls together, a packet for each step; each is told its own answer.

    Returns:
        Whether the server answered.
    """
    under_way = [each for each in under_way if _goes_on(each, None)]
    while under_way:
        packet = [command for each in under_way for command in each.commands]
        try:
            answers = server.send(packet)
        except Exception as error:  # noqa: BLE001 -- told to those who asked, as below
            for each in under_way:
                each.call.on_answer(error)
            return False
        at = 0
        left = []
        for each in under_way:
            own = answers[at : at + len(each.commands)]
            at += len(each.commands)
            if _goes_on(each, own):
                left.append(each)
        under_way = left
    return True


def _goes_on(each: _UnderWay, answers: list[Any] | None) -> bool:
    """Give a call the answers to its step; whether there is another, else it has been told."""
    try:
        if answers is None:
            each.commands = next(each.steps)
        else:
            each.commands = each.steps.send(each.call.board.judged(each.commands, answers))
    except StopIteration as done:
        each.call.on_answer(done.value)
        return False
    except Exception as error:  # noqa: BLE001 -- told to the job that asked: others go on
        each.call.on_answer(error)
        return False
    return True


def _ignore(_: object) -> None:
    pass
