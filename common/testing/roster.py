"""The records by which workers spread over jobs, in a `MemoryRedis`; held to the same contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common import wire
from common.core.spread import JobDemand, WorkerPlacement
from common.errors import UnavailableError
from common.rejections import Rejections

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from common.testing.board import MemoryRedis


class MemoryRoster:
    """One process's view of them; may be shared between threads."""

    def __init__(self, server: MemoryRedis) -> None:
        self._server = server
        self._rejections = Rejections()

    @property
    def rejected(self) -> int:
        """Records read so far that did not parse."""
        return self._rejections.count

    def put(self, records: Sequence[JobDemand | WorkerPlacement]) -> None:
        """Publish records, each in the place of the one before of its job or its worker."""
        fields = dict(map(_field, records))
        with self._server.changed:
            self._records().update(fields)

    def read(self) -> list[JobDemand | WorkerPlacement]:
        """All records that there are, however old."""
        with self._server.changed:
            fields = dict(self._records())
        found = (self._parsed(field, value) for field, value in fields.items())
        return [record for record in found if record is not None]

    def remove(self, jobs: Collection[str] = (), workers: Collection[str] = ()) -> None:
        """Take the records of these away; nothing happens where there is none."""
        with self._server.changed:
            for field in (*(f"job:{it}" for it in jobs), *(f"worker:{it}" for it in workers)):
                self._records().pop(field, None)

    def _records(self) -> dict[str, bytes]:
        if self._server.away:
            raise UnavailableError("the server is away")
        return self._server.spread

    def _parsed(self, field: str, value: bytes) -> JobDemand | WorkerPlacement | None:
        record: JobDemand | WorkerPlacement | None
        if field.startswith("job:"):
            record = self._rejections.parse("job demand", wire.decode_demand, value)
        else:
            record = self._rejections.parse("worker placement", wire.decode_placement, value)
        if record is not None and _field(record)[0] != field:
            self._rejections.reject("field", f"the record of another stands at {field!r}")
            return None
        return record


def _field(record: JobDemand | WorkerPlacement) -> tuple[str, bytes]:
    if isinstance(record, JobDemand):
        return f"job:{record.job}", wire.encode_demand(record)
    return f"worker:{record.worker}", wire.encode_placement(record)
