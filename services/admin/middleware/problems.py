"""All error responses, as application/problem+json (RFC 9457)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from fastapi.exceptions import RequestValidationError
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common.api.answers import Answer
from common.config.validation import problems_of
from common.errors import (
    ConflictError,
    DollError,
    GivenError,
    NotFoundError,
    OutsideError,
    UnavailableError,
    UnknownOutcomeError,
    UserError,
)
from common.telemetry.logging import event_logger
from doll.yaml_file import YamlError
from services.admin.routes.requests import line_in_job_file

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from pydantic.config import JsonDict
    from starlette.types import Scope

# Format of a route's answers in FastAPI.
Responses: TypeAlias = dict[int | str, dict[str, Any]]

MEDIA_TYPE = "application/problem+json"
# Value of Retry-After while a server is unavailable. Servers recover in seconds, or not soon.
RETRY_S = 2
# Maximum number of an answer's `errors`.
_MOST_FIELDS = 100
# Maximum length of a text, which may quote the request.
_MOST_CHARACTERS = 2000

_log = event_logger(__name__)
# The first class that matches decides.
_STATUSES: tuple[tuple[type[DollError], int], ...] = (
    (NotFoundError, 404),
    (ConflictError, 409),
    (UserError, 422),
    (UnknownOutcomeError, 504),
    (UnavailableError, 503),
    (OutsideError, 502),
)
_MEANINGS = {
    400: "The request is not valid HTTP, or its body is not valid JSON.",
    401: "The request has no API key, or the key is not valid.",
    403: "The role of the API key does not permit this request, or the request comes from another"
    " site.",
    404: "The requested job, or part of a job, does not exist.",
    408: "The request did not arrive completely in time.",
    409: "The request conflicts with the current state of the job, such as a purge that is under"
    " way, or with a concurrent change. Get the job and decide again.",
    413: "The body of the request is larger than this service accepts.",
    422: "The request has invalid fields. `errors` lists each with its path.",
    429: "Too many requests, or too many open event streams. `Retry-After` is the number of seconds"
    " to wait.",
    502: "A server that DOLL depends on, such as Kafka, refused the operation.",
    503: "A server that DOLL depends on, such as Kafka, is unavailable. `Retry-After` is the number"
    " of seconds to wait. If the request was a change of a job, the change was not made.",
    504: "Kafka did not confirm a change in time. The change may or may not have been made, or may"
    " still be made. Repeat a submission with the same `Idempotency-Key` to find its job.",
}


class FieldProblem(Answer):
    """Problem with one field of a request."""

    field: str = Field(
        description="Path of the field in the request.", examples=["body.group_size"]
    )
    detail: str = Field(
        description="What is wrong with the field.", examples=["must be at least 1, got -3"]
    )
    line: int | None = Field(
        default=None,
        ge=1,
        description="Line of the field in a job file that was sent as YAML; absent in other"
        " responses.",
    )


_EXAMPLE: Final[JsonDict] = {
    "type": "about:blank",
    "title": "Not Found",
    "status": 404,
    "detail": 'there is no job "digits"',
    "instance": "/v1/jobs/digits",
}


class Problem(Answer, json_schema_extra={"example": _EXAMPLE}):
    """Reason why a request was not fulfilled."""

    type: str = Field(default="about:blank", description="Always `about:blank` (RFC 9457).")
    title: str = Field(description="Name of the HTTP status of the response, such as `Not Found`.")
    status: int = Field(ge=400, le=599, description="HTTP status code of the response.")
    detail: str = Field(description="What went wrong, and what to do about it; a text for people.")
    instance: str = Field(description="URL path of the request.")
    errors: tuple[FieldProblem, ...] | None = Field(
        default=None,
        description="Problem of each invalid field of the request; absent unless the status is"
        " 422.",
    )


def documented(*statuses: int) -> Responses:
    """Return the error responses of a route, in addition to `ALWAYS`."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


# Error responses of every route.
ALWAYS = documented(400, 401, 403, 408, 413, 422, 429, 503)


def problem(
    status: int,
    detail: str,
    instance: str,
    *,
    errors: Sequence[FieldProblem] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a response that says what is wrong."""
    body = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=_sendable(detail),
        instance=instance,
        errors=tuple(
            FieldProblem(field=_sendable(each.field), detail=_sendable(each.detail), line=each.line)
            for each in errors
        )
        or None,
    )
    return Response(body.model_dump_json(exclude_none=True), status, headers, media_type=MEDIA_TYPE)


def _sendable(text: str) -> str:
    """Return a text without unpaired surrogates, which JSON may contain and UTF-8 may not."""
    return text[:_MOST_CHARACTERS].encode(errors="replace").decode()


def problem_of(error: DollError, scope: Scope) -> Response:
    """Return the response to an error of ours; an unexpected one is logged, without details."""
    instance = scope["path"]
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return failure(error, instance)
    headers = {"Retry-After": str(RETRY_S)} if error.retriable else None
    fields = []
    if isinstance(error, GivenError):
        errors = [(f"body.{each}", error.problem) for each in error.fields]
        fields = _fields(errors, scope)
    elif isinstance(error, YamlError):
        fields = [FieldProblem(field="body", detail=str(error), line=error.line)]
    return problem(status, str(error), instance, errors=fields, headers=headers)


def failure(error: Exception, instance: str) -> Response:
    """Log the current exception, and return a response without its details."""
    _log.exception("request_failed", path=instance, kind=type(error).__name__)
    return problem(500, "internal error; see the log of the admin service", instance)


def install(app: FastAPI) -> None:
    """Install the error handlers in an application."""
    for kind in (DollError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    """Return the response to our errors, and to those of the router, FastAPI and our routes."""
    path = request.url.path
    match error:
        case DollError():
            return problem_of(error, request.scope)
        case HTTPException(status_code=status, detail=detail):
            if status == HTTPStatus.NOT_FOUND and detail == HTTPStatus.NOT_FOUND.phrase:
                detail = f"there is nothing at {path}"
            elif status == HTTPStatus.METHOD_NOT_ALLOWED:
                detail = f"{request.method} is not supported here"
            return problem(status, detail, path, headers=error.headers)
        case RequestValidationError():
            return _invalid(error, request.scope)
    raise error


def _fields(errors: Iterable[tuple[str, str]], scope: Scope) -> list[FieldProblem]:
    """Return the problem of each field, with its line if a job file was sent."""
    return [
        FieldProblem(field=where, detail=said, line=line_in_job_file(scope, where))
        for where, said in errors
    ]


def _invalid(error: RequestValidationError, scope: Scope) -> Response:
    found, path = error.errors(), scope["path"]
    if any(details["type"] == "json_invalid" for details in found):
        return problem(400, "the body is not valid JSON", path)
    fields = _fields(problems_of(found[:_MOST_FIELDS]), scope)
    detail = "; ".join(f"{each.field}: {each.detail}" for each in fields[:3])
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return problem(422, detail + more, path, errors=fields)
