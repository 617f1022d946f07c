"""The live page in a real Chromium, on the real service with servers in memory.

A browser takes seconds of a processor to load Plotly. On every change the tests open the page that
has all charts and do the most frequent actions. The other tests run if the page has changed.
"""

from __future__ import annotations

import os
import re
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from zoneinfo import ZoneInfo

import httpx2
import pytest
from msgspec.structs import replace
from playwright.sync_api import expect

from common.core.job_placement import JobDemand, PlacementView, WorkerPlacement, elsewhere
from common.core.messages import (
    GENESIS,
    Batch,
    Lead,
    Quarantined,
    Replayed,
    Requeued,
    Skipped,
    Synchrony,
    WorkerId,
)
from common.core.spans import Span
from common.kafka.dead_letters import encode_dead_letter
from common.learning.checkpoint import unpack
from common.spot.provisioning.records import LaunchRequested, Planned, Started
from load.harness.browser import browser, chromium
from tests.changes import once_changed
from tests.page.service import PageService, served
from tests.page.world import AGE_S, World, make_record, make_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, BrowserContext, Page

    from common.core.messages import AuditRecord

# If none of these files changed, the page shows the same.
SEEN = once_changed(
    *("services/admin/", "common/api/", "tests/page/", "tests/integration/test_page.py"),
)
SOON_MS = 60_000.0
HOSTILE = '<img src=x onerror="window.harmed = 1"><script>window.harmed = 1</script>&lt;b&gt; $&'
LAPTOP, PHONE = (1280, 800), (390, 844)

FILE = """\
name: letters
streams: [payments-eu]
records:
  codec: tensor
  fields: {features: {dtype: float32, shape: [41]}, label: {dtype: int64}}
task: {name: logistic-regression, classes: 2}
batch_size: 64
group_size: 4
optimizer: {name: adam, learning_rate: 2.0e-3}
"""
MODULE = """async () => {
  const page = document.querySelector('script[type="module"]').src;
  const load = name => import(page.replace("main.js", name));"""

expect.set_options(timeout=SOON_MS)


class Site:
    """A service, and a browser."""

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
        """Open the page at a place, in a new window."""
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
        """Return the API's answer."""
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
    service = PageService(
        {
            "clicks": by_hand,
            "fraud": make_world("fraud", now_s),
            "orders": make_held("orders", now_s),
            "spam": make_done("spam", now_s),
        }
    )
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
    """Return a headline number, once it is shown."""
    found = page.locator(f'.tile[data-name="{name}"] .value')
    expect(found).to_have_text(re.compile("[0-9]"))
    return found.inner_text()


def drawn(page: Page, selector: str) -> list[dict[str, Any]]:
    """Return the traces that Plotly drew in an element, as soon as there are any."""
    chart = page.locator(selector)
    chart.scroll_into_view_if_needed()
    chart.locator(".main-svg").first.wait_for()
    found: list[dict[str, Any]] = chart.evaluate("chart => chart.data")
    return found


def test_page_requests_only_its_own_service_and_logs_no_errors(site: Site) -> None:
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

    paths = {url[len(site.address) :].partition("?")[0] for url in asked}
    assert {"/v1/jobs", "/v1/jobs/fraud/events"} <= paths
    assert [url for url in asked if not url.startswith(site.address + "/")] == []
    assert said == []


def test_job_list_is_shown_before_chart_code_is_loaded(site: Site) -> None:
    page = site.open("/nowhere")
    asked = list[str]()
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))

    page.reload()
    page.get_by_role("link", name="fraud").wait_for()
    loaded = [each for each in asked if each.endswith(".js")]
    page.get_by_role("link", name="fraud").click()
    page.locator(".chart.loss .main-svg").first.wait_for()

    assert sorted(loaded) == [
        *("api.js", "dom.js", "format.js", "jobs.js", "main.js", "notices.js"),
    ]
    assert {"job.js", "charts.js", "plotly.min.js"} <= set(asked)


