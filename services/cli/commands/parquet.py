"""Rows of Parquet files for `doll produce`, as JSON objects, in order and each once.

One transaction of Kafka holds some rows and, in a compacted topic, the number of rows sent so far.
So an interrupted run leaves only complete transactions, and the next run continues after them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
from pyarrow import fs
from pyarrow import parquet as pq

from common.core.spans import Partition
from common.errors import ConflictError, UserError
from common.kafka.names import PRODUCED
from common.kafka.port import Log, NewRecord, NewTopic, TransactionalLog
from common.kafka.read import records_of

_TABLE = re.compile(r"/_delta_log/|/metadata/[^/]+\.metadata\.json$")
# Rows decoded at once.
_READ_ROWS = 1_000
# Rows per transaction.
_ROWS = 5_000
_BYTES = 4 << 20


class Rows:
    """Rows of a file, or of all files below a folder in order of name.

    Args:
        source: A path, or `s3://bucket/...`.
        leave_out: Columns that are not sent.

    Raises:
        UserError: If there are no Parquet files, a column does not exist, or the folder is a Delta
            or Iceberg table.
    """

    def __init__(self, source: str, leave_out: Sequence[str] = ()) -> None:
        self._system, path = _system_of(source)
        try:
            self._files = self._found(path)
            headers = [pq.read_metadata(name, filesystem=self._system) for name in self._files]
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{source}: cannot be read as Parquet: {error}") from error
        if not self._files:
            raise UserError(f"{source}: has no files that end with .parquet")
        self._columns = list[str](headers[0].schema.to_arrow_schema().names)
        for name in leave_out:
            if name not in self._columns:
                raise UserError(f"--leave-out: {source} has no column {name!r}")
        self._columns = [name for name in self._columns if name not in leave_out]
        self._counts = [header.num_rows for header in headers]
        self.count = sum(self._counts)
        described = zip(self._files, self._counts, strict=True)
        self.digest = hashlib.sha256(repr([*described, self._columns]).encode()).hexdigest()[:16]

    def stream(self, start: int) -> Iterator[bytes]:
        """Yield the rows from a number on, each as a JSON object.

        Raises:
            UserError: If a file cannot be read, or lacks a column of the first file.
        """
        for name, count in zip(self._files, self._counts, strict=True):
            if start < count:
                try:
                    yield from self._rows(name, start)
                except (OSError, pa.ArrowException, KeyError) as error:
                    raise UserError(f"{name}: cannot be read: {error}") from error
            start = max(start - count, 0)

    def _rows(self, name: str, start: int) -> Iterator[bytes]:
        encode = msgspec.json.Encoder().encode
        with pq.ParquetFile(name, filesystem=self._system) as file:
            for batch in file.iter_batches(_READ_ROWS, columns=self._columns):
                if start < len(batch):
                    rows = pa.table(batch.slice(start)).select(self._columns)
                    yield from map(encode, _whole_microseconds(rows).to_pylist())
                start = max(start - len(batch), 0)

    def _found(self, path: str) -> list[str]:
        found = self._system.get_file_info(path)
        if found.type == fs.FileType.File:
            return [path]
        below = self._system.get_file_info(fs.FileSelector(path, recursive=True))
        if any(_TABLE.search(each.path) for each in below):
            raise UserError(
                f"{path}: is a Delta or Iceberg table, whose folder may also have outdated files;"
                " export its rows to plain Parquet files, and send those"
            )
        return sorted(each.path for each in below if each.path.endswith(".parquet"))


class OnceWriter:
    """Writes the rows of a source to a topic, after those that were written before.

    Args:
        topic: Topic to write to; partitions take turns.

    Raises:
        ConflictError: If other rows of this source were written before.
        OutsideError: If Kafka is unavailable or refuses.
    """

    def __init__(self, log: TransactionalLog, topic: str, source: str, rows: Rows) -> None:
        self._topic = topic
        self._digest = rows.digest
        self._key = f"{topic} {source}".encode()
        log.create_topics([NewTopic(PRODUCED, compacted=True)])
        name = hashlib.sha256(self._key).hexdigest()[:16]
        self._transactions = log.transactions(f"doll.produce.{name}")
        self.written = self._before(log, source)
        self._waiting = list[NewRecord]()
        self._bytes = 0

    def send(self, value: bytes) -> None:
        """Queue a row; a full queue is written as one transaction."""
        self._waiting.append(NewRecord(self._topic, value))
        self._bytes += len(value)
        if len(self._waiting) >= _ROWS or self._bytes >= _BYTES:
            self.flush()

    def poll(self) -> None:
        """Do nothing, because no request is pending between two transactions."""

    def flush(self, _timeout_s: float = 0.0) -> bool:
        """Write all queued rows."""
        if self._waiting:
            written = self.written + len(self._waiting)
            progress = msgspec.json.encode({"rows": written, "digest": self._digest})
            note = NewRecord(PRODUCED, progress, self._key, partition=0)
            self._transactions.write([*self._waiting, note])
            self._waiting, self._bytes, self.written = [], 0, written
        return True

    def close(self) -> None:
        """Close the connection."""
        self._transactions.close()

    def _before(self, log: Log, source: str) -> int:
        produced = records_of(log, Partition(PRODUCED, 0))
        notes = [record.value for record in produced if record.key == self._key]
        if not notes or notes[-1] is None:
            return 0
        progress = msgspec.json.decode(notes[-1])
        if progress["digest"] != self._digest:
            raise ConflictError(
                f"{source}: has other files, rows or columns than when {progress['rows']:,}"
                f" of its rows were sent to {self._topic}; send to another topic"
            )
        return int(progress["rows"])


def _system_of(source: str) -> tuple[fs.FileSystem, str]:
    if not source.startswith("s3://"):
        return fs.LocalFileSystem(), source
    from common.storage.s3 import s3_server

    url = urlsplit(s3_server())
    # Arrow finds Amazon's servers itself, by the bucket's region.
    own = (url.hostname or "").endswith(("amazonaws.com", "amazonaws.com.cn"))
    named = {} if own else {"endpoint_override": url.netloc, "scheme": url.scheme}
    return fs.S3FileSystem(**named), source.removeprefix("s3://").rstrip("/")


def _whole_microseconds(rows: pa.Table) -> pa.Table:
    """Truncate nanoseconds, which Python's times do not have."""
    fields = [
        field.with_type(pa.timestamp("us", field.type.tz))
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns"
        else field
        for field in rows.schema
    ]
    return rows.cast(pa.schema(fields), safe=False)
