"""A job's follower: its data, its reports, and recovery from faults."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from common.core.messages import GENESIS, Drifted, Evaluated, ModelId, WorkerId
from common.core.spans import Partition
from common.errors import UnavailableError
from common.jobs.job_file import parse_job
from common.jobs.progress import JobProgress
from common.jobs.watching import one_by_one
from common.kafka import names as topics
from common.kafka.memory import MemoryLog
from common.kafka.port import NewRecord
from common.redis.memory import MemoryBoard, MemoryRedis
from common.spot.provisioning.records import Ended, LaunchRequested, ProvisionerLead, Started
from services.admin.live.answers import curves_answer, updates_page, workers_answer
from services.admin.live.followers import Followers, JobFollower, Sources
from tests.unit.admin.live.helpers import JOB, SPEC, Topics, eventually, job, lead, update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.jobs.progress import JobObservation, Numbers
    from common.jobs.store import JobRecord

UPDATES = Partition(topics.updates_topic(JOB), 0)


class Rig:
    """A job in memory, and its follower."""

    def __init__(self) -> None:
        # Seconds that the service's clock is ahead of the tests' clock.
        self.ahead_s = 0.0
        self.log = MemoryLog()
        self.redis = MemoryRedis()
        self.topics = Topics(self.log)
        self.board = MemoryBoard(self.redis, JOB)
        self.jobs: dict[str, JobRecord] = {JOB: job()}
        self.sources = Sources(
            lambda: self.log,
            lambda name: MemoryBoard(self.redis, name),
            one_by_one,
            lambda: self.jobs,
            lambda: time.time() + self.ahead_s,
        )
        self.followers = Followers(self.sources, threading.Event())
        self.loop = asyncio.new_event_loop()
        self._read = 0

    def numbers(self) -> Numbers:
        """Return the numbers of the last summary."""
        summary = self.follower.summary
        assert summary is not None
        assert summary.numbers is not None
        return summary.numbers

    @cached_property
    def follower(self) -> JobFollower:
        """Return the job's follower, with a stream of events that is open."""
        follower = self.followers.of(JOB)
        follower.feed.listen(self.loop, asyncio.Event())
        return follower

    def begin(self) -> JobFollower:
        """Follow the job, and wait until everything is known."""
        eventually(lambda: self.follower.ready)
        return self.follower

    def progress(self) -> Any:  # noqa: ANN401 -- JSON
        """Return the progress as the API reports it."""
        return json.loads(self.follower.job_json())["progress"]

    def next_events(self) -> list[tuple[str, Any]]:
        """Return the events since the last call."""
        found = self.follower.feed.since(self._read)
        assert found is not None
        data, self._read = found
        events = list[tuple[str, Any]]()
        for event in data.decode().split("\n\n")[:-1]:
            _, name, line = event.split("\n")
            events.append((name.removeprefix("event: "), json.loads(line.removeprefix("data: "))))
        return events

    def next_named(self, name: str) -> Any:  # noqa: ANN401 -- JSON
        """Return the data of the next event of this name."""
        found = list[Any]()

        def came() -> bool:
            found.extend(data for each, data in self.next_events() if each == name)
            return bool(found)

        eventually(came)
        return found[0]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.followers.close()
    made.loop.close()


