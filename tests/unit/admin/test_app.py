"""The application: creation without servers, problems, documents, startup and shutdown."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from common.config.settings import Settings
from common.errors import OutsideError
from common.jobs.servers import Outside
from common.telemetry.metrics.serving import STILL_S, Watchdog
from services.admin import app as app_module
from services.admin.app import create_app
from tests.fakes.clock import ManualClock
from tests.unit.admin.conftest import World, problem

if TYPE_CHECKING:
    import pytest

    from common.kafka.port import TransactionalLog


def test_app_is_created_without_any_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOLL_KAFKA", "DOLL_REDIS", "DOLL_BLOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOLL_KAFKA", "nobody.invalid:9092")
    app = create_app()
    assert "/v1/jobs" in app.openapi()["paths"]


def test_unknown_path_or_method_returns_a_problem(world: World) -> None:
    assert problem(world.ask("GET", "/v2"), 404) == "there is nothing at /v2"
    answer = world.ask("PUT", "/v1/jobs")
    assert problem(answer, 405) == "PUT is not supported here"
    assert answer.headers["allow"]


def test_internal_error_is_logged_and_not_described_in_its_response(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a secret")

    world.app.add_api_route("/fail", fail)
    answer = world.ask("GET", "/fail")
    assert "internal error" in problem(answer, 500)
    assert "a secret" not in answer.text
    assert "a secret" in caplog.text


def test_error_of_an_external_server_returns_502(world: World) -> None:
    def refuse() -> None:
        raise OutsideError("Kafka does not know us")

    world.app.add_api_route("/refuse", refuse)
    assert problem(world.ask("GET", "/refuse"), 502) == "Kafka does not know us"


def test_openapi_and_docs_are_served_locally_and_need_a_key(world: World) -> None:
    document = world.get("/openapi.json")
    assert document["openapi"].startswith("3.1")
    page = world.ask("GET", "/docs", key="viewer")
    assert page.headers["content-type"].startswith("text/html")
    # The page names no other host.
    assert "//" not in page.text.replace("</", "")
    assets = re.findall(r'(?:href|src)="([^"]+)"', page.text)
    assert len(assets) == 4
    for path in assets:
        asset = world.ask("GET", path, key="viewer")
        assert asset.status_code == 200
        assert asset.content
        assert problem(world.ask("GET", path, key=None), 401)


def test_followers_start_and_end_with_the_app(world: World) -> None:
    async def live() -> None:
        async with world.app.router.lifespan_context(world.app):
            await world.service.stores.ready()
            assert not world.service.ending.is_set()

    world.runner.run(live())
    assert world.service.ending.is_set()
    assert problem(world.ask("DELETE", "/v1/jobs/digits"), 503)


def test_failed_reader_thread_makes_the_process_unavailable() -> None:
    def broken() -> TransactionalLog:
        raise ZeroDivisionError

    world = World()
    app = create_app(Outside(Settings(), broken, world.board, lambda: world.blobs))
    vars(world)["app"] = app
    try:
        answer = world.ask("GET", "/v1/jobs", key="doll_x")
        assert problem(answer, 503) == "this process has failed"
        assert isinstance(world.service.stores.fault, ZeroDivisionError)
    finally:
        world.close()


def test_path_with_trailing_slash_is_not_redirected(world: World) -> None:
    for path in ("/v1/jobs/", "/docs/", "/healthz/"):
        assert world.ask("GET", path).status_code == 404


def test_event_loop_updates_its_watchdog_while_it_runs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "BEAT_S", 0.0)
    clock = ManualClock()
    world.service.watchdog = Watchdog(clock)

    async def beats(times: int) -> list[str]:
        found = list[str]()
        async with world.app.router.lifespan_context(world.app):
            for _ in range(times):
                clock.advance(STILL_S)
                found.append(world.service.watchdog.complaint())
                while world.service.watchdog.complaint():  # noqa: ASYNC110 -- the loop itself is asked
                    await asyncio.sleep(0)
        return found

    assert world.runner.run(beats(3)) == ["the loop has made no progress for 60 s"] * 3
    clock.advance(STILL_S)
    # The app has ended.
    assert world.service.watchdog.complaint()
