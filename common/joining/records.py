"""Records of both sides as JSON: what is looked at, what is refused, and the sample they become."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from common.core.spans import Partition
from common.data.codecs import TOO_DEEP, is_too_deep, reason_of, unframed
from common.data.columns import Scalar, seconds_of, text_of
from common.data.fields import Keys, keys_of
from common.joining.machine import SIDES, Entry, Side, Times

if TYPE_CHECKING:
    from common.ports.servers import LogRecord

LARGEST_BYTES = 500_000  # of a record: with what is added, our topics must take it
_LONGEST_KEY = 1_000  # bytes
_AHEAD_S = 86_400.0  # no clock is so wrong, but some are in ms: all others would be late after it
_encode = msgspec.json.Encoder().encode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class JoinSpec(msgspec.Struct, frozen=True):
    """What is joined, and how."""

    left: str  # topics
    right: str
    to: str
    left_key: str  # paths of what must be the same
    right_key: str
    times: Times
    defaults: dict[str, str]  # path in the right record: JSON, where there is no right one
    joined: dict[str, str]  # of these: JSON, where the right one does not say it
    left_time: str = ""  # paths; empty: Kafka's timestamps
    right_time: str = ""

    @property
    def topics(self) -> dict[Side, str]:
        """The topic of each side."""
        return {"left": self.left, "right": self.right}

    @property
    def identity(self) -> str:
        """What entries that were kept depend on: it may not change."""
        left = f"{self.left} by {self.left_key} at {self.left_time or 'its timestamp'}"
        right = f"{self.right} by {self.right_key} at {self.right_time or 'its timestamp'}"
        return f"{left} and {right} for {', '.join(sorted(self.defaults))}"


class Records:
    """Reads records as a join wants them, and writes samples.

    Args:
        time_s: Now, since 1970.
    """

    def __init__(self, spec: JoinSpec, time_s: Callable[[], float]) -> None:
        paths = (spec.left_key, spec.left_time), (spec.right_key, spec.right_time)
        self._paths = {
            side: (keys_of(key), keys_of(time) if time else None)
            for side, (key, time) in zip(SIDES, paths, strict=True)
        }
        self._added = [(keys_of(path), path, spec.joined.get(path)) for path in spec.defaults]
        self._defaults = {
            keys_of(path)[-1]: msgspec.Raw(text.encode()) for path, text in spec.defaults.items()
        }
        self._topics = spec.topics
        self._time_s = time_s

    def entry(self, side: Side, record: LogRecord) -> Entry:
        """What counts of a record.

        Raises:
            ValueError: If it cannot be joined; says why.
        """
        value = unframed(record.value)
        if value is None:
            raise ValueError("no value (a tombstone)")
        size = len(value) + len(record.key or b"")
        if size > LARGEST_BYTES:
            raise ValueError(f"has more than the {LARGEST_BYTES} bytes that can be joined")
        if is_too_deep(value):
            raise ValueError(TOO_DEEP)
        try:
            found = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(reason_of(error)) from error
        if not isinstance(found, dict):
            raise ValueError(f"a record is an object, not a {type(found).__name__}")  # noqa: TRY004 -- the record's
        key, time = self._paths[side]
        text = text_of(_scalar(found, key))
        if len(text.encode()) > _LONGEST_KEY:
            raise ValueError(f"its key has more than {_LONGEST_KEY} bytes")
        time_s = seconds_of(_scalar(found, time)) if time else record.timestamp_s
        if not 0 < time_s <= self._time_s() + _AHEAD_S:
            raise ValueError("its time is not known, or ahead of the clock by a day")
        if side == "right":
            value = _encode(
                {
                    keys[-1]: self._said(found, keys, path, instead)
                    for keys, path, instead in self._added
                }
            )
        return Entry(record.offset, text, round(time_s * 1000), value, record.key)

    def _said(self, record: object, keys: Keys, path: str, instead: str | None) -> object:
        """What a right record says for a field of a sample."""
        value = _at(record, keys)
        if value is not None:
            return value
        if instead is None:
            raise ValueError(f"{path}: is null or absent; `--joined {path}=1` says what it means")
        return msgspec.Raw(instead.encode())

    def sample(self, partition: int, left: Entry, right: Entry | None) -> tuple[bytes, ...]:
        """The value of a sample, and the addresses of the records that it is made of."""
        added = self._defaults if right is None else _decode_fields(right.value)
        return _encode(_decode_fields(left.value) | added), *(
            f"{Partition(self._topics[side], partition)}@{entry.offset}".encode()
            for side, entry in zip(SIDES, (left, right), strict=True)
            if entry is not None
        )


def _at(record: object, keys: Keys) -> Any:  # noqa: ANN401 -- whatever a record holds
    """The value at a path; None where there is none."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def _scalar(record: object, keys: Keys) -> Scalar:
    value = _at(record, keys)
    if not isinstance(value, Scalar):
        found = "null or absent" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{'.'.join(keys)}: is {found}")  # noqa: TRY004 -- the record's
    return value