def test_summary_is_recomputed_only_if_it_may_differ(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, looks = list[float](), list[float]()
    numbers, look = JobProgress.numbers, JobProgress.look

    def numbers_of(job: JobProgress, now: float) -> Numbers:
        made.append(now)
        return numbers(job, now)

    def look_at(job: JobProgress, seen: JobObservation) -> bool:
        looks.append(seen.at_s)
        return look(job, seen)

    monkeypatch.setattr(JobProgress, "numbers", numbers_of)
    monkeypatch.setattr(JobProgress, "look", look_at)

    def rests() -> bool:
        """Return True if the next four polls make no summary."""
        begun, before = len(looks), len(made)
        eventually(lambda: len(looks) > begun + 3 or len(made) > before)
        return len(made) == before

    rig.begin()
    eventually(rests)
    rig.topics.audit(lead(), update(0, 1))
    eventually(lambda: rig.numbers().version == 1)
    # The rate falls as time passes.
    assert rig.numbers().updates_per_s
    rig.ahead_s = 100.0
    eventually(lambda: rig.numbers().updates_per_s == 0)
    eventually(rests)
    rig.board.beat(WorkerId("w1"), "alive", 1e9)
    eventually(lambda: rig.numbers().workers == 1)


def test_earlier_updates_are_known_and_not_published(rig: Rig) -> None:
    rig.topics.audit(lead(), *(update(0, version) for version in range(1, 1301)))
    follower = rig.begin()
    with follower.view() as view:
        assert view.job.version == 1300
    assert follower.feed.end == 0
    assert rig.progress()["version"] == 1300


def test_new_updates_are_published_with_count_and_newest_version(rig: Rig) -> None:
    rig.begin()
    rig.topics.audit(lead(), *(update(0, version) for version in range(1, 51)))
    count, version = 0, 0
    while version < 50:
        data = rig.next_named("update")
        count, version = count + data["count"], data["version"]
    assert count == 50
    assert data["metrics"] == {"accuracy": 0.25}
    assert data["at_s"] == pytest.approx(time.time(), abs=60)


def test_evaluation_is_published_if_its_version_counts(rig: Rig) -> None:
    before = Evaluated(ModelId(0, 1), 7.0, 100, {"accuracy": 0.5})
    rig.topics.audit(lead(), update(0, 1), before)
    rig.begin()
    assert rig.progress()["evaluation"]["test"] == {"accuracy": 0.5}
    rig.topics.audit(
        # No leader made this version.
        Evaluated(ModelId(0, 9), 8.0, 100, {"accuracy": 0.1}),
        update(0, 2),
        Evaluated(ModelId(0, 2), 9.0, 100, {"accuracy": 0.9}, {"clicks": {"accuracy": 0.8}}),
        Drifted(ModelId(0, 2), 9.5, "clicks", 0.1, 0.4),
    )
    seen = list[tuple[str, Any]]()

    def all_seen() -> bool:
        seen.extend(rig.next_events())
        return "drift" in dict(seen)

    eventually(all_seen)
    data = {"version": 2, "epoch": 0, "at_s": 9.0, "records": 100, "test": {"accuracy": 0.9}}
    data["prequential"] = {"clicks": {"accuracy": 0.8}}
    drift = {"stream": "clicks", "version": 2, "at_s": 9.5, "before": 0.1, "after": 0.4}
    assert [each for each in seen if each[0] in ("evaluation", "drift")] == [
        ("evaluation", data),
        ("drift", drift),
    ]
    assert rig.progress()["evaluation"]["prequential"] == {"clicks": {"accuracy": 0.8}}


def test_evaluation_of_the_initial_weights_is_published(rig: Rig) -> None:
    rig.begin()
    rig.topics.audit(lead(), Evaluated(GENESIS, 1.0, 100, {"accuracy": 0.1}), update(0, 1))
    data = rig.next_named("evaluation")
    assert (data["version"], data["epoch"], data["test"]) == (0, -1, {"accuracy": 0.1})
    # The follower continues.
    eventually(lambda: rig.progress()["version"] == 1)


def test_takeover_publishes_the_job_again(rig: Rig) -> None:
    rig.topics.audit(lead(), update(0, 1), update(0, 2))
    rig.begin()
    rig.topics.audit(lead(0, ModelId(0, 1), "other", 3))
    assert rig.next_named("job")["progress"]["version"] == 1


def test_worker_status_changes_are_published(rig: Rig) -> None:
    rig.board.beat(WorkerId("w1"), "alive", 60.0)
    rig.begin()
    rig.board.beat(WorkerId("w2"), "alive", 60.0)
    data = rig.next_named("member")
    assert (data["worker"], data["status"]) == ("w2", "alive")
    rig.board.beat(WorkerId("w2"), "leaving", 60.0)
    assert rig.next_named("member")["status"] == "leaving"
    rig.board.close()
    assert rig.next_named("member")["status"] == "gone"


def test_failure_of_a_worker_is_published_once_with_its_reason(rig: Rig) -> None:
    rig.board.put_unable("worker w0", "ended before anybody watched", 60.0)
    rig.begin()
    rig.board.put_unable("worker w1", "died of SIGSEGV", 60.0)
    rig.board.put_unable("evaluator e1", "no data", 60.0)
    data = rig.next_named("member")
    found = [data["worker"], data["status"], data["reason"]]
    assert found == ["w1", "failed", "died of SIGSEGV"]
    rig.board.put_unable("worker w1", "died of SIGSEGV", 60.0)
    rig.board.beat(WorkerId("w1"), "alive", 60.0)
    assert rig.next_named("member")["status"] == "alive"


def test_follower_reads_a_plans_topic_created_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.admin.live.followers.PLANS_S", 0.01)
    text = SPEC + "provisioning: {workers: 2}\n"
    rig.jobs = {JOB: replace(rig.jobs[JOB], spec=parse_job(text))}
    follower = rig.begin()
    rig.topics.plan(
        ProvisionerLead(-1, "p", 1.0),
        LaunchRequested(0, 1, 2.0, 0, "spot", "m1"),
        Started(0, 1, 3.0, "i-1"),
        # No leader has this term.
        Ended(7, 1, 4.0, "lost"),
    )
    eventually(lambda: _running(follower) == 1)
    rig.topics.plan(Ended(0, 1, 5.0, "preempted", "taken back"))
    data = rig.next_named("machine")
    while data["state"] != "ended":
        data = rig.next_named("machine")
    assert (data["worker"], data["cause"], data["slot"]) == ("m1", "preempted", 0)
    with follower.view() as view:
        [life] = curves_answer(view.job, view.ledger, 9.0).lives
    assert (life.from_s, life.to_s, life.cause) == (3.0, 5.0, "preempted")


def _running(follower: JobFollower) -> int:
    with follower.view() as view:
        return len(view.ledger.running)


def test_machine_without_heartbeats_is_silent(rig: Rig) -> None:
    rig.topics.plan(
        ProvisionerLead(-1, "p", 1.0),
        LaunchRequested(0, 1, 2.0, 3, "spot", "m1"),
        Started(0, 1, 3.0, "i-1"),
    )
    rig.board.beat(WorkerId("by-hand"), "alive", 60.0)
    with rig.begin().view() as view:
        workers = {each.name: each for each in workers_answer(view.job, view.ledger, 9.0).workers}
    assert (workers["m1"].status, workers["m1"].slot, workers["m1"].since_s) == ("silent", 3, 3.0)
    assert (workers["by-hand"].status, workers["by-hand"].slot) == ("alive", None)


def test_change_of_the_job_is_published(rig: Rig) -> None:
    rig.begin()
    rig.jobs = {JOB: replace(rig.jobs[JOB], wanted="paused", reason="prices are high")}
    data = rig.next_named("job")
    assert (data["wanted"], data["reason"]) == ("paused", "prices are high")


def test_known_state_remains_during_a_kafka_outage_and_updates_follow(rig: Rig) -> None:
    rig.topics.audit(lead(), update(0, 1))
    rig.begin()
    rig.log.go_away()
    eventually(lambda: rig.progress()["version"] == 1)
    rig.log.come_back()
    rig.topics.audit(update(0, 2))
    eventually(lambda: rig.progress()["version"] == 2)


def test_check_raises_until_kafka_answers(rig: Rig) -> None:
    rig.log.go_away()
    with pytest.raises(UnavailableError, match=r"simulates an unavailable broker|still being read"):
        rig.follower.check()
    rig.log.come_back()
    eventually(lambda: rig.follower.ready)
    rig.follower.check()


def test_updates_are_published_while_redis_is_unavailable(rig: Rig) -> None:
    rig.board.hold_lease("c", 60.0)
    rig.begin()
    assert rig.progress()["led"] is True
    rig.redis.kill()
    eventually(lambda: rig.progress()["led"] is None)
    rig.topics.audit(lead(), update(0, 1))
    assert rig.next_named("update")["version"] == 1
    with rig.follower.view() as view:
        assert workers_answer(view.job, view.ledger, 1.0).board_away
    rig.redis.restart()
    eventually(lambda: rig.progress()["led"] is False)


def test_topic_that_lost_its_beginning_is_read_again(rig: Rig) -> None:
    rig.topics.audit(lead(), *(update(0, version) for version in range(1, 6)))
    rig.begin()
    rig.log.go_away()
    eventually(lambda: "unavailable" in rig.follower._away)  # noqa: SLF001 -- no records are read now
    rig.log.come_back()
    with rig.log.anyway():
        for version in range(6, 9):
            rig.log.append(NewRecord(UPDATES.topic, _encoded(version), partition=0))
        rig.log.expire(UPDATES, 8)
    eventually(lambda: rig.progress()["version"] == 8)
    with rig.follower.view() as view:
        assert updates_page(view.job, 0, 10).newest == 8


def test_recreated_topic_is_read_again_whatever_its_length(rig: Rig) -> None:
    rig.topics.audit(lead(), *(update(0, version) for version in range(1, 4)))
    rig.begin()
    eventually(lambda: rig.progress()["version"] == 3)
    rig.log.recreate(UPDATES.topic)
    rig.topics.audit(lead(), *(update(0, version) for version in range(1, 8)))
    eventually(lambda: rig.progress()["version"] == 7)
    with rig.follower.view() as view:
        assert len(updates_page(view.job, 0, 10).updates) == 7


def _encoded(version: int) -> bytes:
    from common.wire.messages import encode_audit  # noqa: PLC0415 -- of this test alone

    return encode_audit(update(0, version))


def test_garbage_is_skipped(rig: Rig) -> None:
    rig.topics.audit(lead())
    with rig.log.anyway():
        rig.log.append(NewRecord(UPDATES.topic, b"\xff{", partition=0))
        rig.log.append(NewRecord(UPDATES.topic, None, partition=0))
    rig.topics.audit(update(0, 1))
    rig.begin()
    assert rig.progress()["version"] == 1


def test_record_of_a_later_format_is_reported(rig: Rig) -> None:
    with rig.log.anyway():
        later = b'{"type":"update-applied","format":2}'
        rig.log.append(NewRecord(UPDATES.topic, later, partition=0))
    eventually(lambda: rig.follower.ended_s is not None)
    with pytest.raises(UnavailableError, match="run a newer version of doll"):
        rig.follower.check()


def test_deleted_job_is_no_longer_followed(rig: Rig) -> None:
    follower = rig.begin()
    rig.jobs = {}
    eventually(lambda: follower.ended_s is not None)
    assert follower.feed.closed
    with pytest.raises(UnavailableError, match="it was deleted"):
        follower.check()


def test_unwatched_job_is_followed_without_publishing(rig: Rig) -> None:
    rig.followers.start()
    rig.topics.audit(lead(), update(0, 1))
    record = rig.jobs[JOB]

    def version() -> int:
        numbers = rig.followers.summary(record).numbers
        return -1 if numbers is None else numbers.version

    eventually(lambda: version() == 1)
    rig.topics.audit(update(0, 2))
    eventually(lambda: version() == 2)
    feed = rig.follower.feed
    # The feed counts the update as an event.
    assert feed.end == 1
    # A client that reconnects starts afresh.
    assert feed.since(0) is None


def test_deleted_topic_is_read_again_once_it_is_back(rig: Rig) -> None:
    rig.topics.audit(lead(), update(0, 1), update(0, 2))
    rig.begin()
    with rig.log.anyway():
        rig.log.delete_topics([UPDATES.topic])
    eventually(lambda: "there is no" in rig.follower._away)  # noqa: SLF001
    Topics(rig.log).audit(lead(), update(0, 1))
    eventually(lambda: rig.progress()["version"] == 1)


def test_initial_version_is_no_update(rig: Rig) -> None:
    rig.topics.audit(lead(-1, GENESIS))
    rig.begin()
    data = rig.progress()
    assert (data["version"], data["loss"], data["updates_per_s"]) == (0, None, None)
