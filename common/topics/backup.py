"""A file with the records of `doll.jobs` and `doll.keys`, and the way back from it.

    {"format": 1, "saved_s": 1795812345.1, "topics": {
      "doll.jobs": {"topic_id": "J7aWbs...", "settings": {"retention.ms": "-1", ...}, "records": {
        "digits": {"number": 12, "value": "<base64>"}}}, ...}}

The file has the record in force of each name, with its number. It holds the secrets that seal
snapshots and the hashes of API keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Literal

import msgspec

from common.errors import NotFoundError, UserError
from common.topics import names as topics
from common.topics.table import CompactedTable, InForce, table_topic

if TYPE_CHECKING:
    from common.ports.servers import Log

# Topics by the word for their entries.
_TABLES = {"job": topics.JOBS, "key": topics.KEYS}


class _Record(msgspec.Struct, frozen=True):
    number: int
    value: bytes


class _Topic(msgspec.Struct, frozen=True):
    topic_id: str
    settings: dict[str, str]
    records: dict[str, _Record]


class _Backup(msgspec.Struct, frozen=True):
    saved_s: float
    topics: dict[str, _Topic]
    format: Literal[1] = 1


_BACKUP = msgspec.json.Decoder(_Backup)


def back_up(log: Log, clock: Callable[[], float]) -> tuple[bytes, dict[str, int]]:
    """Return the content of a backup file, and the number of records by topic.

    Args:
        log: Log that has the topics.
        clock: Returns seconds since 1970.

    Raises:
        NotFoundError: If neither topic has a record: there is nothing to save.
        UnavailableError: If Kafka is unavailable for long.
    """
    found = dict[str, _Topic]()
    for noun, topic in _TABLES.items():
        with closing(_table(log, topic, noun)) as table:
            records = {name: _Record(*each) for name, each in table.in_force().items()}
        about, settings = log.describe([topic]), log.settings([topic])
        topic_id = about[topic].topic_id if topic in about else ""
        found[topic] = _Topic(topic_id, settings.get(topic, {}), records)
    counts = {topic: len(each.records) for topic, each in found.items()}
    if not any(counts.values()):
        raise NotFoundError(f"there is nothing to save: {' and '.join(counts)} have no records")
    return msgspec.json.format(msgspec.json.encode(_Backup(clock(), found))), counts


def restore(log: Log, content: bytes, *, replace: bool) -> tuple[dict[str, int], list[str]]:
    """Write the records of a backup file to their topics, and create the topics if need be.

    Args:
        log: Log to which the records are written.
        content: Content of the file.
        replace: True to write a record even if the topic has another one of its name.

    Returns:
        The number of records that were written, by topic, and the settings of the topics that
        differ from those in the file, one sentence each.

    Raises:
        UserError: If the content is no backup.
        ConflictError: If a topic has other records of the same names and `replace` is false, or if
            somebody else writes them at the same time. Nothing is written to that topic then.
        UnavailableError: If Kafka is unavailable for long.
    """
    try:
        backup = _BACKUP.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"the file is no backup of DOLL: {error}") from error
    if unknown := sorted(backup.topics.keys() - set(_TABLES.values())):
        raise UserError(f"the file is no backup of DOLL: it names the topic {unknown[0]!r}")
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


def _differing(topic: str, saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a sentence for each setting that is not as it was saved."""
    ours = table_topic(topic).settings
    return [
        f"{topic}: {name} was {saved[name]}, and is {now.get(name, 'not set')}"
        for name in sorted(saved)
        if now.get(name) != saved[name] and name not in ours
    ]


def _table(log: Log, topic: str, noun: str) -> CompactedTable[bytes]:
    return CompactedTable(log, topic, lambda _, value: value, noun, closed=False)
