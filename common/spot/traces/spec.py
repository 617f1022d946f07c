"""A user's choice of a recorded series: a file, one of its series, and its speed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.config.validation import complaint, field_names
from common.errors import UserError
from doll.yaml_file import as_json, load_text, read_text

if TYPE_CHECKING:
    from pathlib import Path

Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class WrittenPart(BaseModel):
    """Part of a user's file: without unknown fields, and immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read this part from a YAML or JSON file.

        Raises:
            UserError: If the file is missing or invalid; the message names the field.
        """
        text = read_text(path)
        try:
            return cls.model_validate_json(as_json(load_text(text, str(path)), str(path)))
        except ValidationError as error:
            problem = complaint(error, allowed=partial(field_names, cls))
            raise UserError(f"{path}: {problem}") from error


class TraceSpec(WrittenPart):
    """A file of recorded prices, availability or arrivals, to replay."""

    file: str = Field(
        description="Path of the recording, relative to the file that contains this setting."
    )
    series: dict[str, str] = Field(
        default={},
        description="Selects rows of the recording: for each column, the value that its rows must"
        " have. Optional. If unset, the file must have only one series.",
    )
    column: str = Field(
        default="",
        description="Column of the recording that contains the values. Optional. If unset, the"
        " file must have only one.",
    )
    speed: Positive = Field(
        default=1.0,
        description="Speed at which the recording is replayed, as a multiple of real time. The"
        " DOLL paper replays prices at 2000.",
    )
    start_s: Seconds | None = Field(
        default=None,
        description="Time in the recording at which the replay starts, in seconds. Optional. If"
        " unset, random.",
    )
