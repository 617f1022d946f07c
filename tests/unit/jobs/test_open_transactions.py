"""A transaction is left open: records behind it count as lag, and the state names it."""

from __future__ import annotations

from contextlib import closing

import pytest
from msgspec.structs import replace

from common.core.spans import Partition
from common.jobs.progress import QUIET_S, JobObservation, JobProgress
from common.jobs.store import by_stream
from common.jobs.watching import Looker, ObservedJob, one_by_one
from common.kafka.port import NewTopic
from common.redis.memory import MemoryBoards, MemoryRedis
from common.telemetry.logging import event_logger
from tests.unit.admin.live.helpers import HELD, STREAMS, HeldLog, job, lead, update
from tests.unit.jobs.test_progress import claim_of, leader_status, rows

FIRST = job().first
PLACE, OTHER = HELD, Partition("views", 1)
START = 1000.0
SENTENCE = "an open transaction at clicks[0]@120 holds back 1,010 offsets, for "


def drained() -> JobProgress:
    """Return a job whose readable records are settled, up to offset 120 of the first partition."""
    view = JobProgress(job())
    view.feed_update(0, lead(), 0.0, 0.0)
    for offset, each in enumerate(rows(2)):
        view.claims.feed(offset, claim_of(each))
    view.feed_update(1, update(0, 1, *rows(2)), START - QUIET_S, START - QUIET_S)
    return view


def look(view: JobProgress, at_s: float, stable: int, high: int, **others: int) -> None:
    """Poll the streams. `stable` and `high` are ends of `PLACE`, `other` is the end of `OTHER`."""
    ends = {**FIRST, PLACE: high, OTHER: others.get("other", FIRST[OTHER])}
    known = {**FIRST, PLACE: stable, OTHER: FIRST[OTHER]}
    view.look(
        JobObservation(at_s, {"w1": "alive"}, leader_status(), led=True, ends=ends, stable=known)
    )


@pytest.mark.parametrize(
    ("stood_s", "expected"),
    [
        (10.0, "10 seconds"),
        (119.9, "119 seconds"),
        (120.0, "2 minutes"),
        (239.0, "3 minutes"),
    ],
)
def test_job_behind_an_open_transaction_is_degraded_with_its_duration(
    stood_s: float, expected: str
) -> None:
    view = drained()
    look(view, START, 120, 130)
    look(view, START + stood_s, 120, 1130)
    assert view.lag == 1010
    assert view.state(START + stood_s) == ("degraded", SENTENCE + expected)


def test_transaction_open_for_less_than_ten_seconds_is_not_reported() -> None:
    view = drained()
    look(view, START, 120, 1130)
    assert view.lag == 1010
    for stood_s in (0.0, 9.0):
        state = view.state(START + stood_s)
        assert state.word == "waiting for records"
        assert state.why == (
            "an update needs 2 batches of 10 records; 0 batches and 0 records are waiting;"
            " not readable yet: 1,010 offsets"
        )


def test_consecutive_transactions_are_not_reported() -> None:
    view = drained()
    for second in range(60):
        look(view, START + second, 120 + 10 * second, 125 + 10 * second)
        assert view.state(START + second).word != "degraded"
    look(view, START + 60, 120, 120)
    assert view.state(START + 60).word == "drained"


def test_open_transaction_that_ends_is_no_longer_reported() -> None:
    view = drained()
    look(view, START, 120, 130)
    look(view, START + 20, 130, 130)
    assert view.open_transactions_s(START + 20) == {"clicks": 0.0, "views": 0.0}
    look(view, START + 21, 130, 140)
    look(view, START + 30, 130, 140)
    assert view.state(START + 30).word != "degraded"
    assert view.open_transactions_s(START + 30) == {"clicks": 9.0, "views": 0.0}


def test_transaction_on_two_partitions_names_both_and_is_timed_by_stream() -> None:
    view = drained()
    look(view, START, 120, 130)
    look(view, START + 5, 120, 130, other=FIRST[OTHER] + 1)
    look(view, START + 15, 120, 130, other=FIRST[OTHER] + 1)
    assert view.state(START + 15).why == (
        "an open transaction at clicks[0]@120 holds back 10 offsets, for 15 seconds;"
        " an open transaction at views[1]@100 holds back 1 offset, for 10 seconds"
    )
    assert view.open_transactions_s(START + 15) == {"clicks": 15.0, "views": 10.0}


def test_open_transaction_on_many_partitions_is_summarized_in_one_line() -> None:
    view = drained()
    places = {Partition("clicks", index): 120 for index in range(200)}
    for at_s in (START, START + 10):
        seen = JobObservation(
            at_s, {"w1": "alive"}, leader_status(), led=True, stable={**FIRST, **places}
        )
        view.look(seen._replace(ends={**FIRST, **dict.fromkeys(places, 130)}))
    why = view.state(START + 10).why
    assert why.startswith("an open transaction at clicks[0]@120 holds back 10 offsets, ")
    assert why.endswith("; 197 more partitions")


def test_open_transaction_is_reported_beside_other_problems() -> None:
    view = drained()
    look(view, START, 120, 1130)
    look(view, START + 30, 120, 1130)
    view.look(view.seen._replace(unable={"worker w3": "no room"}))
    assert view.state(START + 30) == ("degraded", f"{SENTENCE}30 seconds; worker w3: no room")


def test_unreadable_records_alone_do_not_wait_for_workers() -> None:
    view = drained()
    look(view, START, 120, 1130)
    look(view, START + 30, 120, 1130)
    view.look(view.seen._replace(statuses={}))
    assert view.state(START + 30).word == "degraded"
    look(view, START + 31, 125, 1130)
    view.look(view.seen._replace(statuses={}))
    assert view.state(START + 31) == (
        "waiting for workers",
        "5 records wait and no worker runs",
    )


def test_open_transactions_become_unknown_without_kafka() -> None:
    view = drained()
    look(view, START, 120, 1130)
    view.look(JobObservation(START + 5))
    assert view.open_transactions_s(START + 5) == {"clicks": 5.0, "views": 0.0}
    view.look(JobObservation(START + 60, {"w1": "alive"}, leader_status(), led=True))
    assert view.open_transactions_s(START + 60) == {}
    assert view.state(START + 60).word == "running"
    look(view, START + 70, 120, 1130)
    assert view.state(START + 70).why == f"{SENTENCE}70 seconds"


# --- the observation ------------------------------------------------------------------------------


def test_observation_has_stable_and_last_offset_of_each_partition() -> None:
    log = HeldLog()
    log.create_topics([NewTopic(stream, 2) for stream in STREAMS])
    record = replace(job(), positions=by_stream(dict.fromkeys(FIRST, 0)))
    with closing(MemoryBoards(MemoryRedis()).board(record.id)) as board:
        looker = Looker(lambda: log, one_by_one, event_logger(__name__))
        (seen,) = looker.look([ObservedJob(record, board)], START, 0.0)
    assert seen.stable == dict.fromkeys(FIRST, 0)
    assert seen.ends == {**dict.fromkeys(FIRST, 0), PLACE: 7}
