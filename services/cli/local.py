"""Local services, market and live page that `doll up` and `doll demo` start."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from common.api.keys import KeyStore, Role
from common.embedded.process import free_port
from common.embedded.services import EmbeddedService, Kind
from common.errors import UserError
from common.kafka.opening import open_log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common.config.settings import Settings


# A busy machine loads the service in half of this time.
READY_S = 60.0
# Seconds between requests that test if the service answers.
_PAUSE_S = 0.1


class Page(NamedTuple):
    """Live page, with its address and a key."""

    service: EmbeddedService
    url: str
    key: str

    def await_ready(self, ends: Callable[[], bool]) -> None:
        """Wait until the service answers, it ends, or `READY_S` have passed.

        Args:
            ends: Returns True if the wait should be cancelled.
        """
        until = monotonic() + READY_S
        while monotonic() < until and not ends() and self.service.exit_code is None:
            asked = HTTPConnection(urlsplit(self.url).netloc, timeout=READY_S)
            with suppress(OSError, HTTPException), closing(asked):
                asked.request("GET", "/readyz")
                if asked.getresponse().status == HTTPStatus.OK:
                    return
            sleep(_PAUSE_S)

    def __str__(self) -> str:
        return f"{self.url} (any user name, password {self.key})"


def open_page(settings: Settings, logs: Path, name: str, role: Role, port: int = 0) -> Page:
    """Start an admin service that listens on this machine only.

    Args:
        settings: Settings that name the servers.
        logs: Folder for its log.
        name: Name of the key, which must be new.
        role: Role of the key.
        port: Port to listen on; 0 selects a free one.

    Raises:
        ConflictError: If a key of this name exists.
        UnavailableError: If Kafka is unavailable.
    """
    with closing(KeyStore(open_log(settings, "key"))) as key_store:
        key, _ = key_store.create(name, role)
    own = settings.model_copy(update={"api_host": "127.0.0.1", "api_port": port or free_port()})
    service = EmbeddedService("admin", "admin-1", own, logs, forks=True)
    return Page(service, f"http://{own.api_host}:{own.api_port}", key)


def start_services(
    settings: Settings, logs: Path, workers: int, *, job: str = "", evaluator: bool = False
) -> list[EmbeddedService]:
    """Start a coordinator, workers, and a provisioner if the settings name a market.

    Args:
        settings: Settings that name the servers.
        logs: Folder for their logs.
        workers: Number of workers.
        job: The only job that the workers serve; if empty, all.
        evaluator: True to start an evaluator, too.
    """
    own = settings.model_copy(update={"threads": 1})
    kinds: list[Kind] = ["coordinator"]
    kinds += ["provisioner"] * bool(own.market)
    kinds += ["evaluator"] * evaluator
    services = [EmbeddedService(kind, f"{kind}-1", own, logs, forks=True) for kind in kinds]
    arguments = ("--job", job) if job else ()
    names = [f"worker-{number}" for number in range(1, workers + 1)]
    return services + [
        EmbeddedService("worker", n, own, logs, arguments, forks=True) for n in names
    ]


def with_market(settings: Settings, market: Path, machines: Path) -> Settings:
    """Return settings for rented machines that are processes and end with this process."""
    return settings.model_copy(
        update={
            "market": str(market.absolute()),
            "fleet_directory": str(machines.absolute()),
            # The machines end with this process, even if the provisioner is gone.
            "owner_pid": os.getpid(),
        }
    )


def made(folder: Path) -> Path:
    """Create a folder if it does not exist.

    Raises:
        UserError: If it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be created: {error}") from error
    return folder
