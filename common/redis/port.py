"""The product's use of Redis, as protocols.

One contract suite (tests/contract) holds Redis and its in-memory stand-in to the same behaviour. An
object belongs to the thread that made it, unless its docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from common.errors import OutsideError

if TYPE_CHECKING:
    from common.core.job_placement import JobDemand, WorkerPlacement
    from common.core.liveness import Device, Heartbeat
    from common.core.messages import (
        LeaderStatus,
        ModelId,
        Reply,
        TriggerId,
        UpdateTrigger,
        WorkerId,
    )


class LiveStatus(NamedTuple):
    """A job's status as its board shows it to an observer."""

    # True if any replica holds the lease.
    led: bool
    leader_status: LeaderStatus | None
    # Heartbeat statuses by worker.
    statuses: Mapping[WorkerId, str]
    # Reasons why processes cannot do their part of the job, by process name.
    unable: Mapping[str, str]
    # Devices of workers that report one.
    devices: Mapping[WorkerId, Device] = {}


def devices_in(heartbeats: Mapping[WorkerId, Heartbeat]) -> dict[WorkerId, Device]:
    """Return the devices of workers that report one."""
    return {worker: beat.device for worker, beat in heartbeats.items() if beat.device is not None}


class Board(Protocol):
    """One job's board in Redis: fast, shared, and allowed to be wiped at any moment.

    Safe to use from several threads. Every call may raise `UnavailableError`. Values that do not
    parse are left out, and the first of each kind is logged.
    """

    def get_model(self, model: ModelId) -> bytes | None:
        """Fetch a model; None if it does not exist any more."""

    def offer_model(self, model: ModelId, weights: bytes | memoryview) -> None:
        """Offer a model to evaluators, replacing the previous one."""

    def offered_model(self, known: ModelId | None = None) -> tuple[ModelId, bytes] | None:
        """Return the offered model; None without one, or if it is the `known` one.

        A caller that polls fetches each model only once.
        """

    def triggers(self, after: TriggerId, timeout_s: float, stream: str = "") -> list[UpdateTrigger]:
        """Wait for triggers of a stream with ids above `after`, oldest first; may return none."""

    def push_reply(self, reply: Reply, to: str) -> None:
        """Send a gradient, a failure or a leave message to the replica of this name."""

    def get_leader_status(self) -> LeaderStatus | None:
        """Read the leader's status; None if it does not exist."""

    def beat(
        self,
        worker: WorkerId,
        status: str,
        ttl_s: float,
        digest: str = "",
        device: Device | None = None,
        life: str = "",
    ) -> None:
        """Record that a worker lives, for `ttl_s`, with the contents of a `liveness.Heartbeat`.

        If the board is closed or its process dies, its heartbeats end as soon as the server
        notices. If a machine loses its power, the server notices nothing, and the heartbeats end
        after `ttl_s`.
        """

    def heartbeats(self) -> dict[WorkerId, Heartbeat]:
        """Return the heartbeat of each worker that lives and whose heartbeat has not expired."""

    def hold_lease(self, holder: str, ttl_s: float) -> bool:
        """Take or renew the lease, which says who may try to lead; False if another holds it.

        A lease without an expiry, or with one far longer than `ttl_s`, was not made by a replica,
        so it is replaced.
        """

    def release_lease(self, holder: str) -> None:
        """Release the lease if this holder still has it."""

    def is_leased(self) -> bool:
        """Return True if any replica holds the lease."""

    def put_unable(self, process: str, reason: str, ttl_s: float) -> None:
        """Report, for `ttl_s`, why a process cannot lead or join the job: others may be able to.

        Args:
            process: A replica's name; a worker's name after `liveness.WORKER`; or `liveness.TURN`.
            reason: The reason in words.
            ttl_s: Lifetime of the report.
        """

    def unable(self) -> dict[str, str]:
        """Return why processes cannot do their part of the job, by process name."""

    def put_whole_snapshot(self, epoch: int, data: bytes) -> None:
        """Store a hot snapshot of this leader, with weights; a member of its group writes it."""

    def snapshots(
        self, epoch: int | None = None, most: int | None = None, *, whole: bool = False
    ) -> list[bytes]:
        """Return all hot snapshots, those of later leaders first.

        Args:
            epoch: Return this leader's snapshot only.
            most: Return at most this many bytes of each snapshot, from its beginning.
            whole: Replace snapshots of group leaders by the newest ones with weights.
        """

    def wipe(self) -> None:
        """Delete everything of this job."""

    def close(self) -> None:
        """Close all connections."""


