"""The jobs topic as a fold: what was submitted is there, once, whoever else writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common import topics
from common.core.spans import Partition
from common.errors import UserError, WireError
from common.job import parse_job
from common.jobs import JobBook, JobRecord, Origin, decode_job, encode_job, first_positions
from common.testing.clock import HandClock
from common.testing.log import MemoryLog
from tests.unit.test_job import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable

JOBS = Partition(topics.JOBS, 0)
ORIGIN = Origin("letters", 12, 400, "a1" * 32)
A, B = Partition("clinic-a", 0), Partition("clinic-b", 0)


@pytest.fixture
def log() -> MemoryLog:
    return with_streams(MemoryLog())


def with_streams(log: MemoryLog) -> MemoryLog:
    for stream in ("clinic-a", "clinic-b"):
        log.create_topic(stream, 1)
    return log


def write(log: MemoryLog, topic: str, value: bytes | None, key: bytes | None = None) -> None:
    writer = log.writer()
    writer.append(topic, value, key=key)
    assert writer.flush(1.0)


def test_a_submitted_job_is_there_for_everybody(log: MemoryLog) -> None:
    spec = parse_job(TEXT)
    record = JobRecord(spec, "running", {A: 0, B: 0}, "submitted", 1000.0)
    assert JobBook(log, clock=lambda: 1000.0).submit(spec) == record
    assert JobBook(log).read() == {"digits": record}


def test_a_submitted_job_has_its_topics(log: MemoryLog) -> None:
    JobBook(log).submit(parse_job(TEXT))
    for topic in ("doll.digits.control", "doll.digits.updates", "clinic-a.dlq", "clinic-b.dlq"):
        assert log.partitions(topic) == (Partition(topic, 0),)


def test_a_stream_that_is_not_there_is_named_and_nothing_is_made(log: MemoryLog) -> None:
    spec = parse_job(TEXT.replace("clinic-b", "clinic-x"))
    with pytest.raises(UserError, match=r'streams: there is no topic "clinic-x".*--create-part'):
        JobBook(log).submit(spec)
    assert JobBook(log).read() == {}


def test_a_name_in_use_is_refused_with_the_state_of_its_job(log: MemoryLog) -> None:
    book = JobBook(log)
    book.submit(parse_job(TEXT))
    with pytest.raises(UserError, match='the name "digits" belongs to a job that is running'):
        JobBook(log).submit(parse_job(TEXT))
    book.want("digits", "stopped", "done")
    with pytest.raises(UserError, match="a job that is stopped"):
        JobBook(log).submit(parse_job(TEXT))


def test_a_name_whose_history_outlived_its_record_is_refused(log: MemoryLog) -> None:
    log.create_topic("doll.digits.updates", 1)
    write(log, "doll.digits.updates", b"{}")
    with pytest.raises(UserError, match=r"doll.digits.updates holds records of an earlier job"):
        JobBook(log).submit(parse_job(TEXT))


def test_what_is_wanted_changes_with_its_reason(log: MemoryLog) -> None:
    book = JobBook(log)
    book.submit(parse_job(TEXT))
    book.want("digits", "paused", "prices are high")
    record = JobBook(log).get("digits")
    assert (record.wanted, record.reason) == ("paused", "prices are high")
    book.want("digits", "running", "prices are low")
    assert JobBook(log).get("digits").wanted == "running"


def test_a_stopped_job_goes_on_where_it_was(log: MemoryLog) -> None:
    book = JobBook(log)
    submitted = book.submit(parse_job(TEXT))
    book.want("digits", "stopped", "enough")
    assert book.want("digits", "running", "submitted") == submitted


def test_what_a_job_begins_with_stays_with_it(log: MemoryLog) -> None:
    book = JobBook(log)
    assert book.submit(parse_job(TEXT), ORIGIN).reason == "submitted, begins with letters@400"
    book.want("digits", "paused", "enough")
    assert JobBook(log).get("digits").origin == ORIGIN


def test_a_job_that_is_not_there_is_answered_with_those_that_are(log: MemoryLog) -> None:
    with pytest.raises(UserError, match="jobs: none yet, submit one"):
        JobBook(log).get("digit")
    JobBook(log).submit(parse_job(TEXT))
    with pytest.raises(UserError, match='there is no job "digit"; jobs: digits'):
        JobBook(log).want("digit", "paused", "")


def test_news_come_with_a_refresh(log: MemoryLog) -> None:
    watcher, writer = JobBook(log), JobBook(log)
    assert watcher.refresh(0.0) == {}
    writer.submit(parse_job(TEXT))
    assert watcher.refresh(0.0)["digits"].wanted == "running"
    writer.want("digits", "paused", "")
    assert watcher.refresh(0.0)["digits"].wanted == "paused"


def test_what_does_not_parse_is_counted_and_hurts_nobody(log: MemoryLog) -> None:
    JobBook(log).submit(parse_job(TEXT))
    for value in (b"", b"{", b"\xff", b'{"spec": {"name": "x"}, "wanted": "running", "first": []}'):
        write(log, topics.JOBS, value, key=b"x")
    book = JobBook(log)
    assert list(book.read()) == ["digits"]
    assert book.rejected == 4


def test_a_tombstone_takes_a_job_out(log: MemoryLog) -> None:
    book = JobBook(log)
    book.submit(parse_job(TEXT))
    write(log, topics.JOBS, None, key=b"digits")
    assert book.read() == {}


def test_compaction_changes_nothing(log: MemoryLog) -> None:
    book = JobBook(log)
    book.submit(parse_job(TEXT))
    book.want("digits", "paused", "first")
    book.want("digits", "running", "second")
    log.punch(JOBS, 0)
    log.punch(JOBS, 1)
    assert JobBook(log).read() == book.read()


def test_a_reader_whose_place_was_deleted_begins_anew(log: MemoryLog) -> None:
    late, book = JobBook(log), JobBook(log)
    assert late.read() == {}
    book.submit(parse_job(TEXT))
    book.want("digits", "paused", "")
    log.expire(JOBS, 1)
    assert late.read()["digits"].wanted == "paused"


class RacingLog(MemoryLog):
    """Lets somebody else act in the middle of a submission."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] | None = None

    def create_topic(
        self, topic: str, partitions: int, *, kept_forever: bool = False, compacted: bool = False
    ) -> None:
        """As ever, and then let the other act, once."""
        super().create_topic(topic, partitions, kept_forever=kept_forever, compacted=compacted)
        if topic == "clinic-b.dlq" and self.meanwhile:
            act, self.meanwhile = self.meanwhile, None
            act()


