"""The records by which workers spread over jobs, in Redis (`common.redis.port.Roster`).

One hash for all, so that one short command reads everything:

    doll:spread    job:<name>     what a job needs, by its leader       (`JobDemand`)
                   worker:<name>  where a worker is, by itself          (`WorkerPlacement`)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core.job_placement import JobDemand, WorkerPlacement
from common.redis.server import RedisServer
from common.telemetry.rejections import Rejections
from common.wire import messages as wire

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from common.redis.access import RedisClient

_KEY = "doll:spread"
_JOB, _WORKER = "job:", "worker:"


class RedisRoster:
    """The hash in a Redis server; may be shared between threads.

    Args:
        client: Its connections.
    """

    def __init__(self, client: RedisClient) -> None:
        self._rejections = Rejections()
        self._server = RedisServer(client, _KEY, self._reject_key)

    def put(self, records: Sequence[JobDemand | WorkerPlacement]) -> None:
        """Publish records, each in the place of the one before of its job or its worker."""
        if records:
            fields = [part for record in records for part in _field(record)]
            self._server.ask(("HSET", _KEY, *fields))

    def read(self) -> list[JobDemand | WorkerPlacement]:
        """All records that there are, however old."""
        found = list[JobDemand | WorkerPlacement]()
        for field, value in self._server.ask(("HGETALL", _KEY))[0].items():
            record = self._parsed(field, value)
            if record is not None:
                found.append(record)
        return found

    def remove(self, jobs: Collection[str] = (), workers: Collection[str] = ()) -> None:
        """Take the records of these away; nothing happens where there is none."""
        fields = [*(_JOB + name for name in jobs), *(_WORKER + name for name in workers)]
        if fields:
            self._server.ask(("HDEL", _KEY, *fields))

    def _parsed(self, field: bytes, value: bytes) -> JobDemand | WorkerPlacement | None:
        kind = field.partition(b":")[0]
        record: JobDemand | WorkerPlacement | None
        if kind == b"job":
            record = self._rejections.parse("job demand", wire.decode_demand, value)
        else:
            record = self._rejections.parse("worker placement", wire.decode_placement, value)
        if record is not None and _field(record)[0].encode() != field:
            self._rejections.reject("field", f"the record of another stands at {field!r}")
            return None
        return record

    def _reject_key(self, key: str) -> None:
        self._rejections.reject("key", f"{key} holds another type than a hash")


def _field(record: JobDemand | WorkerPlacement) -> tuple[str, bytes]:
    if isinstance(record, JobDemand):
        return _JOB + record.job, wire.encode_demand(record)
    return _WORKER + record.worker, wire.encode_placement(record)
