"""`/v1/jobs/{job}/quarantine` lists quarantined batches; `/v1/jobs/{job}/requeue` releases them."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Body, Query
from pydantic import BaseModel, Field

from common.api.answers import QuarantineAnswer, RequeueAnswer
from common.jobs.quarantine import Quarantine
from services.admin.middleware.access import Operator  # noqa: TC001 -- FastAPI reads it when run
from services.admin.middleware.problems import documented
from services.admin.routes.requests import BodyRoute, JobName, Limit, strictly
from services.admin.service import Answering  # noqa: TC001 -- FastAPI reads it when run

router = APIRouter(prefix="/v1/jobs/{job}", tags=["quarantine"], route_class=BodyRoute)

_MOST_OFFSET = 2**63 - 1
# Maximum number of batches per request; each needs a record of Kafka.
_MOST_BATCHES = 10_000


class RequeueBody(BaseModel, frozen=True, extra="forbid", strict=True):
    """Quarantined batches to train the model on after all."""

    batches: (
        Annotated[
            tuple[Annotated[int, Field(ge=0, le=_MOST_OFFSET)], ...],
            Field(min_length=1, max_length=_MOST_BATCHES),
        ]
        | Literal["all"]
    ) = Field(
        description="Numbers of the batches to requeue, from the list of quarantined batches; or"
        " `all` for every batch that can be requeued.",
        examples=["all", [1042]],
    )


@router.get(
    "/quarantine",
    responses=documented(404, 409, 502),
    response_description="One page of the list of the job's quarantined batches.",
)
async def list_quarantine(
    service: Answering,
    job: JobName,
    after: Annotated[
        int,
        Query(
            ge=-1,
            le=_MOST_OFFSET,
            description="Optional. List only batches with a higher number than this: the value of"
            " `next` on the previous page. If unset, the first page is listed.",
            examples=[1042],
        ),
    ] = -1,
    limit: Limit = 100,
) -> QuarantineAnswer:
    """List a job's quarantined batches, which were given up without training, oldest first.

    Each has the reason for its quarantine, and if it cannot be requeued, the reason for that.
    """
    record = service.job(job)
    found = await service.histories.run(lambda: Quarantine(service.log(), record.id).listed())
    page = [each for each in found if each.batch > after][: limit + 1]
    last = page[limit - 1].batch if len(page) > limit else None
    return QuarantineAnswer(batches=tuple(page[:limit]), next=last)


@router.post(
    "/requeue",
    responses=documented(404, 409, 502),
    response_description="The outcome for each batch of the request.",
)
async def requeue_batches(
    service: Answering,
    caller: Operator,
    job: JobName,
    asked: Annotated[RequeueBody, strictly(RequeueBody), Body()],
) -> RequeueAnswer:
    """Take batches out of quarantine, so that the model is trained on them as if they were new.

    Use this after the task or the data is fixed. A held job continues only after it is resumed:
    change `wanted` to `running`. If the response is lost, repeat the request; batches that are
    already requeued stay as they are.
    """
    record = service.job(job)
    named = None if asked.batches == "all" else asked.batches
    at_s = service.clock()
    outcomes = await service.apart(caller, lambda jobs: jobs.requeue(record.id, named, at_s))
    # The next request then finds it in `changes`.
    await service.stores.write(lambda store: store.read())
    found = [{"batch": batch, "outcome": outcomes[batch]} for batch in sorted(outcomes)]
    return RequeueAnswer.model_validate({"batches": found})
