"""The live page in a real Chromium, before the real service on servers in memory."""

from __future__ import annotations

import os
import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import httpx2
import pytest
from playwright.sync_api import expect

from common.core.messages import (
    GENESIS,
    Batch,
    Lead,
    Quarantined,
    Replayed,
    Requeued,
    Synchrony,
    WorkerId,
)
from common.core.spans import Span
from common.provisioning.records import LaunchRequested, Planned, Started
from load.page.pictures import browser, chromium
from load.page.service import PageService, served
from load.page.world import AGE_S, World, make_record, make_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, BrowserContext, Page

    from common.core.messages import AuditRecord

SOON_MS = 60_000.0
HOSTILE = '<img src=x onerror="window.harmed = 1"><script>window.harmed = 1</script>&lt;b&gt; $&'
LAPTOP, PHONE = (1280, 800), (390, 844)

expect.set_options(timeout=SOON_MS)


class Site:
    """A service, and a browser that looks at it."""

    def __init__(self, service: PageService, address: str, opened: Browser) -> None:
        self.service = service
        self.address = address
        self._browser = opened
        self._contexts: dict[object, BrowserContext] = {}  # each with a cache of its own

    def open(
        self,
        place: str = "",
        size: tuple[int, int] = LAPTOP,
        key: str | None = None,
        timezone: str = "Europe/Berlin",
    ) -> Page:
        """Open the page at a place, in a window of its own."""
        asked = size, key or self.service.key, timezone
        if asked not in self._contexts:
            self._contexts[asked] = self._browser.new_context(
                viewport={"width": size[0], "height": size[1]},
                is_mobile=size == PHONE,
                timezone_id=timezone,
                http_credentials={"username": "me", "password": asked[1]},
            )
        page = self._contexts[asked].new_page()
        page.set_default_timeout(SOON_MS)
        page.goto(f"{self.address}/#{place}")
        return page

    def get(self, path: str) -> Any:  # noqa: ANN401 -- JSON
        """What the API says."""
        answer = httpx2.get(self.address + path, auth=("me", self.service.key))
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    executable = chromium()
    if executable is None:
        if os.environ.get("TEST_REQUIRE_SERVERS") == "1":
            pytest.fail("Chromium was not found on PATH, and TEST_REQUIRE_SERVERS=1")
        pytest.skip("Chromium was not found on PATH")
    with browser(executable) as found:
        yield found


@pytest.fixture(scope="module")
def site(opened: Browser) -> Iterator[Site]:
    now_s = time.time()
    by_hand = World(make_record("clicks", now_s, "paused", HOSTILE, rented=False))
    held = make_held("orders", now_s)
    service = PageService({"clicks": by_hand, "fraud": make_world("fraud", now_s), "orders": held})
    with served(service) as address:
        yield Site(service, address, opened)


@pytest.fixture(scope="module")
def empty_site(opened: Browser) -> Iterator[Site]:
    service = PageService({})
    with served(service) as address:
        yield Site(service, address, opened)


@pytest.fixture(autouse=True)
def _close_windows(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "opened" in request.fixturenames:
        found: Browser = request.getfixturevalue("opened")
        for page in [page for context in found.contexts for page in context.pages]:
            page.close()


def tile(page: Page, name: str) -> str:
    """A headline number, once it is there."""
    found = page.locator(f'.tile[data-name="{name}"] .value')
    expect(found).to_have_text(re.compile("[0-9]"))
    return found.inner_text()


def drawn(page: Page, selector: str) -> list[dict[str, Any]]:
    """What Plotly drew in an element, once it has."""
    chart = page.locator(selector)
    chart.scroll_into_view_if_needed()
    chart.locator(".main-svg").first.wait_for()
    found: list[dict[str, Any]] = chart.evaluate("chart => chart.data")
    return found


def test_the_page_asks_nobody_but_its_service_and_complains_of_nothing(site: Site) -> None:
    page = site.open("/nowhere", LAPTOP)
    asked, said = list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))

    page.reload()
    page.get_by_role("link", name="fraud").click()
    for name in ("lanes", "loss", "lag", "cost"):
        page.locator(f".{name} .main-svg").first.scroll_into_view_if_needed()
    page.locator(".lanes").hover()
    page.get_by_role("link", name="all jobs").click()
    page.get_by_role("heading", name="Jobs").wait_for()

    assert {"/v1/jobs", "/v1/jobs/fraud/events"} <= {url[len(site.address) :] for url in asked}
    assert [url for url in asked if not url.startswith(site.address + "/")] == []
    assert said == []


