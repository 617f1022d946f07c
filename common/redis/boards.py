"""What all jobs share in Redis, over one pool of connections (`common.redis.port.Boards`).

Beside the boards (`common.redis.board`) these are the records by which workers spread over jobs,
one hash for all, so that one short command reads everything:

    doll:spread    job:<name>     what a job needs, by its leader       (`JobDemand`)
                   worker:<name>  where a worker is, by itself          (`WorkerPlacement`)

and the streams where members of groups find each other. An entry has one field, a stream expires:

    doll:{job}:group:<name>

A call that is made for many jobs takes one to three steps, each a few commands. One packet holds a
step of every call that is under way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from common.core.job_placement import JobDemand, WorkerPlacement
from common.redis.access import RedisAccess, redis_access
from common.redis.board import RedisBoard
from common.redis.port import Board, LiveStatus
from common.redis.server import RedisServer, connect
from common.telemetry.logging import Rejections
from common.wire import messages as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from common.config.settings import Settings
    from common.redis.access import RedisClient
    from common.redis.board import Steps
    from common.redis.port import Boards
    from common.redis.server import Command

_OPEN = RedisAccess()
_SPREAD = "doll:spread"
_JOB, _WORKER = "job:", "worker:"
_TTL_MS = 60_000
_MOST_WAIT_S = 1.0  # of one blocking command: below what a server may take to answer


def open_boards(settings: Settings) -> Boards:
    """Open the notice boards of all jobs in Redis, over connections that they share.

    Raises:
        UserError: If the settings name a file that cannot be used.
    """
    return RedisBoards(settings.redis, access=redis_access(settings))


class RedisBoards:
    """Opens the boards of all jobs of a process; may be shared between threads.

    Args:
        url: `redis://host:port/db`, `rediss://...` or `unix://path`.
        access: As whom we come, and whom we trust, beyond what the URL says.

    Raises:
        UserError: If the URL or a file of `access` cannot be used.
    """

    def __init__(self, url: str, access: RedisAccess = _OPEN) -> None:
        self.url = url
        self.client = connect(url, access)
        self.server = RedisServer(self.client, "doll:", lambda _key: None)

    def board(self, job: str) -> RedisBoard:
        """Open a job's board; to close it lets go of its own only."""
        return RedisBoard(self.url, job, shared=self.client)

    def live_statuses(self, boards: Sequence[Board]) -> list[LiveStatus | Exception]:
        """Look at several of these boards in a few packets; of each, what it says or why not."""
        found = dict[Board, LiveStatus | Exception]()
        calls = [
            Call(board, board.reading_live_status, partial(found.__setitem__, board))
            for board in cast("Sequence[RedisBoard]", boards)
        ]
        call_together(self.server, calls)
        return [found[board] for board in boards]

    def roster(self) -> RedisRoster:
        """Open the records of all jobs and workers."""
        return RedisRoster(self.client)

    def rendezvous(self, job: str) -> RedisRendezvous:
        """Open where members of a job's groups find each other."""
        return RedisRendezvous(self.client, job)

    def close(self) -> None:
        """Let go of all connections."""
        self.client.close()


class RedisRoster:
    """The hash in a Redis server; may be shared between threads.

    Args:
        client: Its connections.
    """

    def __init__(self, client: RedisClient) -> None:
        self._rejections = Rejections()
        self._server = RedisServer(client, _SPREAD, self._reject_key)

    def put(self, records: Sequence[JobDemand | WorkerPlacement]) -> None:
        """Publish records, each in the place of the one before of its job or its worker."""
        if records:
            fields = [part for record in records for part in field_of(record)]
            self._server.ask(("HSET", _SPREAD, *fields))

    def read(self) -> list[JobDemand | WorkerPlacement]:
        """All records that there are, however old."""
        fields = self._server.ask(("HGETALL", _SPREAD))[0].items()
        found = (
            parsed_record(name.decode(errors="replace"), value, self._rejections)
            for name, value in fields
        )
        return [record for record in found if record is not None]

    def remove(self, jobs: Collection[str] = (), workers: Collection[str] = ()) -> None:
        """Take the records of these away; nothing happens where there is none."""
        fields = [*(_JOB + name for name in jobs), *(_WORKER + name for name in workers)]
        if fields:
            self._server.ask(("HDEL", _SPREAD, *fields))

    def _reject_key(self, key: str) -> None:
        self._rejections.reject("key", f"{key} holds another type than a hash")


def field_of(record: JobDemand | WorkerPlacement) -> tuple[str, bytes]:
    """Name and value of a record's field."""
    if isinstance(record, JobDemand):
        return _JOB + record.job, wire.encode_demand(record)
    return _WORKER + record.worker, wire.encode_placement(record)


def parsed_record(
    field: str, value: bytes, rejections: Rejections
) -> JobDemand | WorkerPlacement | None:
    """The record in a field, None where it is rejected."""
    record: JobDemand | WorkerPlacement | None
    if field.startswith(_JOB):
        record = rejections.parse("job demand", wire.decode_demand, value)
    else:
        record = rejections.parse("worker placement", wire.decode_placement, value)
    if record is not None and field_of(record)[0] != field:
        rejections.reject("field", f"the record of another stands at {field!r}")
        return None
    return record


class RedisRendezvous:
    """The streams of a job in a Redis server; may be shared between threads.

    Args:
        client: Its connections.
        job: The job's id.
    """

    def __init__(self, client: RedisClient, job: str) -> None:
        self._keys = f"doll:{{{job}}}:group:"
        self._rejections = Rejections()
        self._server = RedisServer(client, self._keys, self._reject_key)

    def leave(self, name: str, key: str, value: bytes) -> None:
        """Append an entry."""
        stream = self._keys + name
        self._server.ask(("XADD", stream, "*", key, value), ("PEXPIRE", stream, _TTL_MS))

    def entries(self, name: str, after: str, timeout_s: float) -> list[tuple[str, str, bytes]]:
        """Wait for entries behind a position; empty if none came."""
        stream, deadline = self._keys + name, time.monotonic() + timeout_s
        while True:
            left_s = min(deadline - time.monotonic(), _MOST_WAIT_S)
            block = ("BLOCK", max(1, int(1000 * left_s))) if left_s > 0 else ()
            answer = self._server.ask(("XREAD", *block, "STREAMS", stream, after or "0-0"))[0]
            if answer:
                return [
                    (position.decode(), key.decode(errors="replace"), value)
                    for position, fields in answer[0][1]
                    for key, value in fields.items()
                ]
            if left_s <= 0:
                return []

    def _reject_key(self, key: str) -> None:
        self._rejections.reject("key", f"{key} holds another type than a stream")


@dataclass(slots=True)
class Call:
    """One call of one job."""

    board: RedisBoard
    steps: Callable[[], Steps[Any]]
    on_answer: Callable[[Any], None]


@dataclass(slots=True)
class _UnderWay:
    """A call, where it is."""

    call: Call
    steps: Steps[Any]
    commands: tuple[Command, ...]


def call_together(server: RedisServer, calls: Iterable[Call]) -> bool:
    """Make calls together, a packet for each step; each is told its own answer.

    Returns:
        Whether the server answered.
    """
    under_way = [_UnderWay(call, call.steps(), ()) for call in calls]
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
