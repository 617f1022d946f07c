"""The admin service with a log, boards and storage in memory, called without a network."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from common.api.keys import KeyStore
from common.config.settings import Settings
from common.jobs.servers import Outside
from common.kafka.memory import MemoryLog
from common.kafka.port import NewTopic
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.memory import MemoryBlobs
from services.admin.app import create_app
from services.admin.service import AdminService, Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastapi import FastAPI

HOST = "doll.test"
# A simulation runs in its own process, and may wait for everything else on the machine.
LIMITS = Limits(simulate_s=600.0)


@dataclass
class World:
    """An admin service and its servers. The first request creates the service."""

    settings: Settings = field(default_factory=partial(Settings, blobs="s3://memory"))
    log: MemoryLog = field(default_factory=MemoryLog)
    redis: MemoryRedis = field(default_factory=MemoryRedis)
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    limits: Limits = LIMITS

    @cached_property
    def viewer(self) -> str:
        """Return a viewer's key."""
        return KeyStore(self.log).create("eve", "viewer")[0]

    @cached_property
    def operator(self) -> str:
        """Return an operator's key."""
        return KeyStore(self.log).create("olga", "operator")[0]

    @cached_property
    def app(self) -> FastAPI:
        """Create the keys and the application."""
        assert self.viewer != self.operator
        return create_app(self.outside, self.limits)

    @property
    def outside(self) -> Outside:
        """Return the servers that a service uses."""
        return Outside(self.settings, lambda: self.log, self.board, lambda: self.blobs)

    @property
    def service(self) -> AdminService:
        """Return the service behind the application."""
        service: AdminService = self.app.state.service
        return service

    def replica(self) -> World:
        """Return another service on the same servers, with the same keys."""
        other = World(self.settings, self.log, self.redis, self.blobs)
        vars(other).update(viewer=self.viewer, operator=self.operator)
        return other

    def board(self, job: str) -> MemoryBoard:
        """Return a job's board."""
        return MemoryBoard(self.redis, job)

    def streams(self, *names: str) -> None:
        """Create datastreams."""
        for name in names:
            self.log.create_topics([NewTopic(name, 2)])

    def ask(
        self,
        method: str,
        path: str,
        *,
        key: str | None = "operator",
        **others: Any,  # noqa: ANN401 -- what httpx2 takes
    ) -> httpx2.Response:
        """Send a request.

        Args:
            method: HTTP method.
            path: Path with its query.
            key: "viewer", "operator", another key, or None for no key.
            others: Further arguments of the client: `json`, `headers`, ...
        """
        known = {"viewer": self.viewer, "operator": self.operator}
        headers = dict(others.pop("headers", {}))
        if key is not None:
            headers["Authorization"] = f"Bearer {known.get(key, key)}"
        return self.runner.run(self._asked(method, path, headers, others))

    def get(self, path: str, **others: Any) -> Any:  # noqa: ANN401 -- JSON
        """Send a viewer's GET, which must succeed. Returns the JSON."""
        answer = self.ask("GET", path, key="viewer", **others)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def _asked(
        self, method: str, path: str, headers: dict[str, str], others: dict[str, Any]
    ) -> httpx2.Response:
        transport = httpx2.ASGITransport(self.app)
        async with httpx2.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            return await client.request(method, path, headers=headers, **others)

    def close(self) -> None:
        """Close the service."""
        if "app" in self.__dict__:
            self.service.close()
        self.runner.close()


@pytest.fixture
def world() -> Iterator[World]:
    """An empty world."""
    made = World()
    yield made
    made.close()


def problem(answer: httpx2.Response, status: int) -> str:
    """Check that an answer is a problem of this status. Returns its detail."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert problem["instance"] == answer.request.url.path
    detail: str = problem["detail"]
    return detail