def test_the_list_shows_how_every_job_is(site: Site) -> None:
    page = site.open()
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="fraud"))
    expect(row.locator('[data-name="Version"]')).to_have_text(re.compile("[0-9]"))

    told = site.get("/v1/jobs/fraud")["progress"]
    cost = site.get("/v1/jobs/fraud/provisioning")["cost"]

    cells = {cell.get_attribute("data-name"): cell.inner_text() for cell in row.locator("td").all()}
    assert cells["State"] == "running"
    assert cells["Version"] == f"{told['version']:,}"
    assert cells["Accuracy"] == f"{told['metrics']['accuracy']:.1%}".replace("%", " %")
    assert cells["Workers"] == str(told["workers"])
    assert cells["Cost"] == f"${cost['spent_usd']:.2f}"
    assert cells["Of on-demand"] == f"{cost['ratio_to_on_demand']:.1%}".replace("%", " %")
    paused = page.get_by_role("row").filter(has=page.get_by_role("link", name="clicks"))
    expect(paused.locator('[data-name="State"]')).to_contain_text("paused")


def test_a_job_that_is_held_shows_why_and_the_commands_that_go_on(site: Site) -> None:
    page = site.open("/jobs/orders")
    grave, quarantine = page.locator(".banner.grave"), page.locator(".banner:not(.grave)")

    expect(grave).to_contain_text("3 batches in a row were quarantined: KeyError: 'label'")
    expect(grave.locator("code")).to_have_text("doll job resume orders")
    expect(quarantine).to_contain_text("3 batches are quarantined:")
    expect(quarantine).to_contain_text("3 can be trained after all")
    expect(quarantine.locator("code")).to_have_text("doll job requeue orders --all")
    expect(page.locator("details .detail")).to_contain_text("KeyError: 'label'")

    site.service.update("orders", Requeued(poison(0), "ada", time.time()))
    site.service.update("orders", Replayed(poison(1), "ada", time.time()))

    expect(quarantine).to_contain_text("2 batches are quarantined:")
    expect(quarantine).to_contain_text("1 can be trained after all")
    page.goto(f"{site.address}/#/")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="orders"))
    expect(row.locator('[data-name="State"]')).to_contain_text("held")


def test_a_job_shows_the_numbers_that_the_api_gives(site: Site) -> None:
    page = site.open("/jobs/fraud")
    told = site.get("/v1/jobs/fraud/provisioning")
    plan = told["plan"]

    expect(page.locator('.tile[data-name="Cost so far"] .note')).to_contain_text("of on-demand")
    assert tile(page, "Cost so far") == f"${told['cost']['spent_usd']:.2f}"
    assert tile(page, "Predicted cost") == f"${told['cost']['predicted_usd']:.2f}"
    assert tile(page, "Version") == f"{site.get('/v1/jobs/fraud')['progress']['version']:,}"
    section = page.locator("section", has=page.get_by_role("heading", name="The plan in force"))
    expect(section).to_contain_text(f"{plan['spot']} on spot, {plan['on_demand']} on demand")
    expect(section).to_contain_text(plan["reason"])
    expect(section).to_contain_text(plan["why"])
    expect(page.locator(".plans li")).to_have_count(len(told["plans"]))
    estimate = page.get_by_role("row").filter(has_text="Availability, spot-a")
    expect(estimate).to_contain_text("92.7 %")
    expect(estimate).to_contain_text("92.1 % to 93.3 %")


