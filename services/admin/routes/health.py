"""Health of this process and of the servers behind it, and its metrics."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from common.api.answers import Answer
from common.telemetry.metrics.registry import EXPOSITION
from services.admin.checks import Check  # noqa: TC001 -- pydantic reads it when run
from services.admin.middleware.access import VIEWER
from services.admin.middleware.problems import MEDIA_TYPE, RETRY_S, Problem
from services.admin.service import Answering  # noqa: TC001 -- FastAPI reads it when run

router = APIRouter(tags=["health"])


class Health(Answer):
    """Health of the process that answered the request."""

    ok: bool = Field(
        description="Always true: a process that cannot serve requests does not respond.",
        examples=[True],
    )


class Readiness(Answer):
    """Health of the servers that DOLL depends on."""

    kafka: Check = Field(description="Health of Kafka.")
    redis: Check = Field(description="Health of Redis.")
    storage: Check = Field(description="Health of object storage.")
    schema_registry: Check = Field(
        description="Health of the schema registry, as reported by workers whose records wait for"
        " a schema."
    )


class NotReady(Readiness, Problem):
    """At least one server that DOLL depends on is unavailable."""


_NOT_READY = NotReady.model_json_schema(ref_template="#/components/schemas/{model}")
# The document defines these schemas already.
_NOT_READY.pop("$defs")


@router.get(
    "/healthz",
    response_description="The process is running.",
)
async def get_health() -> Health:
    """Report that the process is running. Needs no API key."""
    return Health(ok=True)


@router.get(
    "/readyz",
    response_model=Readiness,
    responses={
        503: {
            "description": "At least one server that DOLL depends on is unavailable.",
            "content": {MEDIA_TYPE: {"schema": _NOT_READY}},
        },
    },
    response_description="All servers that DOLL depends on are available.",
)
async def get_readiness(service: Answering, request: Request) -> Readiness | Response:
    """Report the health of Kafka, Redis, object storage and the schema registry.

    Needs no API key. The servers are checked at most every 3 seconds, no matter how often this is
    called. A server also counts as unavailable if coordinators or workers report that they cannot
    use it.
    """
    found = await service.checks.look()
    ill = [f"{name}: {check.reason}" for name, check in found.items() if not check.ok]
    if not ill:
        return Readiness.model_validate(found)
    status = HTTPStatus.SERVICE_UNAVAILABLE
    problem = {
        "title": status.phrase,
        "status": status,
        "detail": "; ".join(ill),
        "instance": request.url.path,
    }
    body = NotReady.model_validate({**problem, **found}).model_dump_json(exclude_none=True)
    headers = {"Retry-After": str(RETRY_S)}
    return Response(body, status, headers, media_type=MEDIA_TYPE)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    dependencies=[VIEWER],
    response_description="Metrics of the process that answers, in the text format of Prometheus.",
)
async def get_metrics(service: Answering) -> Response:
    """Return the metrics of the process that answers, in the text format of Prometheus."""
    return Response(service.metrics.exposed(), media_type=EXPOSITION)
