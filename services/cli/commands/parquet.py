"""Rows of Parquet files for `doll produce`: as JSON objects, in order, each once.

A transaction of Kafka holds some rows and, in a compacted topic, how many of the source there are:
so whoever is interrupted leaves all of them or none, and who asks again goes on behind them.
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
_READ_ROWS = 1_000  # decoded at once
_ROWS = 5_000  # of one transaction
_BYTES = 4 << 20


class Rows:
    """The rows of a file, or of all files below a folder, by name.

    Args:
        source: A path, or `s3://bucket/...`.
        leave_out: Columns that are not sent.

    Raises:
        UserError: If there are none, or they are no Parquet, or a column is not there, or they are
            a table of which not every file counts.
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
        """The rows from one on, each as a JSON object.

        Raises:
            UserError: If a file cannot be read, or lacks a column of the first.
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
                f"{path}: is a Delta or Iceberg table, of which not every file counts: write its"
                " rows to Parquet files of their own, and send those"
            )
        return sorted(each.path for each in below if each.path.endswith(".parquet"))


class OnceWriter:
    """Writes the rows of a source to a topic, and begins behind those that are there.

    Args:
        topic: What is written to; partitions take turns.

    Raises:
        ConflictError: If others of this source are there already.
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
        """Send the next row, with some others."""
        self._waiting.append(NewRecord(self._topic, value))
        self._bytes += len(value)
        if len(self._waiting) >= _ROWS or self._bytes >= _BYTES:
            self.flush()

    def poll(self) -> None:
        """Nothing is under way between two transactions."""

    def flush(self, _timeout_s: float = 0.0) -> bool:
        """Write what waits."""
        if self._waiting:
            written = self.written + len(self._waiting)
            progress = msgspec.json.encode({"rows": written, "digest": self._digest})
            note = NewRecord(PRODUCED, progress, self._key, partition=0)
            self._transactions.write([*self._waiting, note])
            self._waiting, self._bytes, self.written = [], 0, written
        return True

    def close(self) -> None:
        """Let go of the connection."""
        self._transactions.close()

    def _before(self, log: Log, source: str) -> int:
        produced = records_of(log, Partition(PRODUCED, 0))
        notes = [record.value for record in produced if record.key == self._key]
        if not notes or notes[-1] is None:
            return 0
        progress = msgspec.json.decode(notes[-1])
        if progress["digest"] != self._digest:
            raise ConflictError(
                f"{source} has other files, rows or columns than when {progress['rows']:,}"
                f" of its rows were sent to {self._topic}: send to another topic"
            )
        return int(progress["rows"])


def _system_of(source: str) -> tuple[fs.FileSystem, str]:
    if not source.startswith("s3://"):
        return fs.LocalFileSystem(), source
    from common.storage.s3 import s3_server

    url = urlsplit(s3_server())
    # Amazon's servers Arrow finds itself, by the bucket's region.
    own = (url.hostname or "").endswith(("amazonaws.com", "amazonaws.com.cn"))
    named = {} if own else {"endpoint_override": url.netloc, "scheme": url.scheme}
    return fs.S3FileSystem(**named), source.removeprefix("s3://").rstrip("/")


def _whole_microseconds(rows: pa.Table) -> pa.Table:
    """Times as finely as Python's: it has no nanoseconds."""
    fields = [
        field.with_type(pa.timestamp("us", field.type.tz))
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns"
        else field
        for field in rows.schema
    ]
    return rows.cast(pa.schema(fields), safe=False)