def test_curves_reach_as_far_as_the_job_and_show_the_line_at_one(site: Site) -> None:
    page = site.open("/jobs/fraud")
    told = site.get("/v1/jobs/fraud/curves")

    loss = drawn(page, ".chart.loss")
    stability = drawn(page, ".chart.stability")

    assert loss[0]["x"][0] == told["update_at_s"][0] * 1000
    assert loss[0]["y"][:9] == told["loss"][:9]
    assert stability[0]["y"][:9] == told["stability"][:9]
    shapes = page.locator(".chart.stability").evaluate("chart => chart.layout.shapes")
    assert any(shape["type"] == "line" and shape["y0"] == shape["y1"] == 1 for shape in shapes)
    assert {trace["name"] for trace in drawn(page, ".chart.cost")} == {
        *("spent", "on-demand only", "predicted")
    }
    assert {trace["name"] for trace in drawn(page, ".chart.lag")} == {
        each["stream"] for each in told["lag"]
    }


def test_what_an_evaluator_told_is_drawn_beside_what_was_predicted(site: Site) -> None:
    page = site.open("/jobs/fraud")
    told = site.get("/v1/jobs/fraud/curves")["evaluation"]

    (test,) = (each for each in drawn(page, ".chart.metric") if each["name"] == "test set")

    assert len(told["version"]) > 30
    assert test["y"] == told["test"]["accuracy"]
    shapes = page.locator(".chart.metric").evaluate("chart => chart.layout.shapes")
    assert [shape["x0"] for shape in shapes] == [told["drifts"][0]["at_s"] * 1000]
    legend = page.locator("figcaption li").filter(has_text="on the test set")
    expect(legend.locator("b")).to_have_text(f"{told['test']['accuracy'][-1]:.3g}")
    happened = page.locator(".log").filter(has_text="payments-us drifts")
    expect(happened).to_contain_text("errors rose from 0.041 to 0.118, at version 3,200")


def test_the_timeline_marks_preemptions_by_a_shape(site: Site) -> None:
    page = site.open("/jobs/fraud")
    lives = site.get("/v1/jobs/fraud/curves")["lives"]
    preempted = [life for life in lives if life["cause"] == "preempted"]

    traces = drawn(page, ".chart.lanes")

    (marks,) = (trace for trace in traces if trace.get("marker", {}).get("symbol") == "x")
    assert len(preempted) > 10
    assert sorted(marks["x"]) == sorted(life["to_s"] * 1000 for life in preempted)
    legend = page.locator("figcaption li").filter(has_text="preempted")
    expect(legend.locator("b")).to_have_text(str(len(preempted)))
    kinds = {life["kind"] for life in lives}
    assert len([trace for trace in traces if trace["type"] == "bar"]) == len(kinds) == 2


def test_an_update_changes_the_page_at_once_and_without_a_reload(site: Site) -> None:
    page = site.open("/jobs/fraud")
    expect(page.locator("#pulse")).to_have_text("Live")
    before = tile(page, "Version")
    points = len(drawn(page, ".chart.loss")[0]["x"])
    page.evaluate("window.marked = 1")

    update = site.service.next_update("fraud", loss=0.0321)

    expect(page.locator('.tile[data-name="Version"] .value')).to_have_text(f"{update.version:,}")
    expect(page.locator('.tile[data-name="Loss"] .note')).to_contain_text("0.0321")
    assert f"{update.version:,}" != before
    page.wait_for_function(
        "most => document.querySelector('.chart.loss').data[0].x.length > most", arg=points
    )
    assert page.evaluate("window.marked") == 1


