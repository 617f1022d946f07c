"""The command line with a log, boards and storage in memory, and an admin service."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import httpx2
import pytest
from typer.testing import CliRunner

from common.api.keys import KeyStore, Role
from common.config.settings import read_settings
from common.jobs.servers import Outside
from common.kafka.memory import MemoryLog
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.memory import MemoryBlobs
from services.admin.app import create_app
from services.cli.app import app
from services.cli.system.outside import Ways
from tests.unit.admin.conftest import LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typer.testing import Result

    from common.config.settings import Settings

KEY = "operator"  # name of the caller's key


class Bridge(httpx2.BaseTransport):
    """A synchronous client's transport to an ASGI application.

    Args:
        serve: Creates the application for the first request.
        key_of: Returns the key with a given name.
    """

    def __init__(self, serve: Callable[[], Any], key_of: Callable[[str], str] = str) -> None:
        self._serve = serve
        self._key_of = key_of
        self._served: Any = None
        self.runner = asyncio.Runner()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request to the application."""
        if self._served is None:
            self._served = self._serve()
        return self.runner.run(self._asked(request))

    def close(self) -> None:
        """Close the application, if it was started."""
        if self._served is not None:
            self._served.state.service.close()
        self._served = None
        self.runner.close()

    async def _asked(self, request: httpx2.Request) -> httpx2.Response:
        headers = dict(request.headers)
        if given := headers.get("authorization", "").removeprefix("Bearer "):
            headers["authorization"] = f"Bearer {self._key_of(given)}"
        sent = httpx2.Request(request.method, request.url, headers=headers, content=request.read())
        answer = await httpx2.ASGITransport(self._served).handle_async_request(sent)
        return httpx2.Response(
            answer.status_code, headers=answer.headers, content=await answer.aread()
        )


@dataclass
class World:
    """The servers behind the commands, and a way to run a command."""

    log: MemoryLog = field(default_factory=MemoryLog)
    redis: MemoryRedis = field(default_factory=MemoryRedis)
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    environment: Mapping[str, str] = field(default_factory=dict)  # the service's variables
    _keys: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        *arguments: str,
        code: int = 0,
        typed: str | bytes = "",
        blobs: str = "s3://memory",
        key: str = KEY,
        end: httpx2.BaseTransport | None = None,
    ) -> Result:
        """Run a command line against a new service, which reads all topics. Returns the result.

        Args:
            arguments: The command line.
            code: Expected exit status.
            typed: Standard input.
            blobs: Storage of models, for the command and the service.
            key: The caller's key: `operator`, `viewer`, or an invalid one.
            end: Transport that answers in place of the service.
        """
        settings = {"DOLL_BLOBS": blobs, **self.environment}
        bridge = Bridge(
            lambda: create_app(self._connect(read_settings(settings)), LIMITS), self._key_of
        )
        try:
            result = CliRunner().invoke(
                app,
                list(arguments),
                input=typed,
                obj=Ways(self._connect, end or bridge),
                env={"COLUMNS": "200", "DOLL_BLOBS": blobs, "DOLL_API_KEY": key},
                catch_exceptions=False,
            )
        finally:
            bridge.close()
        assert result.exit_code == code, result.output
        return result

    def board(self, job: str) -> MemoryBoard:
        """Return a job's board."""
        return MemoryBoard(self.redis, job)

    def write(self, topic: str, *values: bytes) -> None:
        """Append records to the first partition of a topic."""
        writer = self.log.writer()
        for value in values:
            writer.append(topic, value)
        assert writer.flush(1.0)

    def _key_of(self, name: str) -> str:
        for role in get_args(Role):
            if name == role not in self._keys:
                self._keys[role], _ = KeyStore(self.log).create(role, role)
        return self._keys.get(name, name)

    def _connect(self, settings: Settings) -> Outside:
        return Outside(settings, lambda: self.log, self.board, lambda: self.blobs)


@pytest.fixture
def world() -> World:
    """An empty world."""
    return World()
