"""A coordinator's metrics and traces match its decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from common.core import events
from common.core.messages import Failed, MetricSum, ModelId, Synchrony, UpdateApplied
from common.jobs.job_file import parse_job
from common.telemetry.metrics.coordinator import (
    MOST_METRICS,
    MOST_WORKERS,
    RECENT_GRADIENTS,
    CoordinatorMetrics,
    RecentGradient,
    StreamFigures,
    by_worker,
)
from services.coordinator import metrics_observer as measuring
from services.coordinator.metrics_observer import MetricsObserver
from tests.fakes.tracing import MemoryTracer
from tests.unit.cli.test_job import JOB
from tests.unit.core.bench import QUIET, Bench
from tests.unit.core.examples import A, B, P, answer, gradient, ready, span

if TYPE_CHECKING:
    from common.core.commands import CoordinatorCommand
    from common.core.events import CoordinatorEvent
    from common.core.messages import BatchReady
    from common.core.settings import CoordinatorSettings

NAME = "digits"
BEGAN_S = 1_700_000_000.0


class Measured(Bench):
    """A measured coordinator on a bench; a command takes a second, a decision no time.

    Args:
        settings: Settings of the job.
        tracer: Receiver of the spans.
    """

    def __init__(
        self, settings: CoordinatorSettings = QUIET, tracer: MemoryTracer | None = None
    ) -> None:
        super().__init__(settings)
        self.at_s = BEGAN_S
        self.metrics = CoordinatorMetrics()
        self.tracer = tracer or MemoryTracer()
        self.measuring = MetricsObserver(parse_job(JOB), self.metrics, self.tracer)

    def feed(self, event: CoordinatorEvent) -> tuple[CoordinatorCommand, ...]:
        """Process an event as the loop does."""
        self.measuring.observe(event, self.at_s)
        commands = super().feed(event)
        for command in commands:
            begin_s, self.at_s = self.at_s, self.at_s + 1.0
            self.measuring.done(command, begin_s, self.at_s)
        if self.machine.leader is not None:
            self.measuring.decided(self.machine.leader.ledger)
        return commands

    def sample(self, name: str, **labels: str) -> float | None:
        """Return the sample of `doll_<name>`, or None if there is no such series."""
        return self.metrics.registry.get_sample_value(f"doll_{name}", labels)

    def arrive(self, first_s: float, last_s: float) -> BatchReady:
        """Let A claim the next records, which arrived in this time."""
        start = self.leader_status.claimed[P]
        claim = msgspec.structs.replace(
            ready(A, span(P, start, start + 10)), first_arrival_s=first_s, last_arrival_s=last_s
        )
        self.read_control(claim)
        return claim


def leading(settings: CoordinatorSettings = QUIET, tracer: MemoryTracer | None = None) -> Measured:
    """Return a leader that sees A and B."""
    bench = Measured(settings, tracer)
    bench.lead()
    bench.see(A, B)
    return bench


# --- rounds ----------------------------------------------------------------------------------


def test_round_time_is_reported_by_stage() -> None:
    # commands add │ add │ apply │ audit │ model │ trigger │ ... 10 s ... │ status │ trigger
    # stages   ─gradients│────── apply ──────────│ wait: 0
    bench = leading()
    bench.announce(A, B, A, B)
    bench.compute()
    # The stage ends when the last gradient arrives.
    assert bench.sample("round_seconds_sum", stage="gradients") == 1.0
    assert bench.sample("round_seconds_sum", stage="apply") == 3.0
    assert bench.sample("round_seconds_sum", stage="wait") == 0.0
    bench.compute()
    bench.at_s += 10.0
    bench.announce(A, B)
    assert bench.sample("round_seconds_count", stage="apply") == 2.0
    assert bench.sample("round_seconds_count", stage="wait") == 2.0
    # Besides the 10 s, one second is for a leader status that is written before the trigger.
    assert bench.sample("round_seconds_sum", stage="wait") == 11.0


def test_update_is_reported_with_its_batches_records_and_results() -> None:
    bench = leading()
    bench.announce(A, B)
    bench.compute()
    bench.read_updates()
    assert bench.sample("updates_total") == 1.0
    assert bench.sample("update_batches_total") == 2.0
    assert bench.sample("update_records_total") == 20.0
    assert bench.sample("model_version") == 1.0
    assert bench.sample("loss") == 2.0
    assert bench.sample("training_metric", metric="right") == 1.0
    assert bench.sample("short_updates_total", why="linger") == 0.0
    assert bench.measuring.gradient_s == pytest.approx(0.1)


def test_number_of_training_metric_series_is_limited() -> None:
    bench = leading()
    bench.announce(A, B)
    many = {f"m{number:03}": MetricSum(1.0, 1) for number in range(500)}
    replies = tuple(
        msgspec.structs.replace(answer(order, bench.model), metric_sums=many)
        for order in bench.orders
    )
    bench.feed(events.RepliesRead(replies))
    names = [f"m{number:03}" for number in range(500)]
    assert sum(bench.sample("training_metric", metric=n) is not None for n in names) == MOST_METRICS


def test_short_update_is_reported_with_its_reason() -> None:
    bench = leading(replace(QUIET, group_linger_s=1.0))
    bench.announce(A)
    bench.tick(2.0)
    bench.compute()
    bench.tick(4.0)
    assert bench.sample("short_updates_total", why="linger") == 1.0
    assert bench.sample("update_batches_total") == 1.0


def test_reassigned_batch_counts_as_redispatched_and_has_one_wait_span() -> None:
    bench = leading()
    bench.announce(A, B)
    assert bench.sample("batches_redispatched_total") == 0.0
    # Worker B is dead.
    bench.see(A)
    bench.feed(events.RepliesRead((answer(bench.orders[0], bench.model),)))
    assert bench.sample("batches_redispatched_total") == 1.0
    assert len(bench.tracer.named("batch.wait")) == 2


def test_record_age_is_that_of_the_newest_record_of_each_batch() -> None:
    bench = leading()
    bench.arrive(BEGAN_S - 60.0, BEGAN_S - 50.0)
    # Kafka reports no times for these records.
    bench.arrive(0.0, 0.0)
    bench.compute()
    assert bench.sample("record_age_seconds_count") == 1.0
    assert bench.sample("record_age_seconds_sum") == bench.at_s - (BEGAN_S - 50.0)


def test_oldest_claims_beyond_the_limit_have_no_record_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "MOST_CLAIMS", 1)
    bench = leading()
    bench.arrive(BEGAN_S, BEGAN_S)
    bench.arrive(BEGAN_S, BEGAN_S)
    bench.compute()
    assert bench.sample("updates_total") == 1.0
    assert bench.sample("record_age_seconds_count") == 1.0


# --- claims and gradients that do not count ------------------------------------------------------


def test_claims_are_counted_as_accepted_or_refused() -> None:
    bench = leading()
    claim = ready(A, span(P, 0, 10))
    bench.read_control(claim, claim, None, ready(B, span(P, 10, 20)))
    assert bench.sample("claims_accepted_total") == 2.0
    assert bench.sample("claims_refused_total") == 2.0


def test_gradient_staleness_is_reported_whether_or_not_it_counts() -> None:
    bench = leading()
    bench.announce(A, B)
    orders, model = bench.orders, bench.model
    bench.feed(events.RepliesRead((answer(orders[0], model), answer(orders[0], model))))
    assert bench.sample("gradient_staleness_versions_bucket", counted="no", le="0.0") == 1.0
    bench.feed(events.RepliesRead((answer(orders[1], model),)))
    # The gradient now belongs to the previous version.
    bench.feed(events.RepliesRead((answer(orders[1], model),)))
    assert bench.sample("gradient_staleness_versions_sum", counted="no") == 1.0
    assert bench.sample("gradient_staleness_versions_count", counted="yes") == 2.0
    ghost = gradient(A, ModelId(-1, 0), ())
    bench.feed(events.RepliesRead((ghost,)))
    assert bench.sample("gradient_staleness_versions_count", counted="no") == 2.0
    assert bench.sample("replies_refused_total", kind="gradient") == 3.0


def test_failure_counts_as_refused_only_after_its_round_is_over() -> None:
    bench = leading()
    bench.announce(A, B)
    failed = Failed(A, bench.model, (0,), "unreadable")
    bench.feed(events.RepliesRead((failed,)))
    assert bench.sample("replies_refused_total", kind="failed") == 0.0
    bench.compute()
    bench.see(A)
    bench.compute()
    bench.feed(events.RepliesRead((failed,)))
    assert bench.sample("replies_refused_total", kind="failed") == 1.0


def test_quarantined_batch_is_reported_with_its_reason() -> None:
    bench = leading()
    bench.announce(A, B)
    bench.feed(events.RepliesRead((Failed(A, bench.model, (0,), "expired"),)))
    assert bench.sample("batches_quarantined_total", reason="expired") == 1.0
    assert bench.sample("batches_quarantined_total", reason="poison") == 0.0


# --- which replica reports -----------------------------------------------------------------------

OF_A_LEADER = ("epoch", "model_version", "batches_waiting", "workers_live", "loss", "job_paused")


def test_former_leader_reports_no_metrics_of_a_leader() -> None:
    bench = leading()
    assert bench.sample("leading") == 1.0
    bench.announce(A, B, A)
    bench.compute()
    figures = StreamFigures({"s": 30}, {"s": 0}, 1.0, 0.5, 0.25)
    assert bench.measuring.saw_streams(bench.epoch, figures)
    assert bench.sample("stream_records_total", stream="s") == 30.0
    epoch = bench.epoch
    bench.feed(events.LeaseAnswered(held=False))
    assert bench.sample("leading") == 0.0
    assert {name: bench.sample(name) for name in OF_A_LEADER} == dict.fromkeys(OF_A_LEADER)
    assert bench.sample("training_metric", metric="right") is None
    assert not bench.measuring.saw_streams(epoch, figures), "its watch may still run"
    assert bench.sample("stream_records_total", stream="s") is None
    assert bench.sample("stability_ratio", bound="necessary") is None
    assert bench.sample("updates_total") == 1.0


def test_synchronisation_mode_and_its_switches_are_reported() -> None:
    bench = leading()
    bench.announce(A, B)
    bench.compute()
    assert bench.sample("synchronisation", mode="synchronous") == 1.0
    # No rule or tuner changes K, so it is the job's own.
    assert bench.sample("group_size_batches") == 1.0
    for synchrony in (Synchrony(4, staleness=2), Synchrony(8, staleness=1)):
        update = UpdateApplied(0, 2, (), 1, 2.0, base=0, synchrony=synchrony)
        bench.measuring.updated(update)
    assert bench.sample("synchronisation", mode="synchronous") is None
    assert bench.sample("synchronisation", mode="stale") == 1.0
    assert bench.sample("group_size_batches") == 8.0
    assert bench.sample("synchronisation_switches_total") == 1.0


def test_worker_metrics_show_speed_and_share_in_a_limited_number_of_series() -> None:
    bench = leading()
    bench.announce(A, B)
    bench.compute()
    for worker in (A, B):
        assert bench.sample("worker_batches_per_second", worker=worker) == pytest.approx(10.0)
        assert bench.sample("worker_batches_ratio", worker=worker) == 0.5
    recent = [RecentGradient(f"w{n}", 1, 0.1) for n in range(RECENT_GRADIENTS)]
    figures = by_worker([*recent, RecentGradient("w7", 3, 0.3)])
    assert len(figures) == MOST_WORKERS
    assert figures["w7"].batches_per_s == pytest.approx(10.0)
    assert figures["w7"].share == 4 / (RECENT_GRADIENTS + 3)


def test_leader_reports_its_state() -> None:
    bench = leading()
    bench.announce(A, B, A)
    bench.tick(bench.now + 1.0)
    assert {name: bench.sample(name) for name in OF_A_LEADER} == {
        "epoch": 0.0,
        "model_version": 0.0,
        "batches_waiting": 3.0,
        "workers_live": 2.0,
        "loss": None,  # there was no update
        "job_paused": 0.0,
    }


def test_replica_that_leads_again_continues_its_counters() -> None:
    bench = leading()
    bench.announce(A, B)
    bench.compute()
    bench.feed(events.LeaseAnswered(held=False))
    bench.lead()
    # The leader's snapshot is the genesis, so it counts both claims once more.
    bench.read_control()
    assert bench.sample("claims_accepted_total") == 4.0
    assert bench.sample("epoch") == 3.0


def test_held_job_is_reported_by_the_replica_that_held_it_until_resumed() -> None:
    bench = leading()
    bench.feed(events.HoldRequired("a log is shorter than it was"))
    assert (bench.sample("job_held"), bench.sample("leading")) == (1.0, 0.0)
    # The replica receives its own record.
    bench.feed(events.WantedChanged("paused"))
    assert bench.sample("job_held") == 1.0
    bench.feed(events.WantedChanged("running"))
    assert bench.sample("job_held") is None


def test_paused_job_is_reported_as_paused_and_not_held() -> None:
    bench = leading()
    bench.feed(events.WantedChanged("paused"))
    assert (bench.sample("job_paused"), bench.sample("job_held")) == (1.0, 0.0)
    bench.feed(events.WantedChanged("running"))
    assert bench.sample("job_paused") == 0.0