def test_a_switch_of_synchronisation_is_seen_with_what_is_in_force(site: Site) -> None:
    page = site.open("/jobs/fraud")
    expect(page.locator("#pulse")).to_have_text("Live")
    expect(page.locator('.tile[data-name="Synchronisation"]')).to_have_count(0)
    version = site.get("/v1/jobs/fraud")["progress"]["version"] + 1
    stale = Synchrony(10, staleness=1)

    site.service.next_update(
        "fraud", synchrony=stale, base=version - 2, revision=1, equivalent=version - 50.0
    )

    shown = page.locator('.tile[data-name="Synchronisation"]')
    expect(shown.locator(".value")).to_have_text("stale")
    expect(shown.locator(".note")).to_have_text("K = 10, s = 1; the newest update 1 behind")
    expect(page.locator(".subtitle")).to_contain_text("K = 10 batches of b = 256")
    note = page.locator('.tile[data-name="Version"] .note')
    expect(note).to_contain_text(f"count as {version - 50:,} of 9,000")
    expect(page.locator(".log")).to_contain_text(f"Updates are stale from version {version:,} on.")


def test_texts_from_jobs_are_never_read_as_html(site: Site) -> None:
    page = site.open("/jobs/fraud")
    expect(page.locator("#pulse")).to_have_text("Live")
    last = [plan for plan in site.service.worlds["fraud"].plans if isinstance(plan, Planned)][-1]
    launches = len(
        [plan for plan in site.service.worlds["fraud"].plans if isinstance(plan, LaunchRequested)]
    )
    now_s = time.time()

    for plan in (
        Planned(**{**fields(last), "number": last.number + 1, "reason": HOSTILE, "at_s": now_s,
                   "why": HOSTILE, "warning": HOSTILE, "binding": HOSTILE}),
        LaunchRequested(0, launches + 1, now_s, 3, "on-demand", HOSTILE),
        Started(0, launches + 1, now_s, HOSTILE),
    ):  # fmt: skip
        site.service.plan("fraud", plan)

    expect(page.locator(".reason")).to_have_text(HOSTILE)
    expect(page.locator(".banner.grave")).to_contain_text(HOSTILE)
    expect(page.locator(".log li").first).to_contain_text(HOSTILE)
    page.wait_for_function(
        "() => document.querySelector('.chart.lanes').data?.some("
        "trace => trace.hovertext?.some(text => text.includes('&lt;script&gt;')))"
    )
    hover = [text for trace in drawn(page, ".chart.lanes") for text in trace.get("hovertext", ())]
    assert not [text for text in hover if "<img" in text or "<script" in text]
    page.goto(f"{site.address}/#/jobs/clicks")
    expect(page.locator(".banner")).to_contain_text(HOSTILE)
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("window.harmed") is None


def test_a_phone_never_scrolls_sideways(site: Site) -> None:
    page = site.open("/", PHONE)
    page.get_by_role("link", name="fraud").wait_for()
    widths = dict[str, list[float]]()

    for place, heading in (
        *(("/", "Jobs"), ("/jobs/clicks", "clicks"), ("/jobs/fraud", "fraud")),
        ("/jobs/unknown", "There is no job named unknown"),
    ):
        page.goto(f"{site.address}/#{place}")
        page.get_by_role("heading", name=heading, level=1).wait_for()
        if place == "/jobs/fraud":
            assert tile(page, "Cost so far")
            assert drawn(page, ".chart.lanes")
            assert drawn(page, ".chart.cost")
        widths[place] = page.evaluate(
            "[document.documentElement.scrollWidth, innerWidth, visualViewport.width]"
        )

    assert len(widths) == 4
    assert all(found == [PHONE[0]] * 3 for found in widths.values()), widths


def test_times_are_those_of_the_viewers_zone(site: Site) -> None:
    page = site.open("/jobs/fraud", timezone="Asia/Tokyo")
    assert drawn(page, ".chart.lanes")
    now_s, zone = time.time(), ZoneInfo("Asia/Tokyo")
    clocks = {
        datetime.fromtimestamp(now_s - age_s, zone).strftime("%H:%M")
        for age_s in range(0, int(AGE_S) + 300, 30)
    }

    shown = page.locator(".chart.lanes .xtick text").all_text_contents()

    assert len(shown) > 2
    assert set(shown) <= clocks
    expect(page.get_by_text("Times in Asia/Tokyo.")).to_be_visible()


