"""Backup of the records of `doll.jobs` and `doll.keys` to a file, and the restore.

    {"format": 1, "saved_s": 1795812345.1, "topics": {
      "doll.jobs": {"settings": {"retention.ms": "-1", ...}, "records": {
        "digits": {"number": 12, "value": "<base64>"}}}, ...}}

The file has the valid record of each job and key, with the number that orders the records of one
name. It holds the secrets that seal snapshots and the hashes of API keys.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec

from common.errors import ConflictError, NotFoundError, UnavailableError, UserError, decoded
from common.kafka import names as topics
from common.kafka.table import PATIENCE_S, CompactedTable, InForce, table_topic

if TYPE_CHECKING:
    from common.kafka.port import Log

T = TypeVar("T")

# Topics by the word for their entries.
_TABLES = {"job": topics.JOBS, "key": topics.KEYS}


class _Record(msgspec.Struct, frozen=True):
    number: Annotated[int, msgspec.Meta(ge=0, lt=10**15)]
    value: bytes


class _Topic(msgspec.Struct, frozen=True):
    settings: dict[str, str]
    records: dict[str, _Record]


class _Backup(msgspec.Struct, frozen=True):
    saved_s: float
    topics: dict[str, _Topic]
    format: Literal[1] = 1


_BACKUP = msgspec.json.Decoder(_Backup)


def back_up(
    log: Log, clock: Callable[[], float], earlier: bytes = b""
) -> tuple[bytes, dict[str, int]]:
    """Return the content of a backup file, and the number of records by topic.

    Args:
        log: Log that has the topics.
        clock: Returns seconds since 1970.
        earlier: Optional. Content of the backup that this one replaces. If unset, there
            is no comparison.

    Raises:
        ConflictError: If Kafka has fewer records of a topic than the earlier backup.
        UserError: If `earlier` is no backup.
        NotFoundError: If neither topic has a record: there is nothing to save.
        UnavailableError: If Kafka is unavailable for long.
    """
    found = dict[str, _Topic]()
    for noun, topic in _TABLES.items():
        with closing(_table(log, topic, noun)) as table:
            records = {name: _Record(*each) for name, each in table.in_force().items()}
        found[topic] = _Topic(log.settings([topic]).get(topic, {}), records)
    counts = _counts(found)
    if not any(counts.values()):
        raise NotFoundError(
            f"there is nothing to save: the topics {' and '.join(counts)} have no records"
        )
    for topic, count in _counts(_decoded(earlier).topics if earlier else {}).items():
        # Jobs that are deleted and keys that are revoked keep their records.
        if count > counts[topic]:
            raise ConflictError(
                f"the existing backup has {count:,} records of {topic}, but Kafka has only"
                f" {counts[topic]:,}; Kafka has lost some, so keep that backup or choose another"
                " file"
            )
    return msgspec.json.format(msgspec.json.encode(_Backup(clock(), found))), counts


def restore(log: Log, content: bytes, *, replace: bool) -> tuple[dict[str, int], list[str]]:
    """Write the records of a backup file to their topics, and create missing topics.

    Args:
        log: Log that the records are written to.
        content: Content of the file.
        replace: True to write a record even if the topic has a different one with the same key.

    Returns:
        The number of records that were written, by topic, and the settings of the topics that
        differ from those in the file, one sentence each.

    Raises:
        UserError: If the content is no backup.
        ConflictError: If a topic has other records of the same names and `replace` is false;
            nothing is written to that topic then. Also if another program writes these names at the
            same time; some records may be written then.
        UnavailableError: If Kafka is unavailable for long.
    """
    backup = _decoded(content)
    if not backup.topics:
        raise UserError("the file is not a backup of DOLL: it names no topic")
    if unknown := sorted(backup.topics.keys() - set(_TABLES.values())):
        raise UserError(f"the file is not a backup of DOLL: it names the topic {unknown[0]!r}")
    written, differing = dict[str, int](), list[str]()
    for noun, topic in _TABLES.items():
        if topic not in backup.topics:
            continue
        saved = backup.topics[topic]
        records = {name: InForce(each.number, each.value) for name, each in saved.records.items()}
        with closing(_table(log, topic, noun)) as table:
            written[topic] = table.restore(records, replace=replace)
        differing += _differing(topic, saved.settings, log.settings([topic]).get(topic, {}))
    return written, differing


def _decoded(content: bytes) -> _Backup:
    return decoded(_BACKUP.decode, content, "the file is not a backup of DOLL", UserError)


def _counts(found: Mapping[str, _Topic]) -> dict[str, int]:
    return {topic: len(each.records) for topic, each in found.items()}


def _differing(topic: str, saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a sentence for each saved setting that differs now, except those the table checks."""
    ours = table_topic(topic).settings
    return [
        f"{topic}: {name} was {saved[name]} and is now {now.get(name, 'not set')}"
        for name in sorted(saved)
        if now.get(name) != saved[name] and name not in ours
    ]


def _table(log: Log, topic: str, noun: str) -> BackupTable[bytes]:
    return BackupTable(log, topic, lambda _, value: value, noun, closed=False)


class BackupTable(CompactedTable[T]):
    """A table that reads its records for a backup, and restores them from one."""

    def in_force(self) -> dict[str, InForce]:
        """Return the record in force of each name, as of now.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        with self._lock:
            self._catch_up()
            return dict(self._in_force)

    def restore(self, records: Mapping[str, InForce], *, replace: bool) -> int:
        """Write records of a backup, each with its number, and return once they are in force.

        Records that the topic has already are left alone, so a restore that was interrupted can be
        repeated.

        Args:
            records: Records by name.
            replace: True to write a record even if the topic has another one of its name. The
                written record then has the next number.

        Returns:
            Number of records that were written.

        Raises:
            ConflictError: If the topic has other records of these names and `replace` is false;
                nothing is written then. Also if another program writes these names at the same
                time.
            UnavailableError: If Kafka is unavailable for long; some records may be written then.
        """
        with self._lock:
            self._catch_up()
            now = self._in_force
            new = {name: each for name, each in records.items() if now.get(name) != each}
            taken = sorted(new.keys() & now.keys())
            if taken and not replace:
                raise ConflictError(
                    f"{self._partition.topic}: already has other records of {', '.join(taken)},"
                    " nothing was written; use --replace to overwrite them with the backup's"
                )
            writes = {secrets.token_hex(8).encode(): name for name in new}
            self._outcomes.update(dict.fromkeys(writes))
            try:
                with closing(self._log.writer()) as writer:
                    for write, name in writes.items():
                        number = now[name].number + 1 if name in now else new[name].number
                        self._append(writer, name, number, write, new[name].value)
                    if not writer.flush(PATIENCE_S):
                        raise UnavailableError("Kafka did not confirm all records; restore again")
                self._catch_up()
                lost = sorted(name for write, name in writes.items() if not self._outcomes[write])
            finally:
                for write in writes:
                    del self._outcomes[write]
            if lost:
                raise ConflictError(
                    f"other programs wrote {', '.join(lost)} meanwhile; stop them and restore again"
                )
            return len(new)
