"""Which recorded series a person asks for: a file, one of its series, and at what speed."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class WrittenPart(BaseModel):
    """Part of what a person writes: nothing unknown, nothing changed later."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TraceSpec(WrittenPart):
    """A file of recorded prices, availability or arrivals."""

    file: str = Field(description="Relative to the file that names it.")
    series: dict[str, str] = Field(
        default={},
        description="Which rows: column to value; empty where the file has one series.",
    )
    column: str = Field(
        default="", description="Which one holds the values, where there are several."
    )
    speed: Positive = Field(default=1.0, description="The paper's prices: 2000.")
    start_s: Seconds | None = Field(
        default=None, description="Where in the trace a reader begins; null: drawn."
    )