def test_a_wrong_key_is_told_what_to_do(site: Site) -> None:
    page = site.open("/jobs/fraud", key="doll_wrong")

    expect(page.locator("body")).to_contain_text("The API key is missing or wrong.")
    expect(page.locator("body")).to_contain_text("doll key create")


def test_a_key_that_is_revoked_meanwhile_is_told_what_to_do(site: Site) -> None:
    page = site.open("/jobs/fraud", key=site.service.keys.create("guest", "viewer")[0])
    assert tile(page, "Version")

    site.service.keys.revoke("guest")
    page.get_by_role("link", name="Jobs", exact=True).click()

    expect(page.get_by_role("heading", name="A valid key is needed")).to_be_visible()
    expect(page.get_by_role("button", name="Reload and sign in")).to_be_visible()
    expect(page.locator("#pulse")).to_have_text("Stopped")


def test_what_is_not_there_is_a_plain_sentence(site: Site) -> None:
    page = site.open("/jobs/never%20was")
    expect(page.get_by_role("heading", name="There is no job named never was")).to_be_visible()

    page.goto(f"{site.address}/#/jobs/clicks")

    expect(page.get_by_text("No machines are rented for this job")).to_be_visible()
    expect(page.get_by_text("Nobody works for this job")).to_be_attached()
    expect(page.get_by_role("heading", name="Cost so far")).to_be_hidden()


def test_without_any_job_the_page_says_how_to_submit_one(empty_site: Site) -> None:
    page = empty_site.open()

    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    expect(page.locator("pre")).to_contain_text("doll job submit docs/examples/digits.yaml")
    expect(page.locator("pre")).to_contain_text(empty_site.address)


def test_a_page_that_loses_its_service_says_so_and_comes_back(site: Site) -> None:
    page = site.open("/jobs/fraud")
    expect(page.locator("#pulse")).to_have_text("Live")

    page.context.set_offline(offline=True)
    expect(page.locator("#pulse")).to_have_text("Disconnected: trying again")
    expect(page.locator(".trouble")).to_contain_text("does not answer")
    assert tile(page, "Version")  # what was known stays

    page.context.set_offline(offline=False)
    expect(page.locator("#pulse")).to_have_text("Live")
    expect(page.locator(".trouble")).to_be_hidden()


def test_the_page_can_be_used_by_keyboard_alone(site: Site) -> None:
    page = site.open()
    page.get_by_role("link", name="fraud").wait_for()
    for _ in range(4):  # skip link, home, clicks, fraud
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="fraud").wait_for()

    page.get_by_role("radio", name="All").focus()
    page.keyboard.press("ArrowRight")

    expect(page.get_by_role("radio", name="1 h")).to_be_checked()
    chart = page.locator(".chart.loss")
    page.wait_for_function(
        "() => { const axis = document.querySelector('.chart.loss')._fullLayout?.xaxis;"
        " return axis && axis.r2l(axis.range[1]) - axis.r2l(axis.range[0]) === 3600000; }"
    )
    expect(chart).to_have_attribute("aria-label", re.compile("Loss over time"))


def poison(offset: int) -> Batch:
    spans = (Span("payments-eu", 0, offset * 256, (offset + 1) * 256),)
    return Batch(offset, WorkerId("w1"), spans, 256)


def make_held(name: str, now_s: float) -> World:
    """A job whose first three batches its task could not use."""
    why = "3 batches in a row were quarantined: KeyError: 'label'"
    record = make_record(name, now_s, "paused", why, rented=False)
    detail = "Traceback (most recent call last):\n  ...\nKeyError: 'label'"
    quarantined = [Quarantined(0, poison(offset), "poison: KeyError") for offset in range(3)]
    happened: list[AuditRecord] = [Lead(-1, GENESIS, "c1"), *quarantined]
    return World(
        record._replace(held=True, detail=detail),
        updates=[(now_s - 60.0, each) for each in happened],
    )


def fields(plan: Planned) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__struct_fields__}