@SEEN
def test_job_that_awaits_its_turn_is_shown_as_idle(opened: Browser) -> None:
    now_s = time.time()
    waits = World(make_record("letters", now_s, rented=False), lags=[(now_s, (500, 0, 0))])
    service = PageService({"letters": waits})
    worker = WorkerPlacement("w1", job="fraud")
    view = PlacementView((JobDemand("letters", backlog=500),), (worker,))
    service.await_turn("letters", elsewhere(view, view.jobs[0]))
    with served(service) as address:
        page = Site(service, address, opened).open("/jobs/letters")
        banner, badge = page.locator(".banner"), page.locator("main .badge")

        expect(banner).to_contain_text(
            "another job has its turn: the worker is working for `fraud`"
        )
        expect(banner).not_to_have_class(re.compile("grave"))
        expect(badge).to_have_text("waiting for workers")
        expect(badge).to_have_attribute("data-idle", "")
        page.goto(f"{address}/#/")
        expect(page.locator(".jobs tbody .badge")).to_have_attribute("data-idle", "")


def test_list_shows_state_of_every_job(site: Site) -> None:
    page = site.open()
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="fraud"))
    expect(row.locator('[data-name="Version"]')).to_have_text(re.compile("[0-9]"))

    answer = site.get("/v1/jobs/fraud")["progress"]
    cost = site.get("/v1/jobs/fraud/provisioning")["cost"]

    cells = {cell.get_attribute("data-name"): cell.inner_text() for cell in row.locator("td").all()}
    assert cells["State"] == "running"
    assert cells["Version"] == f"{answer['version']:,}"
    assert cells["Accuracy"] == f"{answer['metrics']['accuracy']:.1%}".replace("%", " %")
    assert cells["Workers"] == str(answer["workers"])
    assert float(cells["Cost"].removeprefix("$")) == pytest.approx(cost["spent_usd"], abs=0.1)
    paused = page.get_by_role("row").filter(has=page.get_by_role("link", name="clicks"))
    expect(paused.locator('[data-name="State"]')).to_have_text("paused")
    answer = site.get("/v1/jobs/clicks")["progress"]
    expect(paused.locator('[data-name="Version"]')).to_have_text(f"{answer['version']:,}")
    expect(paused.locator('[data-name="Why"]')).to_have_attribute("title", HOSTILE)


@SEEN
def test_held_job_shows_the_reason_and_the_commands_to_resume(site: Site) -> None:
    page = site.open("/jobs/orders")
    grave, quarantine = page.locator(".banner.grave"), page.locator(".banner:not(.grave)")

    expect(grave).to_contain_text("3 batches in a row were quarantined: KeyError: 'label'")
    expect(grave.locator("code")).to_have_text("doll job resume orders")
    expect(quarantine).to_contain_text("3 batches are quarantined:")
    expect(quarantine).to_contain_text("3 can be trained once")
    expect(quarantine.locator("code")).to_have_text("doll job requeue orders --all")
    expect(page.locator("details .detail")).to_contain_text("KeyError: 'label'")

    site.service.update("orders", Requeued(poison(0), "ada", time.time()))
    site.service.update("orders", Replayed(poison(1), "ada", time.time()))

    expect(quarantine).to_contain_text("2 batches are quarantined:")
    expect(quarantine).to_contain_text("1 can be trained once")
    page.goto(f"{site.address}/#/")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="orders"))
    expect(row.locator('[data-name="State"]')).to_contain_text("held")


