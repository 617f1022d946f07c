"""`/v1/jobs/{job}/dead-letters`: what of a job's streams nobody could use, by reason."""

from __future__ import annotations

from fastapi import APIRouter

from common.api.answers import DeadLettersPage  # noqa: TC001 -- FastAPI reads it when run
from common.api.dead_letters import dead_letters_page
from services.admin.middleware.problems import documented
from services.admin.routes.requests import JobName, Limit  # noqa: TC001 -- likewise
from services.admin.service import Answering  # noqa: TC001 -- likewise

router = APIRouter(prefix="/v1/jobs/{job}", tags=["quarantine"])


@router.get("/dead-letters", responses=documented(404, 502))
async def list_letters(service: Answering, job: JobName, limit: Limit = 100) -> DeadLettersPage:
    """Count what this job could not use, by stream and reason; the newest with their addresses."""
    record = service.job(job)
    return await service.histories.run(
        lambda: dead_letters_page(service.log(), record.id, record.spec.streams, limit)
    )
