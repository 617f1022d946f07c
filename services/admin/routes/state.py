"""How a job stands and stood: its updates, workers, streams, and curves of everything over time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from common.api.answers import CurvesAnswer, StreamsAnswer, UpdatesPage, WorkersAnswer
from services.admin.middleware.problems import documented
from services.admin.routes.requests import JobName  # noqa: TC001 -- FastAPI reads it when run
from services.admin.service import Answering  # noqa: TC001 -- likewise

if TYPE_CHECKING:
    from services.admin.live.follower import JobFollower

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=documented(404))

_MOST_VERSIONS = 2**63 - 1


@router.get("/{job}/updates")
async def updates(
    service: Answering,
    job: JobName,
    after: Annotated[
        int, Query(ge=0, le=_MOST_VERSIONS, description="Only versions above.", examples=[400])
    ] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="At most.", examples=[100])] = 100,
) -> UpdatesPage:
    """List effective updates by version; those that a new leader took back are not among them."""
    follower = await service.followers.ready(job)
    with follower.view() as view:
        return view.page(after, limit)


@router.get("/{job}/workers")
async def workers(service: Answering, job: JobName) -> WorkersAnswer:
    """List workers by name: who sends heartbeats, and whose machine runs without any."""
    follower = await service.followers.ready(job)
    with follower.view() as view:
        return view.workers(service.clock())


@router.get("/{job}/streams")
async def streams(service: Answering, job: JobName) -> StreamsAnswer:
    """List the job's datastreams: arrival rate, lag, dead letters."""
    follower = await service.followers.ready(job)
    with follower.view() as view:
        return view.streams()


@router.get("/{job}/curves", response_model=CurvesAnswer)
async def curves(service: Answering, job: JobName) -> Response:
    """Show everything over time, in some 2,000 points however long the job has run."""
    follower = await service.followers.ready(job)
    # Thousands of points take tens of milliseconds, in which nobody else would be answered.
    told = await asyncio.to_thread(_curves, follower, service.clock())
    return Response(told, media_type="application/json")


def _curves(follower: JobFollower, now: float) -> str:
    with follower.view() as view:
        told = view.curves(now)
    return told.model_dump_json()
