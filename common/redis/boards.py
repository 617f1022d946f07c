"""Everything that jobs share in Redis, over one pool of connections (`common.redis.port.Boards`).

Beside the boards (`common.redis.board`), these are the records that spread workers over jobs. One
hash holds them all, so that one short command reads everything:

    doll:spread    job:<name>     demand of a job, by its leader          (`JobDemand`)
                   worker:<name>  placement of a worker, by the worker    (`WorkerPlacement`)

Members of groups find each other in streams. An entry has one field, and a stream expires:

    doll:{job}:group:<name>

A call for many jobs takes one to three steps, each with a few commands. One packet holds a step of
every call under way.
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
# Longest blocking command, shorter than the time that a server may take to answer.
_MOST_WAIT_S = 1.0


def open_boards(settings: Settings) -> Boards:
    """Open the boards of all jobs in Redis, over shared connections.

    Raises:
        UserError: If the settings name a file that cannot be used.
    """
    return RedisBoards(settings.redis, access=redis_access(settings))


class RedisBoards:
    """Opens the boards of all jobs of a process. Safe to use from several threads.

    Args:
        url: `redis://host:port/db`, `rediss://...` or `unix://path`.
        access: Identity and trusted authorities, beyond those in the URL.

    Raises:
        UserError: If the URL or a file of `access` cannot be used.
    """

    def __init__(self, url: str, access: RedisAccess = _OPEN) -> None:
        self.url = url
        self.client = connect(url, access)
        self.server = RedisServer(self.client, "doll:", lambda _key: None)

    def board(self, job: str) -> RedisBoard:
        """Open a job's board. Closing it releases its own resources only."""
        return RedisBoard(self.url, job, shared=self.client)

    def live_statuses(self, boards: Sequence[Board]) -> list[LiveStatus | Exception]:
        """Read the live status of several boards in a few packets; errors are returned in place."""
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
        """Open the rendezvous of a job's groups."""
        return RedisRendezvous(self.client, job)

    def close(self) -> None:
        """Close all connections."""
        self.client.close()


class RedisRoster:
    """The records' hash in a Redis server. Safe to use from several threads.

    Args:
        client: Connections to the server.
    """

    def __init__(self, client: RedisClient) -> None:
        self._rejections = Rejections()
        self._server = RedisServer(client, _SPREAD, self._reject_key)

    def put(self, records: Sequence[JobDemand | WorkerPlacement]) -> None:
        """Publish records, each replacing the previous one of its job or worker."""
        if records:
            fields = [part for record in records for part in field_of(record)]
            self._server.ask(("HSET", _SPREAD, *fields))

    def read(self) -> list[JobDemand | WorkerPlacement]:
        """Return all records, however old."""
        fields = self._server.ask(("HGETALL", _SPREAD))[0].items()
        found = (
            parsed_record(name.decode(errors="replace"), value, self._rejections)
            for name, value in fields
        )
        return [record for record in found if record is not None]

    def remove(self, jobs: Collection[str] = (), workers: Collection[str] = ()) -> None:
        """Remove the records of these jobs and workers. Missing records are no error."""
        fields = [*(_JOB + name for name in jobs), *(_WORKER + name for name in workers)]
        if fields:
            self._server.ask(("HDEL", _SPREAD, *fields))

    def _reject_key(self, key: str) -> None:
        self._rejections.reject("key", f"{key} is not a Redis hash")


def field_of(record: JobDemand | WorkerPlacement) -> tuple[str, bytes]:
    """Return name and value of a record's field."""
    if isinstance(record, JobDemand):
        return _JOB + record.job, wire.encode_demand(record)
    return _WORKER + record.worker, wire.encode_placement(record)


def parsed_record(
    field: str, value: bytes, rejections: Rejections
) -> JobDemand | WorkerPlacement | None:
    """Return the record in a field; None if it is rejected."""
    record: JobDemand | WorkerPlacement | None
    if field.startswith(_JOB):
        record = rejections.parse("job demand", wire.decode_demand, value)
    else:
        record = rejections.parse("worker placement", wire.decode_placement, value)
    if record is not None and field_of(record)[0] != field:
        rejections.reject("field", f"the field {field!r} has the record of another job or worker")
        return None
    return record


class RedisRendezvous:
    """The streams of a job's groups in a Redis server. Safe to use from several threads.

    Args:
        client: Connections to the server.
        job: Identifier of the job.
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
        """Wait for entries after a position; return an empty list if none comes in time."""
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
        self._rejections.reject("key", f"{key} is not a Redis stream")


@dataclass(slots=True)
class Call:
    """One call for one job."""

    board: RedisBoard
    steps: Callable[[], Steps[Any]]
    on_answer: Callable[[Any], None]


@dataclass(slots=True)
class _UnderWay:
    """A call under way, and the commands of its current step."""

    call: Call
    steps: Steps[Any]
    commands: tuple[Command, ...]


def call_together(server: RedisServer, calls: Iterable[Call]) -> bool:
    """Make calls together, one packet for each step, and pass each its own answer.

    Returns:
        True if the server answered.
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
    """Pass a call the answers to its step; return True if there is another step."""
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
