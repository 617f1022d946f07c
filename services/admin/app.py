"""REST API as an ASGI application; `create_app` assembles it and opens no connection."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI  # noqa: TC002 -- the signature is read when run

from common.config.settings import read_settings
from common.jobs.servers import Outside  # noqa: TC001 -- the signature is read when run
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
    sign_in,
)
from services.admin.service import AdminService, Limits

if TYPE_CHECKING:
    from common.telemetry.metrics.serving import Watchdog

LIMITS = Limits()
# Seconds between heartbeats of the event loop.
BEAT_S = 1.0

# Routers whose routes all require at least a viewer's key.
ROUTERS = tuple(
    module.router
    for module in (
        *(jobs, quarantine, dead_letters, events, model, provisioning, me),
        *(docs, page),
    )
)


def create_app(outside: Outside | None = None, limits: Limits = LIMITS) -> FastAPI:
    """Return the application. Servers may be unavailable.

    Args:
        outside: Optional. Settings, and functions that connect to the servers they name. If unset,
            they are read from the environment.
        limits: Limits above which requests are refused.

    Raises:
        UserError: If the environment is invalid.
    """
    service = AdminService(outside or connect(read_settings(os.environ)), limits)
    app = docs.DocumentedApi(
        title="DOLL",
        version=version("doll"),
        summary="Train models on live Kafka streams, on machines that may vanish at any moment.",
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # Names of methods in generated clients.
        generate_unique_id_function=lambda route: route.name,
        separate_input_output_schemas=False,
        # Behind a proxy that terminates TLS, a redirect would point to http:// and expose the key.
        redirect_slashes=False,
    )
    app.state.service = service
    problems.install(app)
    app.include_router(health.router, responses=problems.ALWAYS)
    app.include_router(sign_in.router)
    for router in ROUTERS:
        app.include_router(router, dependencies=[VIEWER], responses=problems.ALWAYS)
    app.add_middleware(Gate, service=service)
    # The middleware added last is the outermost.
    app.add_middleware(Observed, metrics=service.metrics)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the service's threads and tasks; release everything at shutdown."""
    service: AdminService = app.state.service
    service.start()
    tasks = [
        asyncio.create_task(_beat(service.watchdog)),
        asyncio.create_task(service.checks.keep_looking()),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        service.close()


async def _beat(watchdog: Watchdog) -> None:
    """Report regularly that the event loop is running."""
    while True:
        watchdog.beat()
        await asyncio.sleep(BEAT_S)
