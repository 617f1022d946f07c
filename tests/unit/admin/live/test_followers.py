"""A process follows some jobs, and a request waits until its job is followed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from common.core.messages import WorkerId
from common.core.spans import Partition
from common.errors import NotFoundError, OutsideError, UnavailableError
from common.jobs.progress import UNREAD
from common.jobs.watching import one_by_one
from common.kafka.memory import MemoryLog
from common.redis.memory import MemoryBoard, MemoryRedis
from services.admin.live.followers import Followers, Sources
from tests.unit.admin.live.helpers import (
    JOB,
    HeldLog,
    Topics,
    eventually,
    happens,
    job,
    lead,
    update,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from common.jobs.store import JobRecord
    from common.kafka.port import FoundTopic
    from common.redis.port import Board, LiveStatus


class Rig:
    """Two jobs in memory, one of them stopped, and their followers."""

    def __init__(self, log: MemoryLog | None = None) -> None:
        self.log = MemoryLog() if log is None else log
        self.redis = MemoryRedis()
        self.jobs: dict[str, JobRecord] = {JOB: job(), "old": job("stopped", "old")}
        for name in self.jobs:
            Topics(self.log, name)
        self.looks = list[int]()
        self.before = set(threading.enumerate())
        self.ending = threading.Event()
        self.sources = Sources(
            lambda: self.log,
            lambda name: MemoryBoard(self.redis, name),
            self.live_statuses,
            lambda: self.jobs,
            time.time,
        )
        self.followers = Followers(self.sources, self.ending)

    def live_statuses(self, boards: Sequence[Board]) -> list[LiveStatus | Exception]:
        """Poll boards, and count the polls."""
        self.looks.append(len(boards))
        return one_by_one(boards)

    def followed(self) -> set[str]:
        """Return the followed jobs."""
        return set(self.followers._followers)  # noqa: SLF001


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.followers.close()
    assert set(threading.enumerate()) <= made.before


def test_running_jobs_are_followed_from_the_start_and_no_others(rig: Rig) -> None:
    rig.followers.start()
    eventually(lambda: rig.followed() == {JOB})
    Topics(rig.log, "new")
    rig.jobs = {**rig.jobs, "new": job(name="new")}
    eventually(lambda: rig.followed() == {JOB, "new"})


def test_request_starts_following_a_job(rig: Rig) -> None:
    follower = asyncio.run(rig.followers.ready("old"))
    assert follower.ready
    assert follower is rig.followers.of("old")
    assert "old" in rig.followed()


def test_request_for_an_unknown_job_raises(rig: Rig) -> None:
    with pytest.raises(NotFoundError, match='there is no job "other"'):
        rig.followers.of("other")


def test_request_raises_if_the_job_is_not_read_in_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.admin.live.followers.READY_S", 0.05)
    rig.log.go_away()
    with pytest.raises(UnavailableError, match=f'not all of the job "{JOB}" is known'):
        asyncio.run(rig.followers.ready(JOB))
    rig.log.come_back()


def test_idle_followers_are_dropped_unless_their_job_runs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.admin.live.followers.IDLE_S", 0.0)
    followers = rig.followers
    old, running = followers.of("old"), followers.of(JOB)
    eventually(lambda: old.ended_s is not None)
    assert running.ended_s is None
    assert followers.of("old") is not old


def test_open_event_stream_keeps_its_job_followed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.admin.live.followers.IDLE_S", 0.3)
    followers = rig.followers

    async def listen() -> None:
        follower = followers.of("old")
        other = followers.of(JOB)
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        follower.feed.listen(loop, news)
        rig.jobs = {**rig.jobs, JOB: job("stopped")}
        # This one has no subscribers.
        await happens(lambda: other.ended_s is not None)
        assert follower.ended_s is None
        follower.feed.unlisten(news)
        await happens(lambda: follower.ended_s is not None)

    asyncio.run(listen())


def test_deleted_job_is_forgotten(rig: Rig) -> None:
    follower = rig.followers.of(JOB)
    rig.jobs = {}
    eventually(lambda: follower.ended_s is not None)
    with pytest.raises(NotFoundError):
        rig.followers.of(JOB)


def test_deleted_job_with_pending_news_leaves_no_state(rig: Rig) -> None:
    follower = rig.followers.of(JOB)
    eventually(lambda: follower.ready)
    rig.jobs = {}
    rig.followers.receive(follower)
    eventually(lambda: follower.ended_s is not None)
    eventually(lambda: not rig.followers._woken)  # noqa: SLF001


def test_failed_follower_does_not_keep_the_thread_busy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Counter[str]()
    for name in ("_sweep", "_await_news"):
        made = getattr(Followers, name)

        def counted(self: Followers, name: str = name, made: Any = made) -> None:  # noqa: ANN401
            passes[name] += 1
            made(self)

        monkeypatch.setattr(Followers, name, counted)
    follower = rig.followers.of("old")
    eventually(lambda: follower.ready)
    # It fails again, as if it still had to open its topics.
    follower.due_s = 0.0
    follower.guarded(_fail)
    passes.clear()
    eventually(lambda: passes["_sweep"] == 6)
    assert passes["_await_news"] < 100


def test_failed_follower_is_replaced(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.admin.live.followers.FAILED_S", 0.0)
    follower = rig.followers.of("old")
    rig.followers._followers["old"].guarded(_fail)  # noqa: SLF001
    eventually(lambda: follower.ended_s is not None)
    eventually(lambda: rig.followers.of("old") is not follower)


def _fail() -> None:
    raise ValueError("a fault of ours")


def test_shutdown_ends_all_event_streams_and_threads(rig: Rig) -> None:
    followers = [rig.followers.of(name) for name in rig.jobs]
    rig.ending.set()
    eventually(lambda: all(follower.feed.closed for follower in followers))
    rig.followers.close()
    assert set(threading.enumerate()) <= rig.before
    with pytest.raises(UnavailableError, match="shutting down"):
        rig.followers.of(JOB)


def test_paused_jobs_are_read_once_and_then_cost_no_poll_and_no_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.admin.live.followers.FILL_S", 0.0)
    for number in range(50):
        name = f"paused-{number}"
        Topics(rig.log, name)
        rig.jobs[name] = job("paused", name)
    rig.followers.start()
    eventually(lambda: len(rig.followers._resting) == 50)  # noqa: SLF001
    eventually(lambda: len(set(threading.enumerate()) - rig.before) == 1)
    rig.looks.clear()
    eventually(lambda: len(rig.looks) > 3)
    assert rig.followed() == {JOB}
    assert set(rig.looks) == {1}


def test_records_that_a_paused_job_loses_to_retention_are_shown(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.admin.live.followers.FILL_S", 0.0)
    monkeypatch.setattr("services.admin.live.followers.RESTING_S", 0.0)
    rig.jobs = {"paused": job("paused", "paused")}
    topics = Topics(rig.log, "paused")
    rig.followers.start()

    def expired() -> int | None:
        numbers = dict(rig.followers.shown())["paused"].numbers
        return None if numbers is None else numbers.expired

    eventually(lambda: expired() == 0)
    topics.arrive("clicks", 130)
    rig.log.expire(Partition("clicks", 0), 120)
    # The job begins at offset 100, so 20 of the 120 deleted records expired for it.
    eventually(lambda: expired() == 20)


def test_numbers_of_a_paused_job_are_read_once_for_a_list(rig: Rig) -> None:
    rig.jobs["paused"] = record = job("paused", "paused")
    Topics(rig.log, "paused").audit(lead(), update(0, 1), update(0, 2))

    asyncio.run(rig.followers.known([record]))
    summary = rig.followers.summary(record)

    assert summary.state.word == "paused"
    assert summary.numbers is not None
    assert summary.numbers.version == 2
    assert "paused" not in rig.followed()
    rig.log.go_away()
    # The numbers are in memory.
    asyncio.run(rig.followers.known([record]))
    assert rig.followers.summary(record) == summary
    rig.log.come_back()


def test_list_shows_a_resumed_job_as_running_before_its_follower_does(rig: Rig) -> None:
    running = rig.jobs[JOB]
    asyncio.run(rig.followers.ready(JOB))
    rig.jobs = {**rig.jobs, JOB: job("paused")}
    follower = rig.followers.of(JOB)
    eventually(lambda: follower.summary is not None and follower.summary.state.word == "paused")

    state = rig.followers.summary(running).state

    assert state.word == "waiting for a coordinator"


def test_list_during_an_outage_has_no_numbers_until_kafka_recovers(rig: Rig) -> None:
    Topics(rig.log, "paused")
    rig.jobs["paused"] = record = job("paused", "paused")
    rig.log.go_away()
    asyncio.run(rig.followers.known([record, rig.jobs[JOB]]))
    assert rig.followers.summary(record).numbers is None
    assert rig.followers.summary(rig.jobs[JOB]).state is UNREAD
    rig.log.come_back()

    def is_known() -> bool:
        asyncio.run(rig.followers.known([record]))
        return rig.followers.summary(record).numbers is not None

    eventually(is_known)


def test_age_of_an_open_transaction_is_known_for_running_and_paused_jobs() -> None:
    rig = Rig(HeldLog())
    rig.jobs["paused"] = job("paused", "paused")
    Topics(rig.log, "paused").audit(lead(), update(0, 1))
    rig.followers.start()

    def ages(name: str) -> dict[str, float]:
        return dict(rig.followers.summary(rig.jobs[name]).open_transactions_s)

    eventually(lambda: ages(JOB).get("clicks", 0.0) > 0.0)
    eventually(lambda: ages("paused").get("clicks", 0.0) > 0.0)
    assert ages(JOB)["views"] == ages("paused")["views"] == 0.0
    rig.followers.close()


def test_polls_without_news_leave_the_list_unchanged(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = list[str]()
    follower = rig.followers.of(JOB)
    eventually(lambda: follower.ready)
    monkeypatch.setattr(rig.followers.listing, "change", changed.append)
    rig.looks.clear()
    eventually(lambda: len(rig.looks) > 3)
    assert changed == []

    MemoryBoard(rig.redis, JOB).beat(WorkerId("w1"), "alive", 1e9)

    eventually(lambda: changed == [JOB])


class RefusingLog(MemoryLog):
    """A log that refuses to describe a topic."""

    def describe(self, topics: Collection[str]) -> dict[str, FoundTopic]:
        """Describe topics, or raise if the refused one is among them."""
        if f"doll.{JOB}.control" in topics:
            raise OutsideError("Topic authorization failed")
        return super().describe(topics)


def test_refused_topics_of_one_job_do_not_affect_another() -> None:
    rig = Rig(RefusingLog())
    Topics(rig.log, "other")
    rig.jobs["other"] = job(name="other")
    rig.followers.start()
    eventually(lambda: rig.followers.of("other").ready)
    eventually(lambda: rig.followers.of(JOB).ended_s is not None)
    with pytest.raises(UnavailableError, match="authorization failed"):
        rig.followers.of(JOB).check()
    rig.followers.close()
