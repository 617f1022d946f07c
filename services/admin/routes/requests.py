"""What several routes share of requests: parameters, how bodies are read, an example of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

from fastapi import Path, Query, Request
from pydantic import TypeAdapter, ValidatorFunctionWrapHandler, WrapValidator

from common.errors import UserError
from doll.yaml_file import as_json, line_of, load_text

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


YAML_TYPE: Final = "application/yaml"
_JOB_FILE: Final = "doll.job_file"  # where a request carries it


async def job_file(request: Request) -> None:
    """Note a job file that was sent as YAML: whatever is wrong with a field is told by its line.

    Raises:
        UserError: If the body is neither YAML nor JSON, by its type.
        YamlError: If it is not what it says.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == YAML_TYPE:
        body = await request.body()
        try:
            request.scope[_JOB_FILE] = text = body.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"job file: is no text in UTF-8: {error}") from error
        load_text(text)
    elif kind != "application/json" and not kind.endswith("+json"):
        raise UserError(
            "body: must be JSON or a job file, sent with `Content-Type: application/json` or"
            f" `{YAML_TYPE}`"
        )


def line_in_job_file(scope: Mapping[str, object], field: str) -> int | None:
    """The line of a field, if a request came with a job file."""
    text = scope.get(_JOB_FILE)
    return line_of(text, field.removeprefix("body.")) if isinstance(text, str) else None


def strictly(kind: Any, *, file: bool = False) -> WrapValidator:  # noqa: ANN401 -- a model or a typed dictionary
    """Read a strict model as JSON, where a list is a tuple, and not as Python, where it is none.

    FastAPI hands models what `json.loads` made, and bytes as they came where that was not JSON.
    Used as `Annotated[JobSpec, strictly(JobSpec)]`.

    Args:
        kind: The model.
        file: Bytes are a job file that `job_file` has looked at.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def read(value: object, _plain: ValidatorFunctionWrapHandler) -> object:
        if isinstance(value, bytes) and file:
            return adapter.validate_json(as_json(load_text(value.decode())))
        if isinstance(value, bytes):
            raise ValueError("must be JSON, sent with `Content-Type: application/json`")  # noqa: TRY004 -- what pydantic understands
        return adapter.validate_json(json.dumps(value))

    return WrapValidator(read)
