"""Each field of each wire type is broken in the bytes; a file lists what readers refuse.

A line of `refusals.txt` is one place in a message of `full_messages` and the values that no reader
accepts there. `python -m tests.unit.wire.test_refusals` rewrites the file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from common.core.messages import Gradient
from common.errors import WireError
from common.spot.plans import decode_plan
from common.wire import messages as wire
from tests.unit.wire.full_messages import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = Path(__file__).with_name("refusals.txt")


def decode_reply(data: bytes) -> object:
    """Decode a reply's header; a gradient has a vector behind it."""
    kind = msgspec.msgpack.decode(data)["type"]
    body = bytes(8) if kind == Gradient.__struct_config__.tag else b""
    header = msgspec.msgpack.encode(("digits", msgspec.Raw(data)))
    return wire.decode_reply(wire.frame(header, body))


IN_KAFKA = {
    "claim": wire.decode_claim,
    "audit": wire.decode_audit,
    "schema": wire.decode_schema,
    "plan": decode_plan,
}
IN_REDIS = {
    "leader status": wire.decode_leader_status,
    "trigger": wire.decode_trigger,
    "reply": decode_reply,
    "job demand": wire.decode_demand,
    "worker placement": wire.decode_placement,
}
# 8 is between two offsets of the messages, 21 above an end, and 51 above a position.
INTEGERS = {str(n): n for n in (-2, -1, 0, 3, 8, 21, 51)} | {f"2^{n}": 2**n for n in (31, 32, 63)}
FLOATS = {str(n): n for n in (math.nan, math.inf, -1.0, 0.0, 2e9, 2e11, 2e12, 2e300, -2e300)}
TEXTS = {"''": "", "65 characters": "x" * 65, "4001 characters": "x" * 4001}


def values(found: object) -> dict[str, Any]:
    """Return values of the same type, by their names in the file."""
    if isinstance(found, list):
        return {"[]": [], "the last one twice": found + found[-1:], "backwards": found[::-1]}
    if isinstance(found, dict):
        return {"a nameless key": dict.fromkeys([""], next(iter(found.values()), 0))}
    kinds = {int: INTEGERS, float: FLOATS, str: TEXTS, bytes: {"5 bytes": bytes(5)}}
    return kinds.get(type(found), {})


def places(message: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:  # noqa: ANN401 -- raw data
    """Yield the places and values in a message; of a list, at most the first nine."""
    yield path, message
    if isinstance(message, (dict, list)):
        pairs = message.items() if isinstance(message, dict) else enumerate(message[:9])
        for key, each in pairs:
            yield from places(each, (*path, key))


def replaced(message: Any, path: tuple[Any, ...], new: object) -> Any:  # noqa: ANN401 -- raw data
    """Return a message with another value at one place."""
    if not path:
        return new
    copy = message.copy()
    copy[path[0]] = replaced(message[path[0]], path[1:], new)
    return copy


def refusals() -> Iterator[str]:
    """Yield the lines of the file."""
    for kind, decode in (IN_KAFKA | IN_REDIS).items():
        codec = msgspec.json if kind in IN_KAFKA else msgspec.msgpack
        for message in MESSAGES[kind]:
            raw = codec.decode(codec.encode(message))
            # The unchanged message is accepted.
            decode(codec.encode(raw))
            for path, found in places(raw):
                refused = [
                    name
                    for name, value in values(found).items()
                    if path not in {(), ("type",)}
                    and not (kind in IN_KAFKA and name in {"nan", "inf"})  # no JSON
                    and is_refused(decode, codec.encode(replaced(raw, path, value)))
                ]
                if refused:
                    where = ".".join(
                        "-".join(map(str, k)) if isinstance(k, tuple) else str(k) for k in path
                    )
                    yield f"{kind} {type(message).__name__} {where}: {', '.join(refused)}"


def is_refused(decode: Any, data: bytes) -> bool:  # noqa: ANN401 -- of any message
    """Return True if a reader refuses these bytes."""
    try:
        decode(data)
    except WireError:
        return True
    return False


def test_readers_refuse_each_value_that_a_field_cannot_have() -> None:
    assert list(refusals()) == FILE.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in refusals()), encoding="utf-8")
