"""How a job stands and stood: its updates, workers, streams, and curves of everything over time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from common.api.answers import CurvesAnswer, StreamsAnswer, UpdatesPage, WorkersAnswer
from services.admin.middleware.access import VIEWER
from services.admin.middleware.problems import documented
from services.admin.routes.requests import JobName  # noqa: TC001 -- FastAPI reads it when run
from services.admin.service import service_of

if TYPE_CHECKING:
    from common.api.answers import Answer
    from services.admin.live.follower import JobFollower

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], dependencies=[VIEWER])

_MOST_VERSIONS = 2**63 - 1


@router.get("/{job}/updates", response_model=UpdatesPage, responses=documented(404))
async def updates(
    request: Request,
    job: JobName,
    after: Annotated[
        int, Query(ge=0, le=_MOST_VERSIONS, description="Only versions above.", examples=[400])
    ] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="At most.", examples=[100])] = 100,
) -> Response:
    """List effective updates by version; those that a new leader took back are not among them."""
    follower = await service_of(request).followers.ready(job)
    with follower.view() as view:
        page = view.page(after, limit)
    return _answer(page)


@router.get("/{job}/workers", response_model=WorkersAnswer, responses=documented(404))
async def workers(request: Request, job: JobName) -> Response:
    """List workers by name: who sends heartbeats, and whose machine runs without any."""
    service = service_of(request)
    follower = await service.followers.ready(job)
    with follower.view() as view:
        told = view.workers(service.clock())
    return _answer(told)


@router.get("/{job}/streams", response_model=StreamsAnswer, responses=documented(404))
async def streams(request: Request, job: JobName) -> Response:
    """List the job's datastreams: arrival rate, lag, dead letters."""
    follower = await service_of(request).followers.ready(job)
    with follower.view() as view:
        told = view.streams()
    return _answer(told)


@router.get("/{job}/curves", response_model=CurvesAnswer, responses=documented(404))
async def curves(request: Request, job: JobName) -> Response:
    """Show everything over time, in some 2,000 points however long the job has run."""
    service = service_of(request)
    follower = await service.followers.ready(job)
    # Thousands of points take tens of milliseconds, in which nobody else would be answered.
    return await asyncio.to_thread(_curves, follower, service.clock())


def _curves(follower: JobFollower, now: float) -> Response:
    with follower.view() as view:
        told = view.curves(now)
    return _answer(told)


def _answer(told: Answer) -> Response:
    return Response(told.model_dump_json(), media_type="application/json")
