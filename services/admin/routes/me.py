"""`/v1/me`: caller of a request, so that a page offers only permitted actions."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import Field

from common.api.answers import Answer
from common.api.keys import Role  # noqa: TC001 -- pydantic reads it when run
from services.admin.middleware.access import Viewer  # noqa: TC001 -- FastAPI reads it when run

router = APIRouter(prefix="/v1/me", tags=["health"])


class Me(Answer):
    """Caller of the request: an API key, or a person who signed in."""

    name: str = Field(
        description="Name of the caller's API key; for a person who signed in, `oidc:` and the"
        " person's name.",
        examples=["laptop"],
    )
    role: Role = Field(
        description="Role of the caller. A viewer may read everything; an operator may also make"
        " changes."
    )


@router.get(
    "",
    response_description="The caller's name and role.",
)
async def get_caller(caller: Viewer) -> Me:
    """Show the caller's name and role."""
    return Me(name=caller.name, role=caller.role)
