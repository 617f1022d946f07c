"""Arrivals, lag, and utilization of workers, computed from the ends of a job's logs."""

from __future__ import annotations

from contextlib import closing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core import commands as do
from common.core import events
from common.core.job_placement import JobDemand, WorkerPlacement
from common.core.liveness import TURN
from common.core.losses import Divergence
from common.core.messages import LeaderStatus, UpdateApplied
from common.core.snapshots import genesis
from common.core.spans import LogPosition, Partition
from common.jobs.job_file import parse_job
from common.kafka.memory import MemoryLog
from common.kafka.names import control_topic
from common.kafka.port import FoundTopic, NewTopic
from common.redis.memory import MemoryBoards, MemoryRedis
from common.telemetry.logging import event_logger
from common.telemetry.metrics.coordinator import CoordinatorMetrics
from common.telemetry.tracing import NoTracer
from services.coordinator.metrics_observer import MetricsObserver
from services.coordinator.needs import WINDOW_S, ArrivalMeter
from services.coordinator.streams import (
    LOOK_S,
    PUBLISH_S,
    SHARE,
    SURE_S,
    TURNS_TTL_S,
    StreamWatch,
    WatchedJob,
    by_stream,
    ratios,
)
from tests.fakes.clock import ManualClock
from tests.unit.cli.test_job import JOB

NAME, EPOCH = "digits", 7
A, B = Partition("clinic-a", 0), Partition("clinic-a", 1)
GONE = Partition("clinic-b", 0)


# --- numbers alone ---------------------------------------------------------------------------


def test_arrival_rate_is_averaged_over_the_last_minute() -> None:
    # at s       0    5   10   ...   60   65
    # records    0   50  100   ...  600  600      10/s, then nothing
    arrivals = ArrivalMeter()
    assert arrivals.add(0, 0.0) is None
    means = [arrivals.add(10 * at, float(at)) for at in range(5, 65, 5)]
    assert means == [10.0] * 12
    assert arrivals.add(600, 65.0) == pytest.approx(550 / WINDOW_S)
    assert arrivals.add(600, 1000.0) == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 1000)), min_size=1, max_size=60))
def test_mean_arrival_rate_is_between_zero_and_the_fastest_step(
    steps: list[tuple[float, int]],
) -> None:
    arrivals, now, total, fastest = ArrivalMeter(), 0.0, 0, 0.0
    arrivals.add(0, 0.0)
    for gap_s, records in steps:
        before = now
        now, total = now + gap_s, total + records
        fastest = max(fastest, records / (now - before) if now > before else float("inf"))
        mean = arrivals.add(total, now)
        assert mean is None or 0.0 <= mean <= fastest * (1 + 1e-9) + 1e-9


def test_stream_records_are_summed_by_stream_from_the_first_position() -> None:
    other = Partition("clinic-b", 0)
    first = {A: 100, B: 0, other: 5}
    assert by_stream(first, {A: 150, B: 7, other: 5}) == {"clinic-a": 57, "clinic-b": 0}
    assert by_stream(first, {A: 90}) == {"clinic-a": 0, "clinic-b": 0}


def test_stability_ratios_match_proposition_1() -> None:
    # 100 records/s, b = 10: 10 batches/s of 0.2 s each. A group of K = 8 arrives in 0.8 s, and each
    # of 4 workers computes 2 of its batches.
    sufficient, necessary = ratios(100.0, 4, (10, 8), 0.2)
    assert sufficient == pytest.approx(2.0)
    assert necessary == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("arrivals_per_s", "live", "gradient_s"),
    [(None, 4, 0.2), (0.0, 4, 0.2), (100.0, 0, 0.2), (100.0, 4, None), (100.0, 4, 0.0)],
)
def test_stability_ratio_with_unknown_input_is_none(
    arrivals_per_s: float | None, live: int, gradient_s: float | None
) -> None:
    assert ratios(arrivals_per_s, live, (10, 8), gradient_s) == (None, None)


# --- the watch -------------------------------------------------------------------------------


