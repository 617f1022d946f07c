"""Health: the process answers, its servers are checked rarely, and requests are counted."""

from __future__ import annotations

import asyncio
from threading import Event
from time import time
from typing import TYPE_CHECKING

from common.config.settings import Settings
from common.errors import UnavailableError
from services.admin.checks import FRESH_S, Check, Checks
from tests.fakes.clock import ManualClock
from tests.unit.admin.conftest import World, problem

if TYPE_CHECKING:
    from collections.abc import Callable


def test_healthz_answers_without_a_key(world: World) -> None:
    assert world.ask("GET", "/healthz", key=None).json() == {"ok": True}


def test_readyz_is_ok_while_all_servers_are_ok(world: World) -> None:
    # This waits until keys and jobs have been read.
    assert world.get("/v1/jobs")
    well = {"ok": True, "reason": "", "since_s": None}
    answer = world.ask("GET", "/readyz", key=None)
    servers = ("kafka", "redis", "storage", "schema_registry")
    assert answer.json() == dict.fromkeys(servers, well)


def test_readyz_names_the_unavailable_server_and_the_reason(world: World) -> None:
    assert world.get("/v1/jobs")
    world.redis.kill()
    answer = world.ask("GET", "/readyz", key=None)
    assert problem(answer, 503) == "redis: the server is unavailable"
    state = answer.json()["redis"]
    assert (state["ok"], state["reason"]) == (False, "the server is unavailable")
    assert 0.0 <= time() - state["since_s"] < 600.0
    assert answer.json()["kafka"]["ok"]
    assert int(answer.headers["retry-after"]) > 0


def test_readyz_returns_503_before_jobs_and_keys_are_known(world: World) -> None:
    assert world.app
    world.log.go_away()
    answer = world.ask("GET", "/readyz", key=None)
    assert problem(answer, 503).startswith("kafka: ")
    assert answer.json()["storage"]["ok"]


def test_readyz_is_ok_without_object_storage_and_says_so() -> None:
    world = World(Settings())
    try:
        assert world.get("/v1/jobs")
        assert "DOLL_BLOBS is not set" in world.ask("GET", "/readyz").json()["storage"]["reason"]
    finally:
        world.close()


def test_frequent_probes_check_servers_only_once_per_interval() -> None:
    asked, clock = list[float](), ManualClock()

    def ask() -> str:
        asked.append(clock())
        return ""

    async def probes(checks: Checks) -> None:
        for _ in range(3):
            await asyncio.gather(*(checks.look() for _ in range(20)))
            clock.advance(FRESH_S - 0.1)
            await asyncio.gather(*(checks.look() for _ in range(20)))
            clock.advance(0.2)

    checks = Checks({"kafka": ask}, clock)
    asyncio.run(probes(checks))
    checks.close()
    assert len(asked) == 3


def test_hanging_server_is_unhealthy_and_not_checked_again_meanwhile() -> None:
    hung, asked, clock = Event(), list[str](), ManualClock()

    def hang() -> str:
        asked.append("redis")
        hung.wait()
        return "back"

    def refuse() -> str:
        raise UnavailableError("it\nis away")

    async def looks(checks: Checks) -> None:
        for _ in range(2):
            found = await checks.look()
            assert found["kafka"] == Check(ok=False, reason="it is away")
            assert (found["redis"].ok, found["redis"].reason) == (
                False,
                "did not answer within 0.05 s",
            )
            clock.advance(FRESH_S)
        hung.set()
        while not (await checks.look())["redis"].ok:
            clock.advance(FRESH_S)

    checks = Checks({"kafka": refuse, "redis": hang}, clock, patience_s=0.05)
    asyncio.run(looks(checks))
    checks.close()
    assert asked[:2] in (["redis"], ["redis", "redis"])


def test_hanging_kafka_is_an_outage_and_jobs_still_being_read_are_not() -> None:
    hung = Event()

    def hang() -> str:
        hung.wait()
        return ""

    def refuse() -> str:
        raise UnavailableError("jobs and keys are still being read")

    async def look(ask: Callable[[], str]) -> dict[str, Check]:
        hung.clear()
        checks = Checks({"kafka": ask}, patience_s=0.05)
        found = await checks.look()
        hung.set()
        checks.close()
        return found

    assert asyncio.run(look(refuse))["kafka"].since_s is None
    assert asyncio.run(look(hang))["kafka"].since_s is not None


def test_requests_are_counted_by_route_and_status(world: World) -> None:
    world.ask("GET", "/v1/jobs/nobody")
    world.ask("GET", "/v1/jobs/nowhere")
    world.ask("GET", "/nothing/here")
    world.ask("GET", "/v1/jobs", key=None)
    world.ask("BREW", "/v1/jobs")
    answer = world.ask("GET", "/metrics", key="viewer")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    for line in (
        'doll_api_requests_total{method="GET",route="/v1/jobs/{job}",status="404"} 2.0',
        'doll_api_requests_total{method="GET",route="none",status="404"} 1.0',
        'doll_api_requests_total{method="GET",route="none",status="401"} 1.0',
        'doll_api_requests_total{method="other",route="/v1/jobs",status="405"} 1.0',
        'doll_api_request_seconds_count{method="GET",route="/v1/jobs/{job}"} 2.0',
        "doll_api_streams_open 0.0",
    ):
        assert line in lines


def test_metrics_need_a_key(world: World) -> None:
    assert problem(world.ask("GET", "/metrics", key=None), 401)
