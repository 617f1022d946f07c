"""Parameters that several routes share, each with its range and an example."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from fastapi import Path, Query

# The pattern is told and not enforced: a name that cannot be is that of no job, so 404.
JobName: TypeAlias = Annotated[
    str,
    Path(
        description="The job's name.",
        examples=["digits"],
        json_schema_extra={"pattern": "^[a-z0-9][a-z0-9._-]{0,99}$"},
    ),
]
Limit: TypeAlias = Annotated[
    int, Query(ge=1, le=500, description="How many at most.", examples=[100])
]
