"""Asks Redis for many jobs at once (`common.ports.servers.Exchange`), with one pool for all.

A call of a job takes one to three steps, each a few commands. A packet holds a step of every call
that is under way, so a process that leads a hundred jobs sends no more packets than one that leads
one. One thread does it: while a packet is on its way, the next one gathers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from common.adapters.redis.access import RedisAccess
from common.adapters.redis.board import RedisBoard, RedisReplies
from common.adapters.redis.roster import RedisRoster
from common.adapters.redis.server import RedisServer, connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.adapters.redis.board import Steps
    from common.adapters.redis.server import Command
    from common.core.messages import LeaderStatus, WorkerId

LAZY_S = 0.05  # what is not urgent waits so long for company
_OPEN = RedisAccess()


@dataclass(slots=True)
class _Call:
    """One call of one job."""

    board: RedisBoard
    steps: Callable[[RedisBoard], Steps[Any]]
    tell: Callable[[Any], None]


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
        timeout_s: After so long without an answer the server counts as away.
        access: As whom we come, and whom we trust, beyond what the URL says.

    Raises:
        UserError: If the URL or a file of `access` cannot be used.
    """

    def __init__(self, url: str, timeout_s: float = 5.0, access: RedisAccess = _OPEN) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._client = connect(url, timeout_s, access)

    def board(self, job: str) -> RedisBoard:
        """Open a job's board; to close it lets go of its own only."""
        return RedisBoard(self._url, job, self._timeout_s, shared=self._client)

    def replies(self, replica: str) -> RedisReplies:
        """Open what is sent to a replica."""
        return RedisReplies(self._client, replica, self._timeout_s)

    def exchange(self) -> RedisExchange:
        """Open an exchange."""
        return RedisExchange(RedisServer(self._client, "doll:", _ignore), self.board)

    def roster(self) -> RedisRoster:
        """Open the records of all jobs and workers."""
        return RedisRoster(self._client)

    def close(self) -> None:
        """Let go of all connections."""
        self._client.close()


class RedisExchange:
    """What many jobs ask again and again; may be shared between threads.

    Args:
        server: That all their boards share.
        open_board: Opens a job's board.
        lazy_s: How long what is not urgent waits for company.
    """

    def __init__(
        self,
        server: RedisServer,
        open_board: Callable[[str], RedisBoard],
        lazy_s: float = LAZY_S,
    ) -> None:
        self._server = server
        self._open_board = open_board
        self._lazy_s = lazy_s
        self._boards = dict[str, RedisBoard]()
        self._calls = dict[tuple[str, str], _Call]()  # by job and what is asked, in order
        self._send_at = float("inf")
        self._closed = False
        self._changed = threading.Condition(threading.Lock())  # guards what is above
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def hold_lease(
        self,
        job: str,
        holder: str,
        ttl_s: float,
        tell: Callable[[bool | Exception], None],
        *,
        soon: bool,
    ) -> None:
        """Take or prolong the lease; told whether it is ours."""
        self._ask(job, "lease", lambda board: board.holding_lease(holder, ttl_s), tell, soon=soon)

    def release_lease(self, job: str, holder: str) -> None:
        """Give the lease back; nobody is told."""
        # A lease that was asked for before and is not sent yet need not be.
        self._ask(job, "lease", lambda board: board.releasing_lease(holder), _ignore, soon=True)

    def put_leader_status(
        self,
        job: str,
        leader_status: LeaderStatus,
        tell: Callable[[bool | Exception], None],
        *,
        soon: bool,
    ) -> None:
        """Write the leader's status; told whether one was there."""
        self._ask(
            job,
            "standing",
            lambda board: board.putting_leader_status(leader_status),
            tell,
            soon=soon,
        )

    def alive(
        self, job: str, tell: Callable[[dict[WorkerId, str] | Exception], None], *, soon: bool
    ) -> None:
        """Look for workers; told who is alive, and how."""
        self._ask(job, "alive", RedisBoard.looking_for_workers, tell, soon=soon)

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
        tell: Callable[[Any], None],
        *,
        soon: bool,
    ) -> None:
        with self._changed:
            if job not in self._boards:
                self._boards[job] = self._open_board(job)
            self._calls.pop((job, what), None)  # the later one goes to the end
            self._calls[job, what] = _Call(self._boards[job], steps, tell)
            send_at = 0.0 if soon else monotonic() + self._lazy_s
            if send_at < self._send_at:
                self._send_at = send_at
                self._changed.notify()

    def _run(self) -> None:
        while calls := self._gathered():
            self._exchange([_UnderWay(call, call.steps(call.board), ()) for call in calls])

    def _gathered(self) -> list[_Call]:
        """Wait for calls; none at the end."""
        with self._changed:
            while not self._closed and (left_s := self._send_at - monotonic()) > 0:
                self._changed.wait(left_s if left_s < float("inf") else None)
            calls = list(self._calls.values())
            self._calls.clear()
            self._send_at = float("inf")
            return calls

    def _exchange(self, under_way: list[_UnderWay]) -> None:
        """Make calls together, a packet for each step; each is told its own answer."""
        under_way = [each for each in under_way if _goes_on(each, None)]
        while under_way:
            packet = [command for each in under_way for command in each.commands]
            try:
                answers = self._server.send(packet)
            except Exception as error:  # noqa: BLE001 -- told to those who asked, as below
                for each in under_way:
                    each.call.tell(error)
                return
            at = 0
            left = []
            for each in under_way:
                own = answers[at : at + len(each.commands)]
                at += len(each.commands)
                if _goes_on(each, own):
                    left.append(each)
            under_way = left


def _goes_on(each: _UnderWay, answers: list[Any] | None) -> bool:
    """Give a call the answers to its step; whether there is another, else it has been told."""
    try:
        if answers is None:
            each.commands = next(each.steps)
        else:
            each.commands = each.steps.send(each.call.board.judged(each.commands, answers))
    except StopIteration as done:
        each.call.tell(done.value)
        return False
    except Exception as error:  # noqa: BLE001 -- told to the job that asked: others go on
        each.call.tell(error)
        return False
    return True


def _ignore(_: object) -> None:
    pass
