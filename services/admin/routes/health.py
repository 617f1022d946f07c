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
    """The process answers."""

    ok: bool = Field(description="Always true.", examples=[True])


class Readiness(Answer):
    """Health of the servers behind this one, all of them well."""

    kafka: Check
    redis: Check
    storage: Check
    schema_registry: Check = Field(description="As workers whose records wait for a schema say.")


class NotReady(Readiness, Problem):
    """At least one server is not well."""


_NOT_READY = NotReady.model_json_schema(ref_template="#/components/schemas/{model}")
# The document defines these schemas already.
_NOT_READY.pop("$defs")


@router.get("/healthz")
async def get_health() -> Health:
    """Answer if the process is running. Needs no key."""
    return Health(ok=True)


@router.get(
    "/readyz",
    response_model=Readiness,
    responses={
        503: {
            "description": "A server behind this one is not well.",
            "content": {MEDIA_TYPE: {"schema": _NOT_READY}},
        },
    },
)
async def get_readiness(service: Answering, request: Request) -> Readiness | Response:
    """Report the health of Kafka, Redis, object storage and the schema registry. Needs no key.

    The servers are checked at most every few seconds, no matter how often this is called. A server
    that coordinators or workers cannot use is not well either.
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
)
async def get_metrics(service: Answering) -> Response:
    """Return the metrics of this process, for Prometheus."""
    return Response(service.metrics.exposed(), media_type=EXPOSITION)
