"""The pure parts of the demo: its plan, its market and its output."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from common.core.messages import (
    Batch,
    UpdateApplied,
    WorkerId,
)
from common.core.spans import Span
from common.errors import UserError
from common.jobs.job_file import parse_job
from common.spot.market.market_file import Market
from services.cli import exits
from services.cli.demo.judge import mean_accuracy
from services.cli.demo.plan import DemoPlan, Preemption
from services.cli.demo.summary import Account, DemoBill, DemoSummary, draw, sparkline, thinned
from tests.unit.cli.conftest import World

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "digits.yaml"


def update(version: int, epoch: int = 0, accuracy: float = 0.5, samples: int = 10) -> UpdateApplied:
    batch = Batch(version, WorkerId("w1"), (Span("a", 0, version, version + 1),), samples)
    return UpdateApplied(epoch, version, (batch,), samples, 1.0, {"accuracy": accuracy})


def summary(
    lost: int = 0, flaws: tuple[str, ...] = (), bill: DemoBill | None = None
) -> DemoSummary:
    return DemoSummary(
        job="demo",
        account=Account(100, 100 - lost, 0, 0, 0, lost, 0),
        flaws=flaws,
        updates=1,
        test_accuracy=0.987654,
        prequential_accuracy_at_end=0.98,
        samples_per_s=1000.0,
        workers=3,
        preemptions=1,
        pause_after_preemption_s=None,
        bill=bill,
    )


def bill(*, in_time: bool) -> DemoBill:
    ended = "stopped after 2 updates"
    return DemoBill(
        *(ended, in_time, 2, 9.5, 10.0, 0.001234567, 0.01, 0.1234567, 0.002, -0.38),
        *(1, ("submitted",), 2, 2, 0.05, 0.3),
    )


def drawn(summary: DemoSummary) -> str:
    console = Console(width=100, record=True, file=StringIO())
    console.print(draw(summary))
    return console.export_text()


def test_preemption_of_the_demo_kills_and_restarts_once() -> None:
    # sent  0 ── 49 │ 50 ──────────────── 100
    # at    0     1 │ 2      6.9 │ 7        9
    #               └ kill       └ restart
    preemption = Preemption(after=50, away_s=5.0)
    asked = [(0, 0.0), (49, 1.0), (50, 2.0), (60, 3.0), (90, 6.9), (95, 7.0), (100, 9.0)]
    due = [preemption.due(sent, now) for sent, now in asked]
    assert due == [None, None, "kill", None, None, "restart", None]
    assert preemption.over


def test_demo_job_can_be_submitted() -> None:
    plan = DemoPlan("demo-1", records=100, rate_per_s=10.0, workers=3, seed=7, away_s=1.0)
    spec = plan.job()
    assert spec.name == "demo-1"
    assert spec.streams == ("demo-1-a", "demo-1-b")
    assert spec.seed == 7


def test_demo_with_provisioning_has_a_deadline_and_a_readable_market(tmp_path: Path) -> None:
    plan = DemoPlan("demo-1", records=12_800, rate_per_s=1280.0, workers=4, seed=7, provision=True)
    spec = plan.job()
    assert spec.stop.updates == 100
    assert spec.stop.deadline_s == 23.2 == round(plan.deadline_s, 1)
    assert spec.provisioning is not None
    assert spec.provisioning.workers == 4
    assert plan.on_demand_only_usd == 4 * 10 / 3600 * 0.239
    path = tmp_path / "market.json"
    path.write_bytes(plan.market())
    market = Market.load(path)
    assert market.on_demand.usd_per_hour == 0.239
    assert [pool.name for pool in market.spot] == ["spot"]


def test_example_job_can_be_submitted() -> None:
    assert parse_job(EXAMPLE.read_text()).name == "digits"


def test_mean_accuracy_is_weighted_by_samples() -> None:
    updates = [update(1, accuracy=1.0, samples=30), update(2, accuracy=0.0, samples=10)]
    assert mean_accuracy(updates) == 0.75
    assert mean_accuracy([]) == 0.0


def test_sparkline_is_drawn_from_bottom_to_top() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"
    assert sparkline([]) == ""
    assert thinned([1.0, 3.0, 5.0], 2) == [1.0, 4.0]


def test_demo_summary_has_the_names_that_scripts_expect() -> None:
    data = json.loads(json.dumps(summary().as_data()))
    assert data["test_accuracy"] == 0.9877
    assert (data["records_produced"], data["records_trained"]) == (100, 100)
    assert (data["records_lost"], data["records_duplicated"]) == (0, 0)


def test_demo_is_sound_only_without_losses_and_flaws() -> None:
    assert summary().sound
    assert not summary(lost=1).sound
    assert not summary(flaws=("gap: a[0]@1:2",)).sound


def test_demo_summary_includes_the_bill() -> None:
    found = summary(bill=bill(in_time=True))
    data = json.loads(json.dumps(found.as_data()))
    assert data["spent_usd"] == 0.001235
    assert data["in_time"]
    assert data["records_lost"] == 0
    assert "the deadline was met, and every record was used exactly once" in drawn(found)
    assert "the deadline was missed: stopped" in drawn(summary(bill=bill(in_time=False)))
    assert "NOT every record" in drawn(summary(lost=1, bill=bill(in_time=True)))
    assert "deadline" not in drawn(summary())


@pytest.mark.parametrize(
    ("given", "used"),
    [((), "kafka='' redis=''"), (("--kafka", "k:1"), "kafka='k:1' redis='redis://r:2'")],
)
def test_demo_uses_redis_of_the_environment_only_with_a_named_kafka(
    given: tuple[str, ...], used: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stack(_: object, *, kafka: str, redis: str) -> None:
        raise UserError(f"kafka={kafka!r} redis={redis!r}")

    monkeypatch.setattr("common.runtime.fork_server.prepare", lambda *_: None)
    monkeypatch.setattr("common.embedded.stack.EmbeddedStack", stack)
    monkeypatch.setenv("DOLL_REDIS", "redis://r:2")
    result = World().run(*given, "demo", "--out", str(tmp_path), code=exits.REFUSED)
    assert result.stderr == f"error: {used}\n"