def test_two_who_submit_one_name_at_once_are_told_whose_counts() -> None:
    log = RacingLog()
    with_streams(log)
    other = parse_job(TEXT.replace("batch_size: 256", "batch_size: 8"))
    log.meanwhile = lambda: JobBook(log).submit(other)
    with pytest.raises(UserError, match=r"in the same moment.*yours counts"):
        JobBook(log).submit(parse_job(TEXT))
    assert JobBook(log).get("digits").spec.batch_size == 256


def test_a_job_begins_where_its_start_says(log: MemoryLog) -> None:
    clock = HandClock(1_000_000.0)
    log = with_streams(MemoryLog(clock))
    for _ in range(3):
        write(log, "clinic-a", b"record")
        clock.advance(60.0)
    log.expire(A, 1)
    at = {
        start: first_positions(parse_job(f"{TEXT}start_at: {start}\n"), log)
        for start in ("earliest", "latest", "1970-01-12T13:48:00Z")  # 120 s after the first
    }
    assert at == {
        "earliest": {A: 1, B: 0},
        "latest": {A: 3, B: 0},
        "1970-01-12T13:48:00Z": {A: 2, B: 0},
    }


def test_a_record_survives_the_wire() -> None:
    record = JobRecord(parse_job(TEXT), "paused", {A: 5, B: 7}, "why", 1000.5)
    assert decode_job(b"digits", encode_job(record)) == record
    assert b"origin" not in encode_job(record)
    record = record._replace(origin=ORIGIN)
    assert decode_job(b"digits", encode_job(record)) == record


@pytest.mark.parametrize(("old", "new"), [("a1" * 32, "../" * 3), ("400", "-1"), ("12", '"12"')])
def test_an_origin_that_makes_no_sense_is_refused(old: str, new: str) -> None:
    record = JobRecord(parse_job(TEXT), "running", {A: 0, B: 0}, "", 0.0, ORIGIN)
    value = encode_job(record).decode()
    origin = value[value.index('"origin"') :]
    with pytest.raises(WireError, match="origin"):
        decode_job(b"digits", value.replace(origin, origin.replace(old, new)).encode())


@pytest.mark.parametrize(
    ("key", "first", "message"),
    [
        (b"other", {A: 0, B: 0}, "stands under the key b'other', its name is 'digits'"),
        (None, {A: 0, B: 0}, "stands under the key None"),
        (b"digits", {A: 0}, "first positions are not those of its streams"),
        (b"digits", {A: 0, B: -1}, "first positions are not those of its streams"),
        (b"digits", {}, "first positions are not those of its streams"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(
    key: bytes | None, first: dict[Partition, int], message: str
) -> None:
    record = JobRecord(parse_job(TEXT), "running", first, "", 0.0)
    with pytest.raises(WireError) as caught:
        decode_job(key, encode_job(record))
    assert message in str(caught.value)