@SEEN
def test_job_page_shows_the_numbers_of_the_api(site: Site) -> None:
    page = site.open("/jobs/fraud")
    answer = site.get("/v1/jobs/fraud/provisioning")
    plan = answer["plan"]

    expect(page.locator('.tile[data-name="Cost so far"] .note')).to_contain_text("of on-demand")
    assert tile(page, "Cost so far") == f"${answer['cost']['spent_usd']:.2f}"
    assert tile(page, "Predicted cost") == f"${answer['cost']['predicted_usd']:.2f}"
    assert tile(page, "Version") == f"{site.get('/v1/jobs/fraud')['progress']['version']:,}"
    section = page.locator("section", has=page.get_by_role("heading", name="Current plan"))
    expect(section).to_contain_text(f"{plan['spot']} on spot, {plan['on_demand']} on demand")
    expect(section).to_contain_text(plan["reason"])
    expect(section).to_contain_text(plan["why"])
    expect(page.locator(".plans li")).to_have_count(len(answer["plans"]))
    estimate = page.get_by_role("row").filter(has_text="Availability, spot-a")
    expect(estimate).to_contain_text("92.7 %")
    expect(estimate).to_contain_text("92.1 % to 93.3 %")


@SEEN
def test_charts_cover_the_whole_job_and_mark_stability_one(site: Site) -> None:
    page = site.open("/jobs/fraud")
    answer = site.get("/v1/jobs/fraud/curves")

    loss = drawn(page, ".chart.loss")
    stability = drawn(page, ".chart.stability")

    assert loss[0]["x"][0] == answer["update_at_s"][0] * 1000
    assert loss[0]["y"][:9] == answer["loss"][:9]
    assert stability[0]["y"][:9] == answer["stability"][:9]
    shapes = page.locator(".chart.stability").evaluate("chart => chart.layout.shapes")
    assert any(shape["type"] == "line" and shape["y0"] == shape["y1"] == 1 for shape in shapes)
    assert {trace["name"] for trace in drawn(page, ".chart.cost")} == {
        *("spent", "on-demand only", "predicted")
    }
    assert {trace["name"] for trace in drawn(page, ".chart.lag")} == {
        each["stream"] for each in answer["lag"]
    }


@SEEN
def test_evaluations_are_drawn_beside_prequential_metrics(site: Site) -> None:
    page = site.open("/jobs/fraud")
    answer = site.get("/v1/jobs/fraud/curves")["evaluation"]

    (test,) = (each for each in drawn(page, ".chart.metric") if each["name"] == "test set")

    assert len(answer["version"]) > 30
    assert test["y"] == answer["test"]["accuracy"]
    shapes = page.locator(".chart.metric").evaluate("chart => chart.layout.shapes")
    assert [shape["x0"] for shape in shapes] == [answer["drifts"][0]["at_s"] * 1000]
    legend = page.locator("figcaption li").filter(has_text="on the test set")
    expect(legend.locator("b")).to_have_text(f"{answer['test']['accuracy'][-1]:.3g}")
    happened = page.locator(".log").filter(has_text="payments-us drifts")
    expect(happened).to_contain_text("errors rose from 0.041 to 0.118, at version 3,200")


@SEEN
def test_timeline_marks_preemptions_by_a_shape(site: Site) -> None:
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


def test_update_changes_the_page_without_a_reload(site: Site) -> None:
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


@SEEN
def test_switch_of_synchronisation_shows_the_mode_in_force(site: Site) -> None:
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


@SEEN
def test_phone_layout_never_scrolls_sideways(site: Site) -> None:
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


@SEEN
def test_times_are_shown_in_the_zone_of_the_viewer(site: Site) -> None:
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


@SEEN
def test_wrong_key_gets_a_remedy(site: Site) -> None:
    page = site.open("/jobs/fraud", key="doll_wrong")

    expect(page.locator("body")).to_contain_text("The API key is missing or wrong.")
    expect(page.locator("body")).to_contain_text("doll key create")


def test_revoked_key_gets_a_remedy(site: Site) -> None:
    page = site.open("/jobs/fraud", key=site.service.keys.create("guest", "viewer")[0])
    assert tile(page, "Version")

    site.service.keys.revoke("guest")
    page.get_by_role("link", name="Jobs", exact=True).click()

    expect(page.get_by_role("heading", name="A valid API key is required")).to_be_visible()
    expect(page.get_by_role("button", name="Reload and sign in")).to_be_visible()
    expect(page.locator("#pulse")).to_have_text("Stopped")


