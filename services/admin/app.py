"""The REST API as an ASGI application: `create_app` puts the parts together and opens nothing."""

from __future__ import annotations

import os

from fastapi import FastAPI

from common.config import read_settings
from common.connections import connect
from common.outside import Outside  # noqa: TC001 -- the signature is read when run
from services.admin.service import Service


def create_app(outside: Outside | None = None) -> FastAPI:
    """Make the application; no server has to be there.

    Args:
        outside: Settings and how to open what they name; None: as the environment says.

    Raises:
        UserError: If the environment makes no sense.
    """
    app = FastAPI(title="DOLL", docs_url=None, redoc_url=None)
    app.state.service = Service(outside or connect(read_settings(os.environ)))
    return app
