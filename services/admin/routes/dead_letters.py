"""`/v1/jobs/{job}/dead-letters`: records of a job's streams that it could not use, by reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastapi import APIRouter

from common.api.answers import DeadLettersPage
from common.kafka.dead_letters import by_reason, read_dead_letters
from services.admin.middleware.problems import documented
from services.admin.routes.requests import JobName, Limit  # noqa: TC001 -- FastAPI reads it when run
from services.admin.service import Answering  # noqa: TC001 -- FastAPI reads it when run

if TYPE_CHECKING:
    from common.kafka.port import Log

router = APIRouter(prefix="/v1/jobs/{job}", tags=["quarantine"])

# Number of addresses shown per reason.
_NEWEST = 5


@router.get(
    "/dead-letters",
    responses=documented(404, 502),
    response_description="The numbers of records that the job could not use, by stream and reason.",
)
async def list_dead_letters(
    service: Answering, job: JobName, limit: Limit = 100
) -> DeadLettersPage:
    """Count the records that a job could not use, by stream and reason.

    For each reason, the newest records are listed by partition and offset.
    """
    record = service.job(job)
    return await service.histories.run(
        lambda: _page(service.log(), record.id, record.spec.streams, limit)
    )


def _page(log: Log, job: str, streams: Iterable[str], limit: int) -> DeadLettersPage:
    """Return the counts.

    Raises:
        UnavailableError: If Kafka is unavailable.
    """
    found = [
        (stream, each)
        for stream in streams
        for each in by_reason(read_dead_letters(log, stream))
        if each.job == job
    ]
    reasons = [
        {
            "stream": stream,
            "reason": each.reason,
            "records": len(each.dead_letters) - each.batches,
            "batches": each.batches,
            "replayed": each.replayed,
            "newest": [
                {"partition": span.partition, "offset": span.start, "end": span.end}
                for span in (
                    dead_letter.span for dead_letter in each.dead_letters[: -_NEWEST - 1 : -1]
                )
            ],
        }
        for stream, each in found[:limit]
    ]
    others = sum(len(each.dead_letters) for _, each in found[limit:])
    return DeadLettersPage.model_validate({"reasons": reasons, "others": others})