@SEEN
def test_missing_job_is_described_in_a_plain_sentence(site: Site) -> None:
    page = site.open("/jobs/never%20was")
    expect(page.get_by_role("heading", name="There is no job named never was")).to_be_visible()

    page.goto(f"{site.address}/#/jobs/clicks")

    expect(page.get_by_text("This job has no workers")).to_be_attached()
    for name in ("Machines", "Cost so far", "Stability ratio", "Current plan", "Plans"):
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_hidden()


def test_workers_are_listed_with_their_devices(site: Site) -> None:
    page = site.open("/jobs/fraud")
    gpus = page.locator("table.workers td[title='compute capability 8.9, driver 580.65.06']")
    expect(gpus.first).to_have_text("NVIDIA L4, 24 GiB")


@SEEN
def test_page_without_jobs_shows_how_to_submit_one(empty_site: Site) -> None:
    page = empty_site.open()

    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    expect(page.locator("pre")).to_contain_text("doll job submit docs/examples/digits.yaml")
    expect(page.locator("pre")).to_contain_text(empty_site.address)


@SEEN
def test_page_reports_lost_service_and_reconnects(site: Site) -> None:
    page = site.open("/jobs/fraud")
    expect(page.locator("#pulse")).to_have_text("Live")

    page.context.set_offline(offline=True)
    expect(page.locator("#pulse")).to_have_text("Disconnected: trying again")
    expect(page.locator(".problem")).to_contain_text("does not answer")
    assert tile(page, "Version")  # the last known values stay

    page.context.set_offline(offline=False)
    expect(page.locator("#pulse")).to_have_text("Live")
    expect(page.locator(".problem")).to_be_hidden()


@SEEN
def test_page_can_be_used_by_keyboard_alone(site: Site) -> None:
    page = site.open()
    page.get_by_role("link", name="fraud").wait_for()
    # The Tab key visits: skip link, home, filter, four states, 13 columns, orders, fraud.
    for _ in range(22):
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


@SEEN
def test_held_jobs_come_first_and_the_list_can_be_sorted_and_filtered(
    site: Site,
) -> None:
    page = site.open()
    rows = page.locator(".jobs tbody tr:visible th a")
    listed = site.get("/v1/jobs?sort=-version")["jobs"]
    by_version = [job["id"] for job in listed]
    expect(rows).to_have_text(["orders", "fraud", "clicks", "spam"])

    page.get_by_role("button", name="Job", exact=True).click()
    expect(rows).to_have_text(["clicks", "fraud", "orders", "spam"])
    page.get_by_role("button", name="Version").click()
    expect(rows.first).to_have_text(by_version[0])
    expect(page.get_by_role("columnheader", name="Version")).to_have_attribute(
        "aria-sort", "descending"
    )
    page.get_by_role("searchbox").fill("PAUSED")
    expect(rows).to_have_text(["clicks"])
    page.get_by_role("searchbox").fill("")
    expect(rows).to_have_count(4)
    page.get_by_role("button", name="1 held").click()
    expect(rows).to_have_text(["orders"])
    page.get_by_role("button", name="1 held").click()
    expect(rows).to_have_count(4)


@pytest.fixture(scope="module")
def crowded_site(opened: Browser) -> Iterator[Site]:
    now_s = time.time()
    reason = "prices are high and will be for a while, as the market says: " * 5
    name = "payments-europe-fraud-model-{:03}"
    service = PageService(
        {
            name.format(number): World(
                make_record(name.format(number), now_s, "paused", reason, rented=False)
            )
            for number in range(43)
        }
    )
    with served(service) as address:
        yield Site(service, address, opened)


