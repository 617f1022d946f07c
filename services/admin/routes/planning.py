"""`/v1/provisioning`: plans, simulations, and what machines cost now."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Body, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import Field
from starlette.responses import Response

from common.api.answers import PricesAnswer
from common.api.plan import ToldPlan
from common.planning.request import PlanRequest, Rate
from common.planning.simulation import SimulateRequest, check_files, check_size
from services.admin.middleware.access import VIEWER
from services.admin.middleware.problems import documented
from services.admin.routes.bodies import strictly
from services.admin.service import service_of

if TYPE_CHECKING:
    from services.admin.service import Service

router = APIRouter(prefix="/v1/provisioning", tags=["provisioning"])

MOST_WORKERS = 100_000  # a plan for so many takes some tens of milliseconds


class PlanBody(PlanRequest):
    """A job's work, its workers and what machines cost."""

    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | None = Field(
        default=None, description="N_tot, all of the same `rate_per_s`."
    )
    rates_per_s: Annotated[list[Rate], Field(min_length=1, max_length=MOST_WORKERS)] | None = Field(
        default=None, description="A rate for each worker instead."
    )


@router.post(
    "/plan", response_model=ToldPlan, responses=documented(404, 502), dependencies=[VIEWER]
)
async def plan(request: Request, asked: PlanBody) -> Response:
    """Find the cheapest mix of spot and on-demand machines that meets a deadline.

    That no mix meets it is an answer, too: `feasible` is false, and `reason` says why.
    """
    service = service_of(request)
    work = partial(_planned, service, asked)
    # In a thread: it computes for some milliseconds, and with a job Kafka may hang.
    told = await (service.histories.run(work) if asked.job else run_in_threadpool(work))
    return Response(told, media_type="application/json")


@router.post("/simulate", responses=documented(), dependencies=[VIEWER])
async def simulate(
    request: Request,
    asked: Annotated[SimulateRequest, strictly(SimulateRequest), Body()],
) -> Response:
    """Simulate a job on machines that come and go: cost, runtime and deadlines met, by policy.

    All policies meet the same rates, prices and preemptions; the same seed gives the same result.
    """
    service = service_of(request)
    traces = service.settings.api_traces
    folder = Path(traces) if traces else None
    check_size(asked)
    check_files(asked, folder)
    results = await service.simulations.run(asked, folder)
    return Response(results, media_type="application/json")


@router.get(
    "/prices", response_model=PricesAnswer, responses=documented(404, 502), dependencies=[VIEWER]
)
async def prices(request: Request) -> Response:
    """Tell what machines of the market's pools cost, as of a few seconds ago at most."""
    told = await service_of(request).prices.now()
    return Response(told, media_type="application/json")


def _planned(service: Service, asked: PlanBody) -> bytes:
    """A plan as JSON; FastAPI would check what has just been made.

    Raises:
        GivenError: If a number makes no sense or is missing, by its field.
        NotFoundError: If there is no such job.
        UnavailableError: If Kafka is away and a job is named.
    """
    from common.planning.plan import plan_told  # noqa: PLC0415 -- scipy takes long to load

    return plan_told(asked, service.log, service.clock()).model_dump_json().encode()
