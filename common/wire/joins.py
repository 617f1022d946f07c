"""Records of the topic that a join goes on from, to bytes and back: JSON, as Kafka's tools show it.

left 17     an entry of the left side that waits, by its offset
right 5     likewise
progress    where both sides are read on, and what is known besides
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from common.core.spans import LogPosition  # noqa: TC001 -- msgspec reads it when run
from common.errors import WireError
from common.joining.machine import NEVER_MS, Entry, Fate, Progress, Side

PROGRESS = b"progress"


class JoinProgress(msgspec.Struct, frozen=True):
    """Where a join stands in one partition."""

    identity: str  # of the join: see `JoinSpec`
    left: LogPosition  # of the next record
    right: LogPosition
    known: Progress
    dead_letters: int = 0


class KeptEntry(NamedTuple):
    """An entry with its side."""

    side: Side
    entry: Entry


class _Entry(msgspec.Struct, omit_defaults=True):
    side: Side
    offset: int
    key: str
    time_ms: int
    value: msgspec.Raw
    record_key: bytes | None = None
    stream_ms: int = NEVER_MS
    fate: Fate = "unmatched"


_encode = msgspec.json.Encoder().encode
_progress = msgspec.json.Decoder(JoinProgress)
_entry = msgspec.json.Decoder(_Entry)


def entry_key(side: Side, offset: int) -> bytes:
    """The key of an entry's record."""
    return f"{side} {offset}".encode()


def encode_entry(side: Side, entry: Entry) -> bytes:
    """Write an entry."""
    return _encode(_Entry(side, **entry._replace(value=msgspec.Raw(entry.value))._asdict()))


def encode_progress(progress: JoinProgress) -> bytes:
    """Write where a join stands."""
    return _encode(progress)


def decode_kept(key: bytes | None, value: bytes) -> JoinProgress | KeptEntry:
    """Read one record.

    Raises:
        WireError: If it is none of ours.
    """
    try:
        if key == PROGRESS:
            return _progress.decode(value)
        read = _entry.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{key!r} of a join: {error}") from error
    if key != entry_key(read.side, read.offset):
        raise WireError(f"{key!r} of a join: the value is of another key")
    fields = {name: getattr(read, name) for name in Entry._fields}
    return KeptEntry(read.side, Entry(**fields | {"value": bytes(read.value)}))
