"""What the product asks of Redis, as protocols.

One contract suite (tests/contract) holds Redis and its stand-in in memory to the same behaviour.
Nothing here is thread-safe unless it says so: each object belongs to the thread that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from common.errors import OutsideError

if TYPE_CHECKING:
    from common.core.job_placement import JobDemand, WorkerPlacement
    from common.core.liveness import Heartbeat
    from common.core.messages import (
        LeaderStatus,
        ModelId,
        Reply,
        TriggerId,
        UpdateTrigger,
        WorkerId,
    )


class LiveStatus(NamedTuple):
    """What a board says of a job to somebody who only looks."""

    # True if anybody holds the lease of leaders.
    led: bool
    leader_status: LeaderStatus | None
    # By worker that sends heartbeats.
    statuses: Mapping[WorkerId, str]
    # Why a process cannot do its part of the job, by its name.
    unable: Mapping[str, str]


class Board(Protocol):
    """One job's notice board: fast, shared, and allowed to be wiped at any moment.

    May be shared between threads. Every call may raise `UnavailableError`.
    What does not parse is left out, and the first of each kind is logged.
    """

    def get_model(self, model: ModelId) -> bytes | None:
        """Fetch a model, or None where it is gone."""

    def offer_model(self, model: ModelId, weights: bytes | memoryview) -> None:
        """Leave a model for whoever judges models; it takes the place of the one before."""

    def offered_model(self, known: ModelId | None = None) -> tuple[ModelId, bytes] | None:
        """The model that was left last; None where there is none, or it is the `known` one.

        So whoever looks often fetches each only once.
        """

    def triggers(self, after: TriggerId, timeout_s: float, stream: str = "") -> list[UpdateTrigger]:
        """Wait for triggers of a stream with an id above `after`, oldest first; else empty."""

    def push_reply(self, reply: Reply, to: str) -> None:
        """Send a gradient, a failure or a leave message to the replica of this name."""

    def get_leader_status(self) -> LeaderStatus | None:
        """Read the leader's status, or None where there is none."""

    def beat(self, worker: WorkerId, status: str, ttl_s: float, digest: str = "") -> None:
        """Say that a worker lives, for `ttl_s`, and what `liveness.Heartbeat` has.

        A board that is closed, or whose process dies, takes its beats with it where the server
        notices; what ends without a sign, such as a machine, is missed when the time has run out.
        """

    def heartbeats(self) -> dict[WorkerId, Heartbeat]:
        """Return the beat of each worker, if it has not run out and the worker's process lives."""

    def hold_lease(self, holder: str, ttl_s: float) -> bool:
        """Take or prolong the lease that says who may try to lead; False if another holds it.

        One that would last for ever, or far longer than `ttl_s`, is no replica's, and is taken.
        """

    def release_lease(self, holder: str) -> None:
        """Give the lease back, if it is still this holder's."""

    def is_leased(self) -> bool:
        """Whether anybody holds the lease: what somebody who only looks may know of leaders."""

    def put_unable(self, process: str, reason: str, ttl_s: float) -> None:
        """Say, for so long, why a process cannot lead the job, or join it: others may be able to.

        Args:
            process: A replica's name; a worker's, behind `liveness.WORKER`; or `liveness.TURN`.
            reason: In words.
            ttl_s: Seconds.
        """

    def unable(self) -> dict[str, str]:
        """Why processes cannot do their part of the job, by what they call themselves."""

    def put_whole_snapshot(self, epoch: int, data: bytes) -> None:
        """Keep a hot snapshot of this leader with the weights, which a member of its group has."""

    def snapshots(
        self, epoch: int | None = None, most: int | None = None, *, whole: bool = False
    ) -> list[bytes]:
        """All hot snapshots that are there, those of later leaders first.

        Args:
            epoch: That of this leader alone.
            most: Of each, its first bytes, no more than these.
            whole: In place of those that leaders of groups put, the newest with their weights.
        """

    def wipe(self) -> None:
        """Forget everything of this job."""

    def close(self) -> None:
        """Let go of all connections."""


class LeaderBoard(Board, Protocol):
    """A `Board` with what its leader alone writes."""

    def put_model(self, model: ModelId, weights: bytes | memoryview) -> None:
        """Publish a model; older versions than the last few are forgotten."""

    def post_trigger(self, trigger: UpdateTrigger, stream: str = "") -> bool:
        """Append to a stream of triggers; False where something else keeps this id out.

        That is a leader's that came later, or anything at all that somebody put there: whoever
        leads goes on in another stream, and says in its status which one.

        Args:
            trigger: Its id is above those that this leader posted before.
            stream: Its name; empty: the first one of the job.
        """

    def put_leader_status(self, leader_status: LeaderStatus) -> bool:
        """Write the leader's status; False where none was there."""

    def put_snapshot(self, epoch: int, data: bytes, holder: str) -> bool:
        """Keep this leader's newest hot snapshot; those of leaders long gone are forgotten.

        Args:
            epoch: The leader's.
            data: The snapshot.
            holder: Of the lease.

        Returns:
            False where another holds the lease: who leads next has looked at snapshots, or may.
        """


