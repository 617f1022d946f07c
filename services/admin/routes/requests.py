"""What several routes share of requests: parameters, how bodies are read, an example of a job."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from fastapi import Path, Query
from pydantic import TypeAdapter, WrapValidator

if TYPE_CHECKING:
    from pydantic import ValidatorFunctionWrapHandler

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

JOB: Final[dict[str, Any]] = {
    "name": "digits",
    "streams": ["clinic-a", "clinic-b"],
    "records": {
        "codec": "tensor",
        "fields": {"image": {"dtype": "uint8", "shape": [1, 8, 8]}, "label": {"dtype": "int64"}},
    },
    "task": {"name": "image-classifier", "classes": 10},
    "batch_size": 64,
    "group_size": 4,
    "optimizer": {"name": "adam", "learning_rate": 0.002},
    "stop": {"updates": 10000, "loss": 0.05, "deadline_s": 6720},
    "checkpoint": {"every_updates": 200, "keep": 3},
    "provisioning": {"workers": 8, "policy": "adaptive"},
}


def strictly(kind: Any) -> WrapValidator:  # noqa: ANN401 -- a model or a typed dictionary
    """Read a strict model as JSON, where a list is a tuple, and not as Python, where it is none.

    FastAPI hands models what `json.loads` made. Used as `Annotated[JobSpec, strictly(JobSpec)]`.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def read(value: object, _plain: ValidatorFunctionWrapHandler) -> object:
        if isinstance(value, bytes):
            raise ValueError("must be JSON, sent with `Content-Type: application/json`")  # noqa: TRY004 -- what pydantic understands
        return adapter.validate_json(json.dumps(value))

    return WrapValidator(read)
