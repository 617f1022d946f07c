"""Types of message fields, with constraints that are checked on decoding."""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import numpy as np
from msgspec import Meta

T = TypeVar("T")

# Kafka's offsets are signed 64-bit integers, and msgpack has the same limit.
_LARGEST = 2**63 - 1
_LARGEST_FLOAT = float(np.finfo(np.float64).max)

Count: TypeAlias = Annotated[int, Meta(ge=0, le=_LARGEST)]
Ordinal: TypeAlias = Annotated[int, Meta(ge=1, le=_LARGEST)]
OrNone: TypeAlias = Annotated[int, Meta(ge=-1, le=_LARGEST)]  # -1: there is none
# Leader epoch of Kafka. -1 if unknown.
KafkaEpoch: TypeAlias = Annotated[int, Meta(ge=-1, lt=2**31)]
NonEmpty: TypeAlias = Annotated[T, Meta(min_length=1)]
Finite: TypeAlias = Annotated[float, Meta(ge=-_LARGEST_FLOAT, le=_LARGEST_FLOAT)]
Rate: TypeAlias = Annotated[float, Meta(ge=0, le=_LARGEST_FLOAT)]
# At most decades, so that sums are finite.
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Time: TypeAlias = Annotated[float, Meta(ge=0, le=1e11)]  # seconds since 1970, up to the year 5138
# Limited, so that products with times are finite.
PerSecond: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]
# Losses, metrics and squared norms. Sums of them are finite, and no sum of float32 numbers reaches
# the limit.
Sum: TypeAlias = Annotated[float, Meta(ge=-1e300, le=1e300)]
Square: TypeAlias = Annotated[float, Meta(ge=0, le=1e300)]
HostPort: TypeAlias = Annotated[str, Meta(max_length=64)]  # numeric
