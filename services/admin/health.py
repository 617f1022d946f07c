"""Whether this process and the servers behind it are well, and its metrics."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from services.admin.problems import documented

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """The process answers."""

    ok: bool


@router.get("/healthz", responses=documented())
async def healthz() -> Health:
    """Say that the process answers; needs no key."""
    return Health(ok=True)