class Bench:
    """A leader's watch of a topic with two partitions."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.log.create_topics([NewTopic("clinic-a", 2), NewTopic(control_topic(NAME))])
        self.topic_id = self.log.describe(["clinic-a"])["clinic-a"].topic_id
        self.clock = ManualClock()
        self.metrics = CoordinatorMetrics()
        self.measuring = MetricsObserver(parse_job(JOB), self.metrics, NoTracer())
        self.redis = MemoryRedis(self.clock)
        self.boards = MemoryBoards(self.redis)
        self.roster = self.boards.roster()
        self.used_s = 0.0
        self.watch = StreamWatch(
            self.log, self.boards, event_logger("test"), self.clock, lambda: self.used_s
        )
        self.lost = list[str]()
        self.seen = list[events.StreamsSeen]()
        self.watch.follow(
            WatchedJob(
                NAME, EPOCH, {A: 0, B: 0}, self.measuring, self.lost.append, self.seen.append
            )
        )

    def lead(self, epoch: int = EPOCH) -> None:
        """Start a leadership in this process."""
        self.measuring.done(do.Begin(epoch, genesis({A: 0, B: 0})), 0.0, 0.0)

    def stand(self, claimed: int, live: int) -> None:
        """Write a leader status."""
        epoch = 0 if claimed else -1
        known = {A: LogPosition(claimed, self.topic_id, epoch), B: LogPosition(0, self.topic_id)}
        leader_status = LeaderStatus(EPOCH, 0, {A: claimed, B: 0}, 0, 0, live, {}, known=known)
        self.measuring.done(do.PutLeaderStatus(leader_status), 0.0, 0.0)

    def produce(self, records: int) -> None:
        """Let records arrive."""
        writer = self.log.writer()
        for _ in range(records):
            writer.append("clinic-a", b"", partition=0)
        assert writer.flush(1.0)

    def sample(self, name: str, **labels: str) -> float | None:
        """Return the sample of `doll_<name>`."""
        return self.metrics.registry.get_sample_value(f"doll_{name}", labels)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_watch_reports_arrivals_lag_and_stability(bench: Bench) -> None:
    bench.lead()
    bench.stand(claimed=0, live=2)
    bench.watch.turn()
    assert bench.sample("stream_records_total", stream="clinic-a") == 0.0
    bench.clock.advance(10.0)
    bench.produce(40)
    bench.watch.turn()
    assert bench.sample("stream_lag_records", stream="clinic-a") == 40.0
    assert bench.sample("stability_ratio", bound="sufficient") is None, "no gradient was reported"
    update = UpdateApplied(EPOCH, 1, (), 1, 0.0, gradient_s=0.1)
    bench.measuring.done(do.Apply(1, update, None), 0.0, 0.0)
    bench.stand(claimed=30, live=2)
    bench.watch.turn()
    assert bench.sample("stream_lag_records", stream="clinic-a") == 10.0
    assert bench.sample("stream_records_total", stream="clinic-a") == 40.0
    assert bench.sample("arrival_records_per_second") == pytest.approx(4.0)
    # b = 2, K = 1: 2 batches/s of 0.1 s
    assert bench.sample("stability_ratio", bound="sufficient") == pytest.approx(0.2)
    assert bench.sample("stability_ratio", bound="necessary") == pytest.approx(0.2)


def test_watch_reports_no_stream_metrics_while_kafka_is_unavailable(bench: Bench) -> None:
    bench.lead()
    bench.watch.turn()
    assert bench.sample("stream_records_total", stream="clinic-a") == 0.0
    bench.log.go_away()
    bench.watch.turn()
    assert bench.sample("stream_records_total", stream="clinic-a") is None
    bench.log.come_back()
    bench.produce(3)
    bench.watch.turn()
    assert bench.sample("stream_records_total", stream="clinic-a") == 3.0


def test_deleted_stream_of_one_job_does_not_affect_other_jobs(bench: Bench) -> None:
    metrics = CoordinatorMetrics()
    other = MetricsObserver(
        parse_job(JOB.replace("name: digits", "name: other")), metrics, NoTracer()
    )
    other.done(do.Begin(EPOCH, genesis({GONE: 0})), 0.0, 0.0)
    gone = list[str]()
    bench.watch.follow(WatchedJob("other", EPOCH, {GONE: 0}, other, gone.append, lambda _: None))
    bench.lead()
    bench.watch.turn()
    assert bench.sample("stream_records_total", stream="clinic-a") == 0.0
    assert metrics.leading is not None
    assert (
        metrics.registry.get_sample_value("doll_stream_records_total", {"stream": "clinic-a"})
        is None
    )
    assert gone == [], "one poll may be wrong"
    bench.clock.advance(60.0)
    bench.watch.turn()
    [reason] = gone
    assert "clinic-b of this job does not exist" in reason
    assert bench.lost == []


def test_stream_is_not_considered_deleted_while_kafka_is_unavailable(bench: Bench) -> None:
    bench.lead()
    bench.log.go_away()
    for _ in range(3):
        bench.clock.advance(60.0)
        bench.watch.turn()
    assert bench.lost == []


def test_stream_that_lost_records_is_reported_after_a_waiting_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # clinic-a[0]: 9 records, claimed up to 9; then it ends at 5, and is written on
    bench.lead()
    bench.produce(9)
    bench.stand(claimed=9, live=1)
    bench.watch.turn()
    assert (bench.seen[-1].diverged, bench.seen[-1].sure) == ({}, True)
    monkeypatch.setattr(bench.log, "agrees", lambda *_: {A: 5})
    bench.clock.advance(LOOK_S)
    bench.watch.turn()
    bench.clock.advance(SURE_S / 2)
    bench.produce(16)
    bench.watch.turn()
    assert (bench.seen[-1].diverged, bench.seen[-1].sure) == ({}, False), "this may be an election"
    bench.clock.advance(SURE_S / 2)
    bench.watch.turn()
    start = LogPosition(5, bench.topic_id, 0)
    assert bench.seen[-1].diverged == {A: Divergence(0, start, 25, recreated=False)}
    assert bench.seen[-1].sure
    assert bench.lost == [], "the leader decides"


def test_log_that_recovers_its_end_in_time_is_not_reported_as_shortened(bench: Bench) -> None:
    bench.lead()
    bench.produce(5)
    bench.stand(claimed=9, live=1)
    bench.watch.turn()
    bench.clock.advance(SURE_S / 2)
    bench.produce(4)
    bench.watch.turn()
    bench.clock.advance(SURE_S)
    bench.watch.turn()
    assert (bench.seen[-1].diverged, bench.seen[-1].sure) == ({}, True)


@pytest.mark.parametrize("records", [1, 9])
def test_recreated_stream_is_reported_whatever_its_length(bench: Bench, records: int) -> None:
    bench.lead()
    bench.produce(3)
    bench.stand(claimed=3, live=1)
    bench.watch.turn()
    bench.log.recreate("clinic-a")
    bench.produce(records)
    bench.clock.advance(LOOK_S)
    bench.watch.turn()
    start = LogPosition(0, bench.log.describe(["clinic-a"])["clinic-a"].topic_id)
    assert bench.seen[-1].diverged == {
        A: Divergence(0, start, records, recreated=True),
        B: Divergence(0, start, 0, recreated=True),
    }


def test_recreated_stream_without_recorded_topic_id_ends_the_leadership(
    bench: Bench,
) -> None:
    bench.topic_id = ""
    bench.lead()
    bench.stand(claimed=0, live=1)
    bench.watch.turn()
    bench.log.recreate("clinic-a")
    bench.clock.advance(LOOK_S)
    bench.watch.turn()
    [reason] = bench.lost
    assert "clinic-a was deleted and recreated" in reason
    assert "--from digits" in reason


def test_job_without_work_and_workers_is_polled_less_often(bench: Bench) -> None:
    # second   0      1      2
    # polls    yes    no     yes
    bench.lead()
    bench.stand(claimed=0, live=0)
    bench.watch.turn()
    bench.produce(9)
    bench.clock.advance(LOOK_S / 2)
    bench.watch.turn()
    assert bench.sample("stream_records_total", stream="clinic-a") == 0.0
    bench.clock.advance(LOOK_S / 2)
    bench.watch.turn()
    assert bench.sample("stream_records_total", stream="clinic-a") == 9.0
    bench.produce(1)
    # Now there is work, so every turn polls.
    bench.watch.turn()
    assert bench.sample("stream_records_total", stream="clinic-a") == 10.0


def test_polls_that_take_long_are_made_less_often(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, describe = list[float](), bench.log.describe

    def slow(topics: set[str]) -> dict[str, FoundTopic]:
        looks.append(bench.clock())
        bench.used_s += 4.5 * SHARE
        return describe(topics)

    monkeypatch.setattr(bench.log, "describe", slow)
    bench.lead()
    bench.stand(claimed=0, live=1)
    for _ in range(20):
        bench.watch.turn()
        bench.clock.advance(1.0)
    assert looks == [0.0, 5.0, 10.0, 15.0]


def test_forgotten_job_is_not_polled(bench: Bench) -> None:
    bench.lead()
    bench.watch.turn()
    bench.watch.forget(NAME)
    bench.produce(1)
    bench.watch.turn()
    assert bench.sample("stream_records_total", stream="clinic-a") == 0.0, "the job was forgotten"


def test_watch_publishes_the_demand_of_each_job_every_second(bench: Bench) -> None:
    bench.lead()
    assert bench.watch.turn() == PUBLISH_S
    # The claimed offsets are unknown yet.
    assert bench.roster.read() == []
    bench.stand(claimed=3, live=1)
    bench.produce(10)
    bench.watch.turn()
    [first] = bench.roster.read()
    bench.clock.advance(PUBLISH_S)
    # The last known ends are published again.
    bench.log.go_away()
    bench.watch.turn()
    [second] = bench.roster.read()

    assert isinstance(first, JobDemand)
    assert (first.job, first.backlog, first.most_workers, first.runs) == (NAME, 7, 2, True)
    assert second == msgspec.structs.replace(first, number=first.number + 1)


def test_demand_follows_the_group_size_in_force(bench: Bench) -> None:
    bench.lead()
    bench.measuring.spec = spec = bench.measuring.spec.model_copy(update={"group_size": 4})
    records = spec.batch_size
    bench.stand(claimed=0, live=0)
    bench.produce(records)
    backlogs = []
    for group_size in (spec.group_size, 1):
        # A rule or the tuner chose this K.
        bench.measuring.saw(busy=1.0, group_size=group_size)
        bench.watch.turn()
        backlogs += [each.backlog for each in bench.roster.read() if isinstance(each, JobDemand)]
        bench.clock.advance(PUBLISH_S)

    assert backlogs == [0, records]


def test_demand_of_a_paused_job_says_that_it_does_not_run(bench: Bench) -> None:
    bench.lead()
    bench.stand(claimed=3, live=1)
    bench.measuring.observe(events.WantedChanged("paused"), 0.0)
    bench.watch.turn()
    [demand] = bench.roster.read()

    assert isinstance(demand, JobDemand)
    assert not demand.runs


def test_job_without_workers_shows_which_job_has_them(bench: Bench) -> None:
    # worker       at b                   publishes nothing more
    # shown        the worker is at b     nothing
    bench.lead()
    bench.stand(claimed=3, live=0)
    bench.produce(10)
    task = bench.measuring.spec.task.name
    assert task is not None
    bench.roster.put([WorkerPlacement("w1", job="b", tasks=(task,))])
    bench.watch.turn()
    with closing(bench.boards.board(NAME)) as board:
        assert board.unable() == {TURN: "another job has its turn: the worker is working for `b`"}
        for _ in range(round(2 * TURNS_TTL_S)):
            bench.clock.advance(PUBLISH_S)
            bench.watch.turn()
        assert board.unable() == {}


def test_job_with_workers_or_without_records_does_not_report_waiting(bench: Bench) -> None:
    bench.lead()
    bench.roster.put([WorkerPlacement("w1", job="b")])
    for claimed, live in ((10, 0), (3, 1)):
        bench.stand(claimed, live)
        bench.produce(10 * live)
        bench.clock.advance(PUBLISH_S)
        bench.watch.turn()
    with closing(bench.boards.board(NAME)) as board:
        assert board.unable() == {}


def test_watch_continues_while_redis_is_unavailable(bench: Bench) -> None:
    bench.lead()
    bench.stand(claimed=3, live=1)
    bench.redis.kill()
    bench.produce(10)
    bench.watch.turn()
    assert bench.sample("stream_lag_records", stream="clinic-a") == 7.0
    bench.redis.restart()
    bench.watch.turn()
    assert len(bench.roster.read()) == 1


# --- partitions that are added ----------------------------------------------------------------


def test_partitions_added_to_a_stream_are_reported_and_counted_as_lag(
    bench: Bench,
) -> None:
    bench.lead()
    bench.stand(claimed=0, live=1)
    bench.watch.turn()
    added = Partition("clinic-a", 2)
    bench.log.add_partitions("clinic-a", 3)
    writer = bench.log.writer()
    writer.append("clinic-a", b"", partition=2)
    assert writer.flush(1.0)
    for _ in range(2):
        bench.clock.advance(LOOK_S)
        bench.watch.turn()
    assert [set(seen.partitions) for seen in bench.seen[-2:]] == [{A, B, added}] * 2
    assert bench.sample("stream_lag_records", stream="clinic-a") == 1.0

    claimed = {A: 0, B: 0, added: 1}
    bench.measuring.done(do.PutLeaderStatus(LeaderStatus(EPOCH, 1, claimed, 0, 0, 1, {})), 0.0, 0.0)
    bench.clock.advance(LOOK_S)
    bench.watch.turn()
    assert bench.sample("stream_lag_records", stream="clinic-a") == 0.0