class LeaderBoard(Board, Protocol):
    """A `Board` with the writes that only its leader makes."""

    def put_model(self, model: ModelId, weights: bytes | memoryview) -> None:
        """Publish a model. Only the last few versions are kept."""

    def post_trigger(self, trigger: UpdateTrigger, stream: str = "") -> bool:
        """Append to a stream of triggers; False if another entry blocks the id.

        The entry may be a later leader's, or anything that somebody put there. The leader then
        continues in another stream, which its status names.

        Args:
            trigger: Its id is above all ids that this leader posted before.
            stream: Name of the stream. If empty, the job's first one.
        """

    def put_leader_status(self, leader_status: LeaderStatus) -> bool:
        """Write the leader's status; return False if there was none before."""

    def put_snapshot(self, epoch: int, data: bytes, holder: str) -> bool:
        """Store this leader's newest hot snapshot, and delete those of much earlier leaders.

        Args:
            epoch: Epoch of the leader.
            data: The snapshot.
            holder: The replica, which should hold the lease.

        Returns:
            False if another replica holds the lease: it may have read the snapshots already.
        """


def live_status(board: Board) -> LiveStatus | Exception:
    """Read one board's live status, or return the error."""
    try:
        beats = board.heartbeats()
        return LiveStatus(
            board.is_leased(),
            board.get_leader_status(),
            {worker: beat.status for worker, beat in beats.items()},
            board.unable(),
            devices_in(beats),
        )
    except OutsideError as error:
        return error


class Replies(Protocol):
    """Replies to one coordinator replica by the workers of all jobs. For one thread at a time.

    Values that do not parse are left out, and the first of each kind is logged.
    """

    def pop(self, max_replies: int, timeout_s: float) -> list[tuple[str, Reply]]:
        """Take replies, each with its job; wait for the first one only.

        The vectors of gradients are read-only views of the received bytes.

        Raises:
            UnavailableError: If the server is unavailable.
        """


class Exchange(Protocol):
    """Frequent calls of many jobs' leaders, in few packets. Safe to use from several threads.

    Each call returns at once. Its answer or error is passed to `on_answer` later, perhaps before
    the call returns, by a thread that must not be blocked. Answers for one job keep the order of
    its calls. If the same call is made twice for a job before the first is sent, only the second is
    sent and answered, because it has the current values.

    Args of all:
        job: Identifier of the job.
        on_answer: Receives the answer of the board's method with the same name.
        soon: True to send at once. Otherwise the call waits briefly for others to share its packet.
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

        If another process holds the lease, and requested it in the same way, the end of that
        process is noticed, usually within 50 ms. Then the lease is requested again and the answer
        reported, so that one call may be answered several times. This stops once the job's lease is
        released, or was not requested in the last `ttl_s`. A slow or frozen process has not ended.
        If a process seems to have ended but lives, its lease is not taken early again soon.
        """

    def release_lease(self, job: str, holder: str) -> None:
        """See `Board`. Nothing is reported, and the call is always sent soon."""

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
        """Send the waiting calls, then end."""


class Roster(Protocol):
    """Small records about all jobs and workers; fast, shared, and allowed to be wiped.

    Safe to use from several threads. Every call may raise `UnavailableError`. Values that do not
    parse are left out, and the first of each kind is logged.
    """

    def put(self, records: Sequence[JobDemand | WorkerPlacement]) -> None:
        """Publish records, each replacing the previous one of its job or worker."""

    def read(self) -> list[JobDemand | WorkerPlacement]:
        """Return all records, however old."""

    def remove(self, jobs: Collection[str] = (), workers: Collection[str] = ()) -> None:
        """Remove the records of these jobs and workers. Missing records are no error."""


class Rendezvous(Protocol):
    """The place where members of a forming group exchange addresses. Safe for several threads.

    Each name has a list of entries. It expires a minute after its last entry: by then the group is
    formed or has failed. Every call may raise `UnavailableError`.
    """

    def leave(self, name: str, key: str, value: bytes) -> None:
        """Append an entry."""

    def entries(self, name: str, after: str, timeout_s: float) -> list[tuple[str, str, bytes]]:
        """Wait for entries after a position; return an empty list if none comes in time.

        Args:
            name: Name of the list.
            after: Position of the last known entry. If empty, all entries are returned.
            timeout_s: Longest wait.

        Returns:
            Position, key and value of each entry. All members see the same order.
        """


class Boards(Protocol):
    """The boards of all jobs, over shared connections. Safe to use from several threads."""

    def board(self, job: str) -> Board:
        """Open a job's board. Closing it releases its own resources only."""

    def live_statuses(self, boards: Sequence[Board]) -> list[LiveStatus | Exception]:
        """Read the live status of several boards in a few packets; errors are returned in place."""

    def roster(self) -> Roster:
        """Open the records of all jobs and workers."""

    def rendezvous(self, job: str) -> Rendezvous:
        """Open the rendezvous of a job's groups."""

    def close(self) -> None:
        """Close all connections."""


class LeaderBoards(Boards, Protocol):
    """The use of Redis by a process that leads jobs."""

    def board(self, job: str) -> LeaderBoard:
        """Open a job's board. Closing it releases its own resources only."""

    def replies(self, replica: str) -> Replies:
        """Open the replies to a replica."""

    def exchange(self) -> Exchange:
        """Open an exchange."""