@SEEN
def test_twenty_jobs_fit_on_a_laptop_screen_and_others_are_a_page_away(
    crowded_site: Site,
) -> None:
    page = crowded_site.open(size=(1366, 768))
    asked = list[str]()
    page.on("request", lambda request: asked.append(request.url))
    rows = page.locator(".jobs tbody tr")
    expect(rows).to_have_count(20)
    expect(page.locator(".states")).to_have_text("43 paused")
    box = rows.last.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 768
    assert box["height"] < 30
    # Name and state are complete. The reason is cut.
    cut = "(cell) => cell.scrollWidth > cell.clientWidth"
    assert rows.last.locator(".why").evaluate(cut)
    assert not rows.last.locator("th").evaluate(cut)
    assert not rows.last.locator('[data-name="State"]').evaluate(cut)
    assert page.evaluate("document.documentElement.scrollWidth") == 1366

    page.get_by_role("button", name="Next").click()
    expect(page.locator(".pages")).to_contain_text("21 to 40 of 43")
    expect(rows.first).to_contain_text("model-020")
    page.get_by_role("button", name="Next").click()
    expect(rows).to_have_count(3)
    page.get_by_role("button", name="Back").click()
    expect(rows.first).to_contain_text("model-020")
    # The list requests jobs by the page, never one by one.
    assert not [url for url in asked if "/v1/jobs/" in url]


@SEEN
def test_phone_can_sort_the_list(site: Site) -> None:
    page = site.open("/", PHONE)
    rows = page.locator(".jobs tbody tr th a")
    expect(rows).to_have_text(["orders", "fraud", "clicks", "spam"])
    page.get_by_label("Sort by").select_option("Job")
    expect(rows).to_have_text(["clicks", "fraud", "orders", "spam"])


@SEEN
def test_large_numbers_fit_into_a_tile(site: Site) -> None:
    page = site.open()
    answer = page.evaluate(
        MODULE
        + """
  const { short } = await load("format.js");
  return [3e16, 9.99e11, -2e300, 0.5].map(short);
}"""
    )
    assert answer == ["3.0e+16", "999G", "-2.0e+300", "0.5"]


@SEEN
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_red_text_has_enough_contrast_on_every_background(
    site: Site, scheme: Literal["light", "dark"]
) -> None:
    page = site.open()
    page.emulate_media(color_scheme=scheme)
    colours = page.evaluate(
        "Object.fromEntries(['red', 'blue', 'back', 'card', 'grave', 'mild'].map((name) =>"
        " [name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()]))"
    )
    grounds = {name: colours[name] for name in ("back", "card", "grave", "mild")}
    found = {name: _contrast(colours["red"], ground) for name, ground in grounds.items()}
    # WCAG 2.2 AA, contrast of text.
    assert min(found.values()) >= 4.5, found


