"""`/v1/jobs/{job}/provisioning`: how a job's machines are rented, and asking for another plan."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from common.api.answers import ProvisioningAnswer, ReplanAnswer
from common.api.provisioning import provisioning_answer
from common.errors import NotFoundError
from common.planning.replan import ask_to_replan, check_replan, not_provisioned
from common.provisioning.records import ReplanAsked
from services.admin.middleware.access import OPERATOR, VIEWER, Operator
from services.admin.middleware.problems import documented
from services.admin.routes.bodies import strictly
from services.admin.routes.parameters import JobName  # noqa: TC001 -- FastAPI reads it when run
from services.admin.service import service_of

router = APIRouter(prefix="/v1/jobs/{job}/provisioning", tags=["provisioning"])


class ReplanBody(BaseModel):
    """Why another plan is wanted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: str = Field(default="", max_length=500, examples=["the deadline moved"])


@router.get("", response_model=ProvisioningAnswer, responses=documented(404), dependencies=[VIEWER])
async def show(
    request: Request,
    job: JobName,
    limit: Annotated[
        int, Query(ge=1, le=100, description="Plans of its history.", examples=[20])
    ] = 20,
) -> Response:
    """Tell the plan in force and why, the plans before it, estimates, and what was spent so far."""
    service = service_of(request)
    spec = service.job(job).spec
    if spec.provisioning is None or spec.policy is None:
        raise NotFoundError(not_provisioned(job))
    workers = spec.provisioning.workers
    follower = await service.followers.ready(job)
    with follower.view() as view:
        told = provisioning_answer(view.ledger, spec.policy, workers, service.clock(), limit)
    return Response(told.model_dump_json(), media_type="application/json")


@router.post(
    "/replan", status_code=202, responses=documented(404, 409, 502), dependencies=[OPERATOR]
)
async def replan(
    request: Request,
    caller: Operator,
    job: JobName,
    asked: Annotated[ReplanBody | None, strictly(ReplanBody | None), Body()] = None,
) -> ReplanAnswer:
    """Ask the policy anew; its decision comes with the events and in the history."""
    service = service_of(request)
    record = service.job(job)
    follower = await service.followers.ready(job)
    with follower.view() as view:
        check_replan(record, view.ledger)
    reason = "" if asked is None else asked.reason
    question = ReplanAsked(service.clock(), caller.name, reason)
    await service.questions.run(lambda: ask_to_replan(service.log(), job, question))
    return ReplanAnswer(job=job, asked_at_s=question.at_s)
