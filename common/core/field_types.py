"""Types of a message's fields: what they allow is checked where bytes come in."""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import numpy as np
from msgspec import Meta

T = TypeVar("T")

_LARGEST = 2**63 - 1  # Kafka's offsets are signed 64-bit, and msgpack ends there too
_LARGEST_FLOAT = float(np.finfo(np.float64).max)

Count: TypeAlias = Annotated[int, Meta(ge=0, le=_LARGEST)]
Ordinal: TypeAlias = Annotated[int, Meta(ge=1, le=_LARGEST)]
OrNone: TypeAlias = Annotated[int, Meta(ge=-1, le=_LARGEST)]  # -1: there is none
KafkaEpoch: TypeAlias = Annotated[int, Meta(ge=-1, lt=2**31)]  # of its leaders; -1: not known
NonEmpty: TypeAlias = Annotated[T, Meta(min_length=1)]
Finite: TypeAlias = Annotated[float, Meta(ge=-_LARGEST_FLOAT, le=_LARGEST_FLOAT)]
Rate: TypeAlias = Annotated[float, Meta(ge=0, le=_LARGEST_FLOAT)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]  # decades; sums of them are finite
Time: TypeAlias = Annotated[float, Meta(ge=0, le=1e11)]  # seconds since 1970, up to the year 5138
PerSecond: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]  # products with it are finite
# Of losses, metrics, squares: sums of these are finite, those of float32 are smaller.
Sum: TypeAlias = Annotated[float, Meta(ge=-1e300, le=1e300)]
Square: TypeAlias = Annotated[float, Meta(ge=0, le=1e300)]
HostPort: TypeAlias = Annotated[str, Meta(max_length=64)]  # numeric
