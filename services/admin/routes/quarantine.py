"""`/v1/jobs/{job}/quarantine`: what is in it; `/v1/jobs/{job}/requeue`: taking batches back."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Body, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from common.api.answers import (
    QuarantineAnswer,
    QuarantinedBatchAnswer,
    RequeueAnswer,
    RequeuedBatchAnswer,
)
from common.jobs.quarantine import Quarantine
from services.admin.middleware.access import OPERATOR, VIEWER, Operator
from services.admin.middleware.problems import documented
from services.admin.routes.requests import JobName, Limit, strictly
from services.admin.service import service_of

router = APIRouter(prefix="/v1/jobs/{job}", tags=["quarantine"])

_MOST_OFFSET = 2**63 - 1
_MOST_BATCHES = 10_000  # of one request: a record of Kafka each


class RequeueBody(BaseModel):
    """Which batches are to be taken back."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    batches: (
        Annotated[
            tuple[Annotated[int, Field(ge=0, le=_MOST_OFFSET)], ...],
            Field(min_length=1, max_length=_MOST_BATCHES),
        ]
        | Literal["all"]
    ) = Field(
        description="By name; all: every one for which it is possible.", examples=["all", [1042]]
    )


@router.get("/quarantine", responses=documented(404, 409, 502), dependencies=[VIEWER])
async def show(
    request: Request,
    job: JobName,
    after: Annotated[
        int, Query(ge=-1, le=_MOST_OFFSET, description="Only batches above.", examples=[1042])
    ] = -1,
    limit: Limit = 100,
) -> QuarantineAnswer:
    """List what is quarantined, oldest batch first: why, and whether it can be taken back."""
    service = service_of(request)
    service.job(job)
    found = await service.histories.run(lambda: Quarantine(service.log(), job).listed())
    page = [each for each in found if each.batch > after][: limit + 1]
    shown = page[:limit]
    return QuarantineAnswer(
        batches=tuple(
            QuarantinedBatchAnswer(
                batch=each.batch,
                records=each.records,
                spans=tuple(span[:4] for span in each.address),
                reason=each.reason,
                final=each.final,
            )
            for each in shown
        ),
        next=shown[-1].batch if len(page) > limit else None,
    )


@router.post("/requeue", responses=documented(404, 409, 502), dependencies=[OPERATOR])
async def requeue(
    request: Request,
    caller: Operator,
    job: JobName,
    asked: Annotated[RequeueBody, strictly(RequeueBody), Body()],
) -> RequeueAnswer:
    """Take poison batches out of quarantine: they are trained once more, as if they were new.

    For when the task or the data is mended; a job that is held goes on once it is wanted `running`.
    It may be asked again if the answer is lost: what was taken back before is left alone.
    """
    service = service_of(request)
    service.job(job)
    named = None if asked.batches == "all" else asked.batches
    at_s = service.clock()
    outcomes = await service.histories.run(
        lambda: Quarantine(service.log(), job).requeue(named, caller.name, at_s)
    )
    return RequeueAnswer(
        batches=tuple(
            RequeuedBatchAnswer(batch=each.batch, outcome=each.outcome) for each in outcomes
        )
    )
