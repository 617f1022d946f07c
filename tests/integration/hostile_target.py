"""A process that answers requests on a free port, as the admin service or a model server.

Run it as `python -m tests.integration.hostile_target admin|digits|clicks`. It prints its port and
a key.
"""

from __future__ import annotations

import socket
import sys

from common.config.settings import Settings
from common.runtime.http_server import HttpServer
from common.runtime.service import keep_imports
from services.admin.routes.requests import JOB
from services.admin.server import Server


def main(kind: str) -> None:
    """Serve until the process is killed."""
    server: HttpServer
    if kind == "admin":
        from tests.unit.admin.conftest import World as Admin  # noqa: PLC0415 -- without torch

        admin = Admin(Settings(blobs="s3://memory"))
        admin.streams("clinic-a", "clinic-b")
        assert admin.ask("POST", "/v1/jobs", json=JOB).status_code == 201
        server, key = Server(admin.app), admin.operator
    else:
        from services.serve.__main__ import MOST_CONNECTIONS  # noqa: PLC0415
        from services.serve.app import refusal  # noqa: PLC0415
        from tests.unit.serve.test_serve import CLICKS, DIGITS, World  # noqa: PLC0415

        world = World({"clicks": CLICKS, "digits": DIGITS}[kind])
        world.publish(0, 1, seed=1)
        world.look()
        settings = world.settings
        server = HttpServer(world.app, settings, MOST_CONNECTIONS, refusal, lifespan=False)
        key = "none"
        keep_imports()  # `services.serve` does the same
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        print(listening.getsockname()[1], key, flush=True)  # noqa: T201 -- for the test
        server.run([listening])


if __name__ == "__main__":
    main(sys.argv[1])