def live_status(board: Board) -> LiveStatus | Exception:
    """Look at one board; return what it says or why not."""
    try:
        statuses = {worker: beat.status for worker, beat in board.heartbeats().items()}
        return LiveStatus(board.is_leased(), board.get_leader_status(), statuses, board.unable())
    except OutsideError as error:
        return error


class Replies(Protocol):
    """What workers of all jobs sent to one replica of the coordinator. For one thread at a time.

    What does not parse is left out, and the first of each kind is logged.
    """

    def pop(self, max_replies: int, timeout_s: float) -> list[tuple[str, Reply]]:
        """Take replies, each with the job that it is about; waits for the first one only.

        The vectors of gradients are read-only views of the bytes received.

        Raises:
            UnavailableError: If the server is unavailable.
        """


class Exchange(Protocol):
    """What the leaders of many jobs ask again and again, in few packets. Shared between threads.

    Each call returns at once. Its answer, or why there is none, is told later, perhaps before the
    call returns, by a thread that must not be held up; what was asked of one job is answered in
    that order. Of two that ask the same of one job before the first is sent, the later one alone is
    sent and answered: it asks for what counts now.

    Args of all:
        job: The job's id.
        on_answer: Gets the answer of the board's method of the same name.
        soon: Send it at once. Otherwise it waits a little, for others to go in the same packet.
    """

    def hold_lease(
        self,
        job: str,
        holder: str,
        ttl_s: float,
        on_answer: Callable[[bool | Exception], None],
        *,
        soon: bool,
    ) -> None:
        """See `Board`.

        Where another holds it, and asked for it in the same way, the end of its process is noticed,
        mostly within 50 ms: then it is asked for again, and its answer told, unless the job's lease
        was given back, or not asked for in the last `ttl_s`. So one call may be answered often. A
        process that is slow or frozen has not ended; of one that seems to have ended, and lives, it
        is not taken early again soon.
        """

    def release_lease(self, job: str, holder: str) -> None:
        """See `Board`; nobody is told, and it is always sent soon."""

    def put_leader_status(
        self,
        job: str,
        leader_status: LeaderStatus,
        on_answer: Callable[[bool | Exception], None],
        *,
        soon: bool,
    ) -> None:
        """See `Board`."""

    def alive(
        self,
        job: str,
        on_answer: Callable[[dict[WorkerId, Heartbeat] | Exception], None],
        *,
        soon: bool,
    ) -> None:
        """See `Board.heartbeats`."""

    def close(self) -> None:
        """Send what waits, then end."""


class Roster(Protocol):
    """Small records about all jobs and workers; fast, shared, and allowed to be wiped.

    May be shared between threads. Every call may raise `UnavailableError`.
    What does not parse is left out, and the first of each kind is logged.
    """

    def put(self, records: Sequence[JobDemand | WorkerPlacement]) -> None:
        """Publish records, each in the place of the one before of its job or its worker."""

    def read(self) -> list[JobDemand | WorkerPlacement]:
        """All records that there are, however old."""

    def remove(self, jobs: Collection[str] = (), workers: Collection[str] = ()) -> None:
        """Take the records of these away; nothing happens where there is none."""


class Rendezvous(Protocol):
    """Where those who form a group leave for each other how to connect. Shared between threads.

    Each name has a list of entries, which is forgotten a minute after the last one was left: by
    then the group stands or never will. Every call may raise `UnavailableError`.
    """

    def leave(self, name: str, key: str, value: bytes) -> None:
        """Append an entry."""

    def entries(self, name: str, after: str, timeout_s: float) -> list[tuple[str, str, bytes]]:
        """Wait for entries behind a position; empty if none came.

        Args:
            name: Of the list.
            after: The position of the last entry that is known; empty: all of them.
            timeout_s: Wait no longer.

        Returns:
            Of each its position, key and value, in the order of the list, which is one for all.
        """


class Boards(Protocol):
    """The boards of all jobs, over connections that they share. May be shared between threads."""

    def board(self, job: str) -> Board:
        """Open a job's board; to close it lets go of its own only."""

    def live_statuses(self, boards: Sequence[Board]) -> list[LiveStatus | Exception]:
        """Look at several of these boards in a few packets; of each, what it says or why not."""

    def roster(self) -> Roster:
        """Open the records of all jobs and workers."""

    def rendezvous(self, job: str) -> Rendezvous:
        """Open where members of a job's groups find each other."""

    def close(self) -> None:
        """Let go of all connections."""


class LeaderBoards(Boards, Protocol):
    """What a process that leads jobs uses of Redis."""

    def board(self, job: str) -> LeaderBoard:
        """Open a job's board; to close it lets go of its own only."""

    def replies(self, replica: str) -> Replies:
        """Open what is sent to a replica."""

    def exchange(self) -> Exchange:
        """Open an exchange."""
