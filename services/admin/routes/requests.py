"""Parts of requests that several routes share: parameters, body parsing, and an example job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from fastapi import Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidatorFunctionWrapHandler, WrapValidator

from common.errors import UserError
from doll.yaml_file import as_json, line_of, load_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from starlette.responses import Response

    from doll.yaml_file import Lines

# The pattern is documented and not enforced: an invalid name matches no job, so the answer is 404.
JobName: TypeAlias = Annotated[
    str,
    Path(
        description="Name of the job.",
        examples=["digits"],
        json_schema_extra={"pattern": "^[a-z0-9][a-z0-9._-]{0,99}$"},
    ),
]
Limit: TypeAlias = Annotated[
    int,
    Query(
        ge=1, le=500, description="Maximum number of entries of the list to return.", examples=[100]
    ),
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


# Most values in one body: ten thousand rates of workers, and the other fields. Each value may cause
# an error message, which takes a kilobyte.
MOST_VALUES: Final = 12_000
YAML_TYPE: Final = "application/yaml"
# Key in a request's scope.
_LINES: Final = "doll.job_file_lines"


class Body(bytes):
    """Request body. `json` is the text that a model parses, or None if the body is not JSON."""

    json: bytes | str | None = None


class _Request(Request):
    """Request whose body FastAPI does not parse, so that only the model parses it."""

    async def body(self) -> Body:
        """Return the body; the same object each time."""
        body = await super().body()
        if not isinstance(body, Body):
            self._body = body = Body(body)
        return body

    async def json(self) -> Body:
        """Return the body, too; FastAPI calls this if the content type is JSON."""
        body = await self.body()
        body.json = bytes(body)
        return body


class BodyRoute(APIRoute):
    """Route with a JSON body, declared as `Annotated[Model, strictly(Model), Body()]`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See the library."""
        handle = super().get_route_handler()

        async def handle_unparsed(request: Request) -> Response:
            try:
                return await handle(_Request(request.scope, request.receive))
            except RequestValidationError as error:
                # FastAPI's frames hold the error, and its traceback holds the frames, so the body
                # would stay in memory until the garbage collector runs.
                raise error.with_traceback(None) from None

        return handle_unparsed


async def job_file(request: Request) -> None:
    """Parse a YAML job file in a thread, and remember its lines for error messages.

    Raises:
        UserError: If the content type is neither YAML nor JSON.
        YamlError: If the body is not valid YAML.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == YAML_TYPE:
        body = await request.body()
        assert isinstance(body, Body)  # noqa: S101 -- the route is a `BodyRoute`
        body.json, request.scope[_LINES] = await run_in_threadpool(_job_in, body)
    elif kind != "application/json" and not kind.endswith("+json"):
        raise UserError(
            "body: must be JSON or a job file, sent with `Content-Type: application/json` or"
            f" `{YAML_TYPE}`"
        )


def _job_in(body: bytes) -> tuple[str, Lines]:
    """Return a job file as JSON, and its lines."""
    try:
        data, lines = load_lines(body.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"job file: must be UTF-8 text: {error}") from error
    return as_json(data), lines


def line_in_job_file(scope: Mapping[str, Any], field: str) -> int | None:
    """Return the line of a field, or None if the request has no job file."""
    return line_of(scope[_LINES], field.removeprefix("body.")) if _LINES in scope else None


def strictly(kind: Any) -> WrapValidator:  # noqa: ANN401 -- a model or a typed dictionary
    """Return a validator that parses a strict model as JSON, where a list is valid for a tuple.

    For a `BodyRoute`. A body with too many values is refused before it is parsed.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def read(value: Body, _plain: ValidatorFunctionWrapHandler) -> object:
        if value.json is None:
            raise UserError("body: must be JSON, sent with `Content-Type: application/json`")
        if sum(map(value.count, (b",", b"[", b"{"))) > MOST_VALUES:
            raise UserError(f"body: must have at most {MOST_VALUES:,} values")
        return adapter.validate_json(value.json)

    return WrapValidator(read)
