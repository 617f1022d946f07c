"""Plans, simulations and prices of machines; a job's provisioning, and requests for a new plan."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Query
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field
from starlette.responses import Response

from common.api.answers import PlanAnswer, PricesAnswer, ProvisioningAnswer, ReplanAnswer
from common.errors import NotFoundError
from common.jobs.changes import audit, change_by
from common.spot.api import provisioning_answer
from common.spot.planning.replan import ask_to_replan, check_replan, not_provisioned
from common.spot.planning.request import PlanRequest, Rate
from common.spot.planning.simulation import SimulateRequest, check_files, check_size
from common.spot.provisioning.records import ReplanAsked
from services.admin.middleware.access import Operator  # noqa: TC001 -- FastAPI reads it when run
from services.admin.middleware.problems import documented
from services.admin.routes.requests import BodyRoute, JobName, strictly
from services.admin.service import Answering  # noqa: TC001 -- FastAPI reads it when run

router = APIRouter(prefix="/v1", tags=["provisioning"], route_class=BodyRoute)

# A plan for this number takes some tens of milliseconds.
MOST_WORKERS = 100_000
MOST_RATES = 10_000


class PlanBody(PlanRequest):
    """Work of a job, its workers, and prices of machines, to find the cheapest machines for it."""

    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | None = Field(
        default=None,
        description="Optional. Number of workers (N_tot), each with the arrival rate `rate_per_s`."
        " If unset, `rates_per_s` or `job` determines the number.",
    )
    rates_per_s: Annotated[list[Rate], Field(min_length=1, max_length=MOST_RATES)] | None = Field(
        default=None,
        description="Optional. Records per second that arrive at each worker, instead of `workers`"
        " and `rate_per_s`. If unset, `rate_per_s` or `job` determines the rates.",
    )


@router.post(
    "/provisioning/plan",
    response_model=PlanAnswer,
    responses=documented(404, 502),
    response_description="The plan, or the reason why the deadline cannot be met.",
)
async def plan_workers(
    service: Answering, asked: Annotated[PlanBody, strictly(PlanBody), Body()]
) -> Response:
    """Find the cheapest mix of spot and on-demand machines that meets a deadline.

    If no mix meets it, `feasible` is false and `reason` explains why.
    """

    def plan_json() -> bytes:
        from common.spot.planning.plan import plan_answer  # noqa: PLC0415 -- scipy takes long to load

        return plan_answer(asked, service.log, service.clock()).model_dump_json().encode()

    # This runs in a thread, because it computes for some milliseconds, and Kafka, which is read for
    # a job, may hang.
    body = await (service.histories.run(plan_json) if asked.job else run_in_threadpool(plan_json))
    return Response(body, media_type="application/json")


@router.post(
    "/provisioning/simulate",
    response_description="The results of the simulation, by policy.",
)
async def simulate_policies(
    service: Answering,
    asked: Annotated[SimulateRequest, strictly(SimulateRequest), Body()],
) -> Response:
    """Simulate a job on preemptible machines with each policy.

    A policy is a rule that decides which machines to rent. The result has each policy's cost,
    runtime and share of deadlines met. All policies face the same rates, prices and preemptions;
    the same seed gives the same result.
    """
    check_size(asked)
    check_files(asked)
    results = await service.simulations.run(asked)
    return Response(results, media_type="application/json")


@router.get(
    "/provisioning/prices",
    responses=documented(404, 502),
    response_description="The current price of each kind of machine.",
)
async def list_prices(service: Answering) -> PricesAnswer:
    """List current prices of machines that can be rented, a few seconds old at most.

    The list has one price for each pool (machines of one kind at one price).
    """
    return await service.prices.now()


class ReplanBody(BaseModel, frozen=True, extra="forbid"):
    """Request for a new plan of a job's machines."""

    reason: str = Field(
        default="",
        max_length=500,
        description="Optional. Reason for the request for a new plan, for the job's history.",
        examples=["the deadline moved"],
    )


@router.get(
    "/jobs/{job}/provisioning",
    responses=documented(404),
    response_description="The plans for the job's rented machines, and their cost.",
)
async def get_provisioning(
    service: Answering,
    job: JobName,
    limit: Annotated[
        int,
        Query(
            ge=1,
            le=100,
            description="Maximum number of plans of the job's machines to return in `plans`.",
            examples=[20],
        ),
    ] = 20,
) -> ProvisioningAnswer:
    """Show a job's plan for its rented machines, earlier plans, estimates, and the cost so far."""
    spec = service.job(job).spec
    if spec.provisioning is None or spec.policy is None:
        raise NotFoundError(not_provisioned(job))
    workers = spec.provisioning.workers
    follower = await service.followers.ready(job)
    with follower.view() as view:
        return provisioning_answer(view.ledger, spec.policy, workers, service.clock(), limit)


@router.post(
    "/jobs/{job}/provisioning/replan",
    status_code=202,
    responses=documented(404, 409, 502),
    response_description="The request was accepted. The new plan appears later as a `plan` event"
    " and in the list of plans.",
)
async def replan_job(
    service: Answering,
    caller: Operator,
    job: JobName,
    asked: Annotated[ReplanBody | None, strictly(ReplanBody | None), Body()] = None,
) -> ReplanAnswer:
    """Request a new plan for a job's rented machines.

    The decision appears later as a `plan` event and in the list of plans.
    """
    record = service.job(job)
    follower = await service.followers.ready(job)
    with follower.view() as view:
        check_replan(record, view.ledger)
    reason = "" if asked is None else asked.reason
    question = ReplanAsked(service.clock(), caller.name, reason)
    await service.questions.run(lambda: ask_to_replan(service.log(), record.id, question))
    audit([change_by(caller, question.at_s, "replanned", reason)], job=job)
    return ReplanAnswer(job=job, asked_at_s=question.at_s)