def _contrast(one: str, other: str) -> float:
    """Return the ratio of contrast of two colours as WCAG defines it."""
    darker, lighter = sorted(map(_luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@SEEN
def test_time_axis_of_finished_job_ends_with_the_job(site: Site) -> None:
    page = site.open("/jobs/spam")
    drawn(page, ".chart.loss")
    at_s = site.get("/v1/jobs/spam/curves")["update_at_s"]

    page.wait_for_function(
        "long => { const axis = document.querySelector('.chart.loss')._fullLayout.xaxis;"
        " return Math.abs(axis.r2l(axis.range[1]) - axis.r2l(axis.range[0]) - long) < 2; }",
        arg=(at_s[-1] - at_s[0]) * 1000,
    )


@SEEN
def test_full_page_pictures_and_prints_have_every_chart(site: Site) -> None:
    page = site.open("/jobs/fraud")
    page.wait_for_function(
        "() => { const charts = [...document.querySelectorAll('.chart')];"
        " return charts.length && charts.every(chart => chart.querySelector('.main-svg')); }"
    )
    assert page.evaluate("scrollY") == 0

    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")

    expect(page.get_by_role("table").filter(has_text="fraud-12")).to_be_visible()
    plans = page.locator(".scroll").first
    assert plans.evaluate("box => box.scrollHeight <= box.clientHeight")


@SEEN
def test_times_without_data_are_gaps_in_a_curve(site: Site) -> None:
    page = site.open("/jobs/fraud")
    times = [*range(100), *range(400, 500)]

    shown = page.evaluate(
        MODULE
        + """
        const at_s = TIMES, loss = at_s.map(() => 0.5), palette = { blue: "#0072b2" };
        const { data } = (await load("figures.js")).loss({ at_s, loss }, palette, { fromS: 0 });
        return data[1];
        }""".replace("TIMES", str(times))
    )

    assert [at for at, y in zip(shown["x"], shown["y"], strict=True) if y is None] == [249_500]
    assert len(shown["x"]) == len(times) + 1


@SEEN
def test_drift_labels_overlap_neither_each_other_nor_the_edge(site: Site) -> None:
    page = site.open("/jobs/fraud")
    found = page.evaluate(
        MODULE
        + """
        const marks = [1, 2, 3, 50, 52, 98, 99].map(atS => ({ atS, text: `payments-${atS}` }));
        marks.push({ atS: 99.5, text: "a-stream-with-a-name".repeat(20) });
        const ruler = document.createElement("canvas").getContext("2d");
        ruler.font = `11px ${getComputedStyle(document.body).fontFamily}`;
        const { labels } = await load("charts.js");
        const placed = labels(marks, { fromS: 0, toS: 100 }, { width: 400, height: 150 });
        return placed.map(({ x, y, text }) => ({
          from: x / 250, to: x / 250 + ruler.measureText(text).width, y }));
        }"""
    )

    assert len(found) > 4
    assert all(each["from"] >= 0 and each["to"] <= 400 for each in found), found
    for one in found:
        for other in found:
            apart = one["to"] <= other["from"] or other["to"] <= one["from"]
            assert one is other or apart or one["y"] != other["y"]


def test_operator_submits_changes_and_stops_a_job(site: Site) -> None:
    page = site.open(key=site.service.operator)
    page.get_by_role("link", name="Submit a job").click()
    text = page.get_by_role("textbox", name="Job file")
    text.fill(FILE.replace("group_size: 4", "group_size: -4"))
    page.get_by_role("button", name="Submit").click()
    mistake = page.get_by_role("alert", name="What is wrong").get_by_role("listitem")
    expect(mistake).to_have_text("Line 8 group_size: must be at least 1, got -4")
    expect(page.locator(".editor .wrong")).to_have_text("8")
    mistake.get_by_role("button").click()
    assert page.evaluate("getSelection().toString()") == "group_size: -4"

    text.fill(FILE)
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", name="letters", level=1)).to_be_visible()

    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".badge")).to_have_text("paused")
    page.get_by_role("button", name="Change").click()
    page.get_by_label("K, batches per update").fill("6")
    page.get_by_label("Learning rate").fill("0.004")
    page.get_by_label("Reason").fill("larger steps")
    page.get_by_role("button", name="Change", exact=True).click()
    expect(page.locator(".log")).to_contain_text("group size is 6, learning rate is 0.004. larger")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".badge")).to_have_text("waiting for a coordinator")
    site.service.hold("letters", "the task raises: mend it")
    expect(page.locator(".badge")).to_have_text("held")
    log = page.locator(".log")
    for line in (
        "Submitted by olga (operator).",
        "Paused by olga (operator)",
        "Changed by olga (operator): group size is 6",
        "Resumed by olga (operator)",
        "Held by coordinator: the task raises: mend it",
    ):
        expect(log).to_contain_text(line)
    page.get_by_role("link", name="newest").click()
    expect(page.locator(".actions")).to_contain_text("It does not exist yet.")
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Stop it").click()
    expect(page.locator(".badge")).to_have_text("stopped")
    answer = site.get("/v1/jobs/letters")
    assert (answer["wanted"], answer["spec"]["group_size"], answer["spec"]["batch_size"]) == (
        *("stopped", 6),
        64,
    )
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete it").click()
    expect(page.get_by_role("link", name="fraud")).to_be_visible()  # the list
    expect(page.get_by_role("link", name="letters")).to_be_hidden()
    assert "letters" not in [each["id"] for each in site.get("/v1/jobs")["jobs"]]


