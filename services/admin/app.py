"""The REST API as an ASGI application: `create_app` puts the parts together and opens nothing."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI  # noqa: TC002 -- the signature is read when run

from common.config.servers import Outside  # noqa: TC001 -- the signature is read when run
from common.config.settings import read_settings
from common.runtime.connect import connect
from services.admin.middleware import problems
from services.admin.middleware.access import VIEWER
from services.admin.middleware.gate import Gate
from services.admin.middleware.observing import Observed
from services.admin.routes import (
    dead_letters,
    docs,
    events,
    health,
    jobs,
    me,
    model,
    page,
    provisioning,
    quarantine,
)
from services.admin.service import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from common.telemetry.metrics.serving import Watchdog

BEAT_S = 1.0  # between signs of life of the event loop

ROUTERS = tuple(  # behind a viewer's key at least
    module.router
    for module in (
        *(jobs, quarantine, dead_letters, events, model, provisioning, me),
        *(docs, page),
    )
)


def create_app(outside: Outside | None = None) -> FastAPI:
    """Make the application; no server has to be there.

    Args:
        outside: Settings and how to open what they name; None: as the environment says.

    Raises:
        UserError: If the environment makes no sense.
    """
    service = Service(outside or connect(read_settings(os.environ)))
    app = docs.Api(
        title="DOLL",
        version=version("doll"),
        summary="Train models on live Kafka streams, on machines that may vanish at any moment.",
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # to http://, behind a proxy that ends TLS: with the key
    )
    app.state.service = service
    problems.install(app)
    app.include_router(health.router, responses=problems.ALWAYS)
    for router in ROUTERS:
        app.include_router(router, dependencies=[VIEWER], responses=problems.ALWAYS)
    app.add_middleware(Gate, service=service)
    app.add_middleware(Observed, metrics=service.metrics)  # outermost
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Follow what the routes answer from, and let go of everything at the end."""
    service: Service = app.state.service
    service.start()
    beating = asyncio.create_task(_beat(service.watchdog))
    try:
        yield
    finally:
        beating.cancel()
        service.close()


async def _beat(watchdog: Watchdog) -> None:
    """Say again and again that the event loop turns."""
    while True:
        watchdog.beat()
        await asyncio.sleep(BEAT_S)
