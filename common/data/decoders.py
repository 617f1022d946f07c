"""Decoders of types that are only known at run time, such as the records of a job.

msgspec completes its description of a Struct at the type's first use, and the process crashes if
two threads do that at once. So all other decoders are constants, which the import of their module
builds (`tests/test_architecture.py` checks that), and the functions here let one thread in at a
time.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

_lock = threading.Lock()


def new_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Build a decoder of JSON. Several threads may use it at once."""
    with _lock:
        return msgspec.json.Decoder(kind)


def converted(value: object, kind: type[T]) -> T:
    """Convert plain data to a type.

    Raises:
        ValidationError: If the data does not fit the type.
    """
    with _lock:
        return msgspec.convert(value, kind)
