"""Which recorded series a person asks for: a file, one of its series, and at what speed."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class TraceSpec(BaseModel):
    """A file of recorded prices, availability or arrivals."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    file: str  # relative to the file that names it
    series: dict[str, str] = {}  # which rows: column -> value; empty where the file has one series
    column: str = ""  # which column holds the values, where there are several
    speed: Positive = 1.0  # the paper's prices: 2000
    start_s: Seconds | None = None  # where in the trace a reader begins; None: drawn
