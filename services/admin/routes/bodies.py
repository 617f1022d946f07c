"""Bodies of requests, read as strictly as the files of `doll`: nothing is converted silently."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, WrapValidator

if TYPE_CHECKING:
    from pydantic import ValidatorFunctionWrapHandler


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
