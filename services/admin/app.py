"""The REST API as an ASGI application: `create_app` puts the parts together and opens nothing."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from common.config import read_settings
from common.connections import connect
from common.outside import Outside  # noqa: TC001 -- the signature is read when run
from services.admin import health, problems
from services.admin.gate import Gate
from services.admin.service import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROUTERS = (health.router,)


def create_app(outside: Outside | None = None) -> FastAPI:
    """Make the application; no server has to be there.

    Args:
        outside: Settings and how to open what they name; None: as the environment says.

    Raises:
        UserError: If the environment makes no sense.
    """
    service = Service(outside or connect(read_settings(os.environ)))
    app = FastAPI(
        title="DOLL",
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.service = service
    problems.install(app)
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(Gate, service=service)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Follow what the routes answer from, and let go of everything at the end."""
    service: Service = app.state.service
    service.start()
    try:
        yield
    finally:
        service.close()