@SEEN
def test_dead_letters_are_listed_by_reason(site: Site) -> None:
    for offset, reason in ((17, HOSTILE), (18, "too short"), (19, "too short")):
        skipped = Skipped("payments-eu", 0, offset, reason)
        site.service.dead_letter(encode_dead_letter("clicks", skipped, offset, b"?"))
    page = site.open("/jobs/clicks")

    page.get_by_text("Dead letters by reason").click()

    rows = page.locator(".dead-letters tbody tr")
    expect(rows.nth(0)).to_contain_text("too short")
    expect(rows.nth(0)).to_contain_text("0@19, 0@18")
    expect(rows.nth(1)).to_contain_text(HOSTILE)


@SEEN
def test_model_can_be_downloaded(site: Site) -> None:
    site.service.leave_model("fraud")
    page = site.open("/jobs/fraud")
    with page.expect_download() as download:
        page.get_by_role("link", name="newest").click()
    weights, about = unpack(Path(download.value.path()).read_bytes())
    assert download.value.suggested_filename.endswith(".safetensors")
    assert about["job"] == "fraud"
    assert weights


@SEEN
def test_viewer_sees_no_buttons_for_changes(site: Site) -> None:
    page = site.open("/jobs/fraud")
    expect(page.get_by_role("link", name="newest")).to_be_visible()
    for name in ("Pause", "Change", "Stop", "Delete"):
        expect(page.get_by_role("button", name=name)).to_be_hidden()
    page.goto(f"{site.address}/#/")
    page.get_by_role("link", name="fraud").wait_for()
    expect(page.get_by_role("link", name="Submit a job")).to_be_hidden()


def test_page_of_another_site_cannot_use_the_key_of_the_browser(
    site: Site,
) -> None:
    page = site.open("/jobs/orders", key=site.service.operator)
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    elsewhere = site.address.replace("127.0.0.1", "localhost")  # another origin to a browser
    page.goto(f"{elsewhere}/healthz")

    with page.expect_response(lambda answer: answer.url.endswith("/requeue")) as refused:
        page.evaluate(
            """url => { const form = Object.assign(document.createElement("form"),
              { method: "post", enctype: "text/plain", action: url });
              document.body.append(form); form.submit(); }""",
            f"{site.address}/v1/jobs/orders/requeue",
        )

    assert refused.value.status == 403


def make_done(name: str, now_s: float) -> World:
    """A job that was stopped long ago."""
    done = make_world(name, now_s, seed=5, rented=False)
    record = replace(done.record, wanted="stopped", reason="enough")
    return World(record, updates=done.updates[:300])


def poison(offset: int) -> Batch:
    spans = (Span("payments-eu", 0, offset * 256, (offset + 1) * 256),)
    return Batch(offset, WorkerId("w1"), spans, 256)


def make_held(name: str, now_s: float) -> World:
    """A job with a task that fails on the first three batches."""
    why = "3 batches in a row were quarantined: KeyError: 'label'"
    record = make_record(name, now_s, "paused", why, rented=False)
    detail = "Traceback (most recent call last):\n  ...\nKeyError: 'label'"
    quarantined = [Quarantined(0, poison(offset), "poison: KeyError") for offset in range(3)]
    happened: list[AuditRecord] = [Lead(-1, GENESIS, "c1", 0), *quarantined]
    return World(
        replace(record, held=True, detail=detail),
        updates=[(now_s - 60.0, each) for each in happened],
    )


def fields(plan: Planned) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__struct_fields__}
