"""Whether this process and the servers behind it are well, and its metrics."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from common.telemetry.metrics.meters import EXPOSITION
from services.admin.checks import Check  # noqa: TC001 -- pydantic reads it when run
from services.admin.middleware.access import VIEWER
from services.admin.middleware.problems import MEDIA_TYPE, RETRY_S, Problem, documented
from services.admin.service import service_of

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """The process answers."""

    model_config = ConfigDict(frozen=True)

    ok: bool = Field(description="Always true.", examples=[True])


class Readiness(BaseModel):
    """The servers behind this one, all of them well."""

    model_config = ConfigDict(frozen=True)

    kafka: Check
    redis: Check
    storage: Check


class NotReady(Problem):
    """One of them is not."""

    kafka: Check
    redis: Check
    storage: Check


_NOT_READY = NotReady.model_json_schema(ref_template="#/components/schemas/{model}")
_NOT_READY.pop("$defs")  # parts of the document already


@router.get("/healthz", responses=documented())
async def healthz() -> Health:
    """Say that the process answers; needs no key."""
    return Health(ok=True)


@router.get(
    "/readyz",
    response_model=Readiness,
    responses={
        **documented(),
        503: {
            "description": "A server behind this one is not well.",
            "content": {MEDIA_TYPE: {"schema": _NOT_READY}},
        },
    },
)
async def readyz(request: Request) -> Response:
    """Say whether Kafka, Redis and object storage answer; needs no key.

    They are asked at most every few seconds, however often this is.
    """
    found = await service_of(request).checks.look()
    ill = [name for name, check in found.items() if not check.ok]
    if not ill:
        return Response(
            Readiness(
                kafka=found["kafka"], redis=found["redis"], storage=found["storage"]
            ).model_dump_json(),
            media_type="application/json",
        )
    status = HTTPStatus.SERVICE_UNAVAILABLE
    told = NotReady(
        title=status.phrase,
        status=status,
        detail="; ".join(f"{name}: {found[name].reason}" for name in ill),
        instance=request.url.path,
        kafka=found["kafka"],
        redis=found["redis"],
        storage=found["storage"],
    )
    return Response(
        told.model_dump_json(exclude_none=True),
        status,
        {"Retry-After": str(RETRY_S)},
        media_type=MEDIA_TYPE,
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        **documented(),
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    },
    dependencies=[VIEWER],
)
async def metrics(request: Request) -> Response:
    """Metrics of this process, for Prometheus."""
    return Response(service_of(request).metrics.meters.exposed(), media_type=EXPOSITION)
