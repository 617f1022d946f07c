"""The jobs topic as a fold: each submitted job is there once, despite concurrent writers."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from common.core.spans import LogPosition, Partition
from common.errors import (
    ConflictError,
    NotFoundError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
    UserError,
    WireError,
)
from common.jobs.changes import Change, NamedActor, local_user
from common.jobs.job_file import parse_job
from common.jobs.operations import EARLIER_KEPT, AfterLoss, JobOperations, first_positions
from common.jobs.store import (
    CHANGES_BYTES,
    CHANGES_KEPT,
    FreeName,
    JobRecord,
    StartCheckpoint,
    by_stream,
    decode_entry,
    encode_entry,
)
from common.kafka import names as topics
from common.kafka.memory import MemoryLog, MemoryTail, MemoryWriter
from common.kafka.port import LogRecord, NewRecord, NewTopic
from common.kafka.table import NUMBER
from common.telemetry.logging import fields_of
from tests.fakes.clock import ManualClock
from tests.unit.jobs.test_spec import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.messages import Wanted
    from common.jobs.edit import Value

JOBS = Partition(topics.JOBS, 0)
ORIGIN = StartCheckpoint("letters", 12, 400, "a1" * 32)
LONGEST = "t" * 245  # name of a stream
A, B = Partition("clinic-a", 0), Partition("clinic-b", 0)


def by_me(
    at_s: float,
    action: str,
    revision: int = 0,
    changed: dict[str, Value] | None = None,
    reason: str = "",
) -> Change:
    """Return a change by the operating system's user of this process, made with the CLI."""
    return Change(at_s, action, local_user().name, "cli", revision, changed or {}, reason)


@pytest.fixture
def log() -> MemoryLog:
    return with_streams(MemoryLog())


def with_streams(log: MemoryLog) -> MemoryLog:
    for stream in ("clinic-a", "clinic-b"):
        log.create_topics([NewTopic(stream)])
    return log


def write(
    log: MemoryLog, topic: str, value: bytes | None, key: bytes | None = None, number: int = 0
) -> None:
    writer = log.writer()
    writer.append(topic, value, key=key, headers=[(NUMBER, b"%d" % number)] if number else [])
    assert writer.flush(1.0)


def test_submitted_job_is_read_by_every_store(log: MemoryLog) -> None:
    spec = parse_job(TEXT)
    a, b = (each.topic_id for each in log.describe(["clinic-a", "clinic-b"]).values())
    known = {A: LogPosition(0, a), B: LogPosition(0, b)}
    record = JobRecord(spec, "running", by_stream(known), "submitted", 1000.0)
    submitted = JobOperations(log, clock=lambda: 1000.0).submit(spec)
    assert len(submitted.seal) == 32
    record = replace(record, seal=submitted.seal, changes=(by_me(1000.0, "submitted"),))
    assert submitted == record
    assert JobOperations(log).read() == {"digits": record}


def test_submit_creates_the_topics_of_the_job(log: MemoryLog) -> None:
    JobOperations(log).submit(parse_job(TEXT))
    for topic in ("doll.digits.control", "doll.digits.updates", "clinic-a.dlq", "clinic-b.dlq"):
        assert log.partitions(topic) == (Partition(topic, 0),)


def test_submit_with_a_missing_stream_is_rejected_and_creates_nothing(log: MemoryLog) -> None:
    spec = parse_job(TEXT.replace("clinic-b", "clinic-x"))
    with pytest.raises(UserError, match=r'streams: there is no topic "clinic-x".*--create-part'):
        JobOperations(log).submit(spec)
    assert JobOperations(log).read() == {}


def test_group_size_whose_update_exceeds_a_record_is_rejected(log: MemoryLog) -> None:
    large = TEXT.replace("group_size: 20", "group_size: 1000000")
    with pytest.raises(UserError, match=r"group_size: must be at most \d+, got 1000000"):
        JobOperations(log).submit(parse_job(large))
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    with pytest.raises(UserError, match=r"group_size: must be at most"):
        job_store.patch("digits", "more at once", changed={"group_size": 10**6})


def test_submit_with_too_many_partitions_is_rejected_and_creates_nothing() -> None:
    log = MemoryLog()
    log.create_topics([NewTopic(LONGEST, 2_800), NewTopic("clinic-b", 1)])
    with pytest.raises(UserError, match="with 2801 partitions, must have at most"):
        JobOperations(log).submit(parse_job(TEXT.replace("clinic-a", LONGEST)))
    assert JobOperations(log).read() == {}
    with pytest.raises(UnknownTopicError):
        log.partitions(topics.control_topic("digits"))


def test_hold_with_a_reason_of_any_length_fits_the_largest_job_record() -> None:
    log = MemoryLog()
    log.create_topics([NewTopic(LONGEST, 2_600), NewTopic("clinic-b", 1)])
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT.replace("clinic-a", LONGEST)))
    endless = "\x01" * 10**6  # JSON writes six bytes for each
    for number in range(CHANGES_KEPT + 1):
        job_store.patch("digits", endless, changed={"batch_size": 300 + number})
    assert job_store.hold(job_store.get("digits"), endless, endless).held
    changes = job_store.get("digits").changes
    assert len(msgspec.json.encode(changes)) <= CHANGES_BYTES
    assert [changes[0].action, changes[-1].action] == ["submitted", "held"]


def test_resume_after_loss_requires_a_held_job(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    with pytest.raises(ConflictError, match='the job "digits" is not held'):
        job_store.patch("digits", "resume", after_loss=AfterLoss())
    for times in (1, 2):
        job_store.hold(job_store.get("digits"), "records were lost")
        record = job_store.patch("digits", "resume", after_loss=AfterLoss(from_start=times == 2))
        assert (record.wanted, record.held, record.after_loss) == ("running", False, times)
    assert JobOperations(log).get("digits") == record
    assert record.from_start


def test_submit_with_a_name_in_use_is_rejected_with_the_state_of_its_job(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    with pytest.raises(ConflictError, match='there is already a job "digits", which is running'):
        JobOperations(log).submit(parse_job(TEXT))
    job_store.patch("digits", "done", wanted="stopped")
    with pytest.raises(ConflictError, match="which is stopped"):
        JobOperations(log).submit(parse_job(TEXT))


def test_submit_with_leftover_history_of_the_name_is_rejected(log: MemoryLog) -> None:
    log.create_topics([NewTopic("doll.digits.updates")])
    write(log, "doll.digits.updates", b"{}")
    with pytest.raises(ConflictError, match=r"doll.digits.updates has records of an earlier job"):
        JobOperations(log).submit(parse_job(TEXT))


@pytest.mark.parametrize("topic", ["doll.digits.control", "doll.digits.updates", topics.JOBS])
def test_submit_with_lossy_topic_settings_is_rejected_with_the_command(
    log: MemoryLog, topic: str
) -> None:
    """The topic exists already with the cluster's defaults, or with changed settings."""
    log.create_topics([NewTopic(topic)])
    log.configure(topic, {"cleanup.policy": "compact,delete"})
    job_store = JobOperations(log)
    with pytest.raises(ConflictError) as raised:
        job_store.submit(parse_job(TEXT))
    assert f"{topic} has retention.ms=604800000, not -1" in str(raised.value)
    assert f"--entity-name {topic} --add-config" in str(raised.value)
    assert job_store.read() == {}
    log.configure(
        topic, NewTopic(topic, kept_forever=True, compacted=topic == topics.JOBS).settings
    )
    assert job_store.submit(parse_job(TEXT)).wanted == "running"


def test_patch_of_wanted_sets_the_reason(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    job_store.patch("digits", "prices are high", wanted="paused")
    record = JobOperations(log).get("digits")
    assert (record.wanted, record.reason) == ("paused", "prices are high")
    job_store.patch("digits", "prices are low", wanted="running")
    assert JobOperations(log).get("digits").wanted == "running"


def test_resumed_job_equals_the_job_before_its_stop(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    submitted = job_store.submit(parse_job(TEXT))
    job_store.patch("digits", "enough", wanted="stopped")
    resumed = job_store.patch("digits", "submitted", wanted="running")
    assert replace(resumed, changes=submitted.changes) == submitted


def test_origin_is_kept_by_changes(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    assert job_store.submit(parse_job(TEXT), ORIGIN).reason == "submitted, begins with letters@400"
    job_store.patch("digits", "enough", wanted="paused")
    assert JobOperations(log).get("digits").origin == ORIGIN


def test_get_of_an_unknown_job_lists_the_existing_jobs(log: MemoryLog) -> None:
    with pytest.raises(NotFoundError, match="jobs: none yet; submit one"):
        JobOperations(log).get("digit")
    JobOperations(log).submit(parse_job(TEXT))
    with pytest.raises(NotFoundError, match='there is no job "digit"; jobs: digits'):
        JobOperations(log).patch("digit", "", wanted="paused")


def test_refresh_returns_the_latest_jobs(log: MemoryLog) -> None:
    watcher, writer = JobOperations(log), JobOperations(log)
    assert watcher.refresh(0.0) == {}
    writer.submit(parse_job(TEXT))
    assert watcher.refresh(0.0)["digits"].wanted == "running"
    assert watcher.refresh(0.0) is watcher.refresh(0.0)
    writer.patch("digits", "", wanted="paused")
    assert watcher.refresh(0.0)["digits"].wanted == "paused"


def test_unreadable_records_are_logged_and_change_no_job(
    log: MemoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    JobOperations(log).submit(parse_job(TEXT))
    half = b'{"spec": {"name": "x"}, "wanted": "running", "first": []}'
    for number, value in enumerate((b"", b"{", b"\xff", b"null", half), 2):
        write(log, topics.JOBS, value, b"digits", number)
    job_store = JobOperations(log)
    assert list(job_store.read()) == ["digits"]
    assert caplog.text.count("job_rejected") == 5


def test_unreadable_records_are_listed_with_offsets_until_replaced(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    write(log, topics.JOBS, b"{", b"digits", 2)
    write(log, topics.JOBS, b"[]", b"x", 1)
    write(log, topics.JOBS, b"[", b"x", 2)
    assert list(job_store.read()) == ["digits"]  # unchanged
    assert {name: found.offset for name, found in job_store.table.unreadable.items()} == {
        "digits": 1,
        "x": 3,
    }
    assert job_store.table.unreadable["x"].reason.startswith("job record: ")
    write(log, topics.JOBS, msgspec.json.encode(FreeName(2)), b"x", 3)
    job_store.patch("digits", "look at it", wanted="paused")
    assert job_store.table.unreadable == {}


def test_record_without_a_valid_number_changes_no_job(
    log: MemoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    job_store = JobOperations(log)
    known = job_store.submit(parse_job(TEXT))
    write(log, topics.JOBS, encode_entry(replace(known, wanted="stopped")), key=b"digits")
    write(log, topics.JOBS, None, key=b"digits")
    assert job_store.read() == {"digits": known}
    assert caplog.text.count("job_rejected") == 2
    assert JobOperations(log).read() == {"digits": known}


def test_reader_whose_position_was_deleted_reads_from_the_start(log: MemoryLog) -> None:
    late, job_store = JobOperations(log), JobOperations(log)
    assert late.read() == {}
    job_store.submit(parse_job(TEXT))
    job_store.patch("digits", "", wanted="paused")
    log.expire(JOBS, 1)
    assert late.read()["digits"].wanted == "paused"


@pytest.mark.parametrize("others", [0, 5])
def test_reader_of_a_recreated_topic_reads_from_the_start(log: MemoryLog, others: int) -> None:
    late, job_store = JobOperations(log), JobOperations(log)
    job_store.submit(parse_job(TEXT))
    job_store.patch("digits", "", wanted="paused")
    assert late.read()["digits"].wanted == "paused"
    log.recreate(JOBS.topic)
    for number in range(others):
        write(log, JOBS.topic, b"garbage", b"%d" % number)
    assert late.read()["digits"].wanted == "paused"
    assert late.table.missing == {"digits"}
    assert JobOperations(log).read() == {}


def test_refresh_never_returns_part_of_the_topic(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Jobs topic: 0: digits runs | 1 to 2000: tombstones of letters | 2001: digits is stopped |
    # 2002: another tombstone, which Kafka loses
    read, lost = MemoryTail.read, list[TruncatedError]()

    def read_or_fail(self: MemoryTail, max_records: int, timeout_s: float) -> list[LogRecord]:
        if lost:
            raise lost.pop()
        return read(self, max_records, timeout_s)

    monkeypatch.setattr(MemoryTail, "read", read_or_fail)
    watcher, job_store = JobOperations(log), JobOperations(log)
    job_store.submit(parse_job(TEXT))
    for _ in range(2000):
        write(log, topics.JOBS, None, key=b"letters")
    job_store.patch("digits", "", wanted="stopped")
    write(log, topics.JOBS, None, key=b"letters")
    assert watcher.refresh(0.0)["digits"].wanted == "stopped"
    lost.append(TruncatedError("a topic was cut", 2002))
    assert watcher.refresh(0.0)["digits"].wanted == "stopped"
    log.recreate(JOBS.topic)
    assert watcher.refresh(0.0)["digits"].wanted == "stopped"
    assert watcher.table.missing == {"digits"}


class RacingLog(MemoryLog):
    """A log in which another writer acts once, just before a record is appended to a topic."""

    def __init__(self, topic: str = topics.JOBS) -> None:
        super().__init__()
        self._topic = topic
        self.meanwhile: Callable[[], object] | None = None

    def append(self, record: NewRecord) -> int:
        """Append a record, after the other writer has appended its own."""
        if record.topic == self._topic and self.meanwhile:
            act, self.meanwhile = self.meanwhile, None
            act()
        return super().append(record)


def test_second_of_two_concurrent_submissions_of_a_name_is_rejected() -> None:
    log = RacingLog()
    with_streams(log)
    other = parse_job(TEXT.replace("batch_size: 256", "batch_size: 8"))
    log.meanwhile = lambda: JobOperations(log).submit(other)
    with pytest.raises(ConflictError, match="which is running"):
        JobOperations(log).submit(parse_job(TEXT))
    assert JobOperations(log).get("digits").spec.batch_size == 8


def test_concurrent_patches_are_merged() -> None:
    log = RacingLog()
    with_streams(log)
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    log.meanwhile = lambda: JobOperations(log).patch("digits", "theirs", changed={"group_size": 5})
    made = job_store.patch("digits", "mine", wanted="paused")
    assert made == JobOperations(log).get("digits") == job_store.get("digits")
    assert (made.wanted, made.reason, made.spec.group_size, made.revision) == (
        "paused",
        "mine",
        5,
        1,
    )
    log.meanwhile = lambda: JobOperations(log).patch("digits", "theirs", changed={"group_size": 6})
    made = job_store.patch("digits", "mine", changed={"batch_size": 8})
    assert (made.spec.group_size, made.spec.batch_size, made.revision) == (6, 8, 3)


def test_second_of_two_concurrent_patches_of_a_revision_is_rejected() -> None:
    log = RacingLog()
    with_streams(log)
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    log.meanwhile = lambda: JobOperations(log).patch(
        "digits", "theirs", changed={"group_size": 5}, revision=0
    )
    with pytest.raises(
        ConflictError, match='job "digits" is at revision 1, got 0; read the job again'
    ):
        job_store.patch("digits", "mine", changed={"batch_size": 8}, wanted="paused", revision=0)
    found = JobOperations(log).get("digits")
    assert (found.spec.group_size, found.spec.batch_size, found.wanted) == (5, 256, "running")


def test_patch_is_applied_completely_or_not_at_all(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    known = job_store.submit(parse_job(TEXT))
    with pytest.raises(ConflictError, match="is not held"):
        job_store.patch("digits", "why", changed={"group_size": 5}, after_loss=AfterLoss())
    assert job_store.get("digits") == known
    end = log.bounds(JOBS).end
    made = job_store.patch("digits", "why", changed={"group_size": 5}, wanted="paused")
    assert (made.wanted, made.reason, made.spec.group_size) == ("paused", "why", 5)
    assert log.bounds(JOBS).end == end + 1
    assert job_store.patch("digits", "again", changed={"group_size": 5}, wanted="paused") == made
    assert log.bounds(JOBS).end == end + 1


def test_stop_of_a_finished_job_changes_nothing(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    finished = job_store.finish("digits", "400 updates applied", 0)
    assert (finished.wanted, finished.finished) == ("stopped", True)
    assert (
        job_store.patch("digits", "enough", wanted="stopped") == job_store.get("digits") == finished
    )
    assert not job_store.patch("digits", "more", wanted="running").finished


def test_finish_of_a_changed_or_stopped_job_has_no_effect(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    changed = job_store.patch("digits", "", changed={"group_size": 5})
    with pytest.raises(ConflictError, match="is at revision 1, got 0"):
        job_store.finish("digits", "400 updates applied", 0)
    assert job_store.get("digits") == changed
    stopped = job_store.patch("digits", "enough", wanted="stopped")
    assert job_store.finish("digits", "400 updates applied", 0) == stopped


@pytest.mark.parametrize("wanted", ["paused", "stopped"])
def test_hold_of_a_paused_or_stopped_job_changes_nothing(log: MemoryLog, wanted: Wanted) -> None:
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    known = job_store.patch("digits", "by a person", wanted=wanted)
    assert job_store.hold(job_store.get("digits"), "its task raises") == known


@pytest.mark.parametrize("held", [False, True])
def test_hold_decided_before_a_resume_changes_nothing(log: MemoryLog, *, held: bool) -> None:
    # one leader   decides to hold the job ...................... writes the hold, too late
    # meanwhile        another leader holds it, or a person pauses it; then a person resumes it
    job_store = JobOperations(log)
    seen = job_store.submit(parse_job(TEXT))
    if held:
        job_store.hold(seen, "its task raises")
    else:
        job_store.patch("digits", "a look at it", wanted="paused")
    resumed = job_store.patch("digits", "mended", wanted="running")
    assert JobOperations(log).hold(seen, "its task raises") == job_store.get("digits") == resumed
    assert job_store.hold(resumed, "its task raises again").held


def test_patch_finds_its_record_if_kafka_reports_no_offset() -> None:
    log = RacingLog()
    with_streams(log)
    JobOperations(log).submit(parse_job(TEXT))
    log.reports_no_offsets = True
    log.meanwhile = lambda: JobOperations(log).patch("digits", "theirs", wanted="paused")
    assert JobOperations(log).patch("digits", "mine", wanted="stopped").reason == "mine"
    assert JobOperations(log).get("digits").reason == "mine"


def test_patch_concurrent_with_a_delete_does_not_restore_the_job() -> None:
    log = RacingLog()
    with_streams(log)
    JobOperations(log).submit(parse_job(TEXT))
    JobOperations(log).patch("digits", "enough", wanted="stopped")
    log.meanwhile = lambda: JobOperations(log).delete("digits")
    with pytest.raises(NotFoundError, match='no job "digits"'):
        JobOperations(log).patch("digits", "resume", wanted="running")
    assert JobOperations(log).read() == {}


def test_patch_detects_a_lost_race_while_other_threads_read() -> None:
    log = RacingLog()
    with_streams(log)
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    readers = [threading.Thread(target=job_store.read) for _ in range(3)]

    def meanwhile() -> None:
        JobOperations(log).patch("digits", "theirs", changed={"group_size": 5})
        for reader in readers:
            reader.start()

    log.meanwhile = meanwhile
    made = job_store.patch("digits", "mine", wanted="paused")
    for reader in readers:
        reader.join()
    assert job_store.get("digits") == made
    assert (made.wanted, made.spec.group_size) == ("paused", 5)


def test_store_can_be_shared_by_threads(log: MemoryLog) -> None:
    job_store, names = JobOperations(log), [f"digits-{number}" for number in range(6)]
    for name in names:
        job_store.submit(parse_job(TEXT.replace("name: digits", f"name: {name}")))

    def work(name: str) -> None:
        for size in range(2, 8):
            job_store.patch(name, "the test says so", changed={"group_size": size})
            job_store.hold(job_store.get(name), f"at {size}")
            assert job_store.get(name).spec.group_size == size
            job_store.patch(name, "resumed", wanted="running")

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 120.0
    while {record.revision for record in job_store.refresh(1.0).values()} != {6}:
        assert time.monotonic() < until
    for thread in threads:
        thread.join()
    assert job_store.read() == JobOperations(log).read()


def test_read_by_another_thread_wakes_a_waiting_refresh(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    job_store.read()
    seen = list[str]()
    waiting = threading.Thread(target=lambda: seen.extend(job_store.refresh(60.0)))
    waiting.start()
    JobOperations(log).submit(parse_job(TEXT))
    job_store.read()
    waiting.join(120.0)
    assert seen == ["digits"]


def test_change_written_after_a_patch_is_not_a_conflict() -> None:
    log = RacingLog()
    with_streams(log)
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    job_store.patch("digits", "fewer workers", changed={"group_size": 4})
    JobOperations(log).patch("digits", "one more", changed={"group_size": 5})
    assert job_store.get("digits").spec.group_size == 5


@pytest.mark.parametrize(
    ("optimizer", "reduction", "given", "rate"),
    [
        ("sgd", "mean", {}, 0.4),
        ("momentum", "mean", {}, 0.4),
        ("sgd", "mean", {"learning_rate": 0.3}, 0.3),
        # A sum of twice the samples is already a step of twice the length.
        ("sgd", "sum", {}, 0.1),
        ("adam", "mean", {}, 0.1),
    ],
)
def test_learning_rate_follows_the_group_size_for_mean_sgd(
    log: MemoryLog, optimizer: str, reduction: str, given: dict[str, Value], rate: float
) -> None:
    tree = yaml.safe_load(TEXT)
    tree |= {"optimizer": {"name": optimizer, "learning_rate": 0.1}, "reduction": reduction}
    job_store = JobOperations(log)
    submitted = job_store.submit(parse_job(yaml.safe_dump(tree))).spec
    changed: dict[str, Value] = {"group_size": 4 * submitted.group_size, **given}
    record = job_store.patch("digits", "more workers", changed=changed)
    assert record.spec.optimizer.learning_rate == pytest.approx(rate)
    assert job_store.patch("digits", "again", changed=changed) == record


def test_change_adds_a_revision_and_is_recorded(log: MemoryLog) -> None:
    clock = ManualClock(1000.0)
    job_store = JobOperations(log, clock=clock)
    job_store.submit(parse_job(TEXT))
    clock.advance(5.0)
    changed: dict[str, Value] = {
        "deadline_s": 60.0,
        "group_size": 4,
        "batch_size": 16,
        "learning_rate": 0.5,
    }
    record = job_store.patch("digits", "the price has doubled", changed=changed)
    assert record == JobOperations(log).get("digits")
    assert (record.revision, record.wanted, record.reason) == (1, "running", "submitted")
    assert record.changes == (
        by_me(1000.0, "submitted"),
        by_me(1005.0, "changed", 1, changed, "the price has doubled"),
    )
    spec = record.spec
    assert (spec.stop.deadline_s, spec.group_size, spec.batch_size) == (60.0, 4, 16)
    assert spec.optimizer.learning_rate == 0.5
    record = job_store.patch("digits", "no hurry", changed={"deadline_s": None, "group_size": 4})
    assert (record.revision, record.spec.stop.deadline_s) == (2, None)
    assert record.changes[-1].changed == {"deadline_s": None}


def test_blocks_are_replaced_and_removed_as_a_unit(log: MemoryLog) -> None:
    stale, exact = {"mode": "stale", "staleness": 2}, {"significance": 1.5}
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    record = job_store.patch(
        "digits", "one is slow", changed={"synchronisation": stale, "compression": exact}
    )
    assert record == JobOperations(log).get("digits")
    assert record.changes[-1].changed == {"synchronisation": stale, "compression": exact}
    assert (record.spec.mode, record.spec.synchronised.fixed_staleness) == ("stale", 2)
    assert record.spec.waiting_bound == 80
    tuner = {"group_size": [10, 40]}
    record = job_store.patch("digits", "", changed={"tuner": tuner})
    assert record.changes[-1].changed == {"tuner": tuner}
    assert job_store.patch("digits", "", changed={"tuner": None}).spec.tuner is None
    asynchronous = {"mode": "asynchronous", "damped": True}
    record = job_store.patch(
        "digits", "", changed={"synchronisation": asynchronous, "compression": exact}
    )
    assert record.changes[-1].changed == {"synchronisation": asynchronous}
    record = job_store.patch(
        "digits", "all are fast", changed={"synchronisation": None, "compression": None}
    )
    assert record.spec == parse_job(TEXT)
    assert record.changes[-1].changed == {"synchronisation": None, "compression": None}


def test_record_with_an_unknown_block_is_ignored(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    known = job_store.submit(parse_job(TEXT))
    newer = encode_entry(known).replace(b'"group_size"', b'"rings":{"of":4},"group_size"')
    write(log, topics.JOBS, newer, b"digits", 2)
    assert job_store.read() == JobOperations(log).read() == {"digits": known}
    assert 'unknown field "rings"' in job_store.table.unreadable["digits"].reason


def test_patch_without_a_change_writes_nothing(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    record = job_store.submit(parse_job(TEXT))
    end = log.bounds(JOBS).end
    assert job_store.patch("digits", "again", changed={"group_size": 20}) == record
    assert job_store.patch("digits", "nothing", changed={}) == record
    assert log.bounds(JOBS).end == end


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group_size": 0}, "group_size: must be at least 1"),
        ({"group_size": None}, "group_size: must be a whole number"),
        ({"batch_size": 1.5}, "batch_size: must be a whole number"),
        ({"learning_rate": 0.0}, "learning_rate: must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate: must be a finite number"),
        ({"deadline_s": -1}, "deadline_s: must be above 0"),
        ({"seed": 4}, '"seed" cannot be changed, only deadline_s, group_size'),
        ({"init": {"from": "a", "sha256": "0" * 64}}, '"init" cannot be changed, only deadline_s'),
        ({"synchronisation": {"mode": "late"}}, "synchronisation.mode: must be 'synchronous', "),
        (
            {"synchronisation": {"mode": "averaging"}},
            "synchronisation: local_rate: is missing; mode averaging requires it, for example 0.1",
        ),
        (
            {"synchronisation": {"mode": "stale", "stalenes": 2}},
            'unknown field "synchronisation.stalenes" (did you mean "staleness"?)',
        ),
        ({"compression": {}}, "compression: must have either significance or changes"),
        ({"compression": 1.5}, "compression: must be a mapping of fields to values, got 1.5"),
    ],
)
def test_patch_with_an_invalid_value_is_rejected_by_its_field(
    log: MemoryLog, changed: dict[str, Value], message: str
) -> None:
    job_store = JobOperations(log)
    record = job_store.submit(parse_job(TEXT))
    with pytest.raises(UserError) as caught:
        job_store.patch("digits", "", changed=changed)
    assert message in str(caught.value)
    assert job_store.get("digits") == record


def test_patch_of_group_size_above_waiting_batches_is_rejected(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    job_store.submit(parse_job(f"{TEXT}waiting_batches: 30\n"))
    with pytest.raises(UserError, match=r"waiting_batches: must be at least group_size \(31\)"):
        job_store.patch("digits", "", changed={"group_size": 31})


def test_record_keeps_only_the_last_changes(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    for size in range(1, CHANGES_KEPT + 3):
        job_store.patch("digits", "", changed={"batch_size": size})
    record = JobOperations(log).get("digits")
    revisions = [change.revision for change in record.changes]
    assert revisions == [0, *range(4, CHANGES_KEPT + 3)]
    assert record.changes[0].action == "submitted"


def test_delete_requires_a_stopped_job(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    with pytest.raises(ConflictError, match='the job "digits" is running; stop it first'):
        job_store.delete("digits")
    job_store.patch("digits", "enough", wanted="stopped")
    assert job_store.patch("digits", "for the next run", changed={"group_size": 3}).revision == 1
    job_store.delete("digits")
    assert JobOperations(log).read() == {}
    for act in (
        lambda: job_store.delete("digits"),
        lambda: job_store.patch("digits", "", changed={}),
        lambda: job_store.patch("digits", "", wanted="running"),
    ):
        with pytest.raises(NotFoundError, match='no job "digits"'):
            act()


def test_job_that_reuses_a_freed_name_has_its_own_topics(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    first = job_store.submit(parse_job(TEXT))
    assert (first.id, job_store.id_of("digits")) == ("digits", "digits")
    with pytest.raises(ConflictError, match="is running; stop it first"):
        job_store.free("digits")
    job_store.patch("digits", "enough", wanted="stopped")
    write(log, topics.updates_topic("digits"), b"{}")
    job_store.free("digits")
    assert (job_store.read(), JobOperations(log).id_of("digits")) == ({}, "digits.I2")
    second = JobOperations(log).submit(parse_job(TEXT))
    assert (second.spec.name, second.id) == ("digits", "digits.I2")
    assert not second.is_same_job(first)
    log.partitions("doll.digits.I2.control")
    assert decode_entry(b"digits", encode_entry(second)) == second


def test_name_of_a_deleted_job_with_history_is_taken_until_freed(
    log: MemoryLog,
) -> None:
    job_store = JobOperations(log)
    for job in ("digits", "digits.I2"):
        assert job_store.submit(parse_job(TEXT)).id == job
        write(log, topics.updates_topic(job), b"{}")
        job_store.patch("digits", "enough", wanted="stopped")
        job_store.delete("digits")
        with pytest.raises(ConflictError, match=f"doll.{job}.updates has records of an earlier"):
            JobOperations(log).submit(parse_job(TEXT))
        job_store.free("digits")


def test_finish_or_hold_for_an_earlier_incarnation_is_rejected(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    first = job_store.submit(parse_job(TEXT))
    job_store.patch("digits", "enough", wanted="stopped")
    job_store.free("digits")
    second = job_store.submit(parse_job(TEXT))
    acts: tuple[Callable[[], object], ...] = (
        lambda: job_store.finish(first.id, "a leader that was frozen", 0),
        lambda: job_store.hold(first, "a leader that was frozen"),
    )
    for act in acts:
        with pytest.raises(NotFoundError, match='"digits" was purged'):
            act()
    assert job_store.get("digits") == second
    assert job_store.hold(second, "why").held


def test_concurrent_frees_of_a_name_free_it_once() -> None:
    log = RacingLog()
    with_streams(log)
    JobOperations(log).submit(parse_job(TEXT))
    JobOperations(log).patch("digits", "enough", wanted="stopped")
    log.meanwhile = lambda: JobOperations(log).free("digits")
    # The other writer has written an equal record, so this call succeeds, too.
    JobOperations(log).free("digits")
    assert JobOperations(log).submit(parse_job(TEXT)).id == "digits.I2"


def test_request_of_a_submission_is_kept_by_changes(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT), request="4f21")
    job_store.patch("digits", "", changed={"group_size": 3})
    assert job_store.patch("digits", "", wanted="paused").request == "4f21"


def test_first_positions_follow_start_at(log: MemoryLog) -> None:
    clock = ManualClock(1_000_000.0)
    log = with_streams(MemoryLog(clock))
    for _ in range(3):
        write(log, "clinic-a", b"record")
        clock.advance(60.0)
    log.expire(A, 1)
    at = {
        start: first_positions(parse_job(f"{TEXT}start_at: {start}\n"), log)
        for start in ("earliest", "latest", "1970-01-12T13:48:00Z")  # 120 s after the first
    }
    a, b = (each.topic_id for each in log.describe(["clinic-a", "clinic-b"]).values())
    assert at == {
        "earliest": {A: LogPosition(1, a), B: LogPosition(0, b)},
        "latest": {A: LogPosition(3, a, epoch=0), B: LogPosition(0, b, epoch=0)},
        "1970-01-12T13:48:00Z": {A: LogPosition(2, a), B: LogPosition(0, b)},
    }


def test_submit_records_the_position_and_topic_id_of_each_stream(log: MemoryLog) -> None:
    for _ in range(3):
        write(log, "clinic-a", b"record")
    JobOperations(log).submit(parse_job(f"{TEXT}start_at: latest\n"))
    record = JobOperations(log).get("digits")
    assert {place: at.offset for place, at in record.known.items()} == record.first

    assert log.agrees(record.known) == {}
    log.recreate("clinic-b")
    assert log.agrees(record.known) == {B: 0}


def test_job_record_round_trips() -> None:
    record = JobRecord(parse_job(TEXT), "paused", by_stream({A: 5, B: 7}), "why", 1000.5)
    assert decode_entry(b"digits", encode_entry(record)) == record
    assert b"origin" not in encode_entry(record)
    assert b"revision" not in encode_entry(record)
    changed: dict[str, Value] = {"group_size": 4, "deadline_s": None, "learning_rate": 0.5}
    change = by_me(1001.0, "changed", 3, changed, "why")
    record = replace(record, origin=ORIGIN, revision=3, changes=(change,), request="4f21")
    record = replace(record, positions=by_stream({A: LogPosition(5, "an id", 3), B: 7}))
    assert decode_entry(b"digits", encode_entry(record)) == record


@pytest.mark.parametrize(("old", "new"), [("a1" * 32, "../" * 3), ("400", "-1"), ("12", '"12"')])
def test_invalid_origin_is_rejected(old: str, new: str) -> None:
    record = JobRecord(parse_job(TEXT), "running", by_stream({A: 0, B: 0}), "", 0.0, ORIGIN)
    value = encode_entry(record).decode()
    origin = value[value.index('"origin"') :]
    with pytest.raises(WireError, match="origin"):
        decode_entry(b"digits", value.replace(origin, origin.replace(old, new)).encode())


@pytest.mark.parametrize(
    ("key", "first", "message"),
    [
        (b"other", {A: 0, B: 0}, "must have its name 'digits' as the record's key, got b'other'"),
        (None, {A: 0, B: 0}, "got None"),
        (b"digits", {A: 0}, "first positions are of other streams"),
        (b"digits", {A: 0, B: -1}, "Expected `int` >= 0 - at `$.first[...][0][0]`"),
        (b"digits", {}, "first positions are of other streams"),
    ],
)
def test_inconsistent_job_record_is_rejected(
    key: bytes | None, first: dict[Partition, int], message: str
) -> None:
    record = JobRecord(parse_job(TEXT), "running", by_stream(first), "", 0.0)
    with pytest.raises(WireError) as caught:
        decode_entry(key, encode_entry(record))
    assert message in str(caught.value)


def test_revision_that_differs_from_the_last_change_is_rejected() -> None:
    record = JobRecord(parse_job(TEXT), "running", by_stream({A: 0, B: 0}), "", 0.0)
    record = replace(record, revision=2, changes=(by_me(0.0, "changed", 1, {"group_size": 4}),))
    with pytest.raises(WireError, match="revision 2 differs from the revision of its last change"):
        decode_entry(b"digits", encode_entry(record))


def test_job_record_of_a_later_format_is_rejected() -> None:
    written = encode_entry(JobRecord(parse_job(TEXT), "running", by_stream({A: 0, B: 0}), "", 0.0))
    later = (written[:-1] + b',"format":2}').replace(b'"streams"', b'"sources"')
    with pytest.raises(WireError, match="of format 2, expected at most 1"):
        decode_entry(b"digits", later)


def test_jobs_stay_known_after_the_jobs_topic_is_deleted(log: MemoryLog) -> None:
    """Jobs and processes continue without the topic. The first reader recreates it."""
    job_store = JobOperations(log)
    job_store.submit(parse_job(TEXT))
    known = job_store.read()
    log.delete_topics([topics.JOBS])

    with pytest.raises(UnavailableError):
        job_store.refresh(0.0)

    assert job_store.read() == known


# --- actors of changes ---------------------------------------------------------------------------

OLGA, MIA = NamedActor("olga", "operator"), NamedActor("oidc:mia", "operator")


def actions(record: JobRecord) -> list[tuple[str, str, str]]:
    """Return the action, author and role of each change of a job."""
    return [(each.action, each.by, each.role) for each in record.changes]


def test_each_change_records_its_actor_and_time(log: MemoryLog) -> None:
    clock = ManualClock(1000.0)
    job_store = JobOperations(log, clock=clock)
    job_store.acting(OLGA).submit(parse_job(TEXT))
    clock.advance(5.0)
    job_store.acting(MIA).patch("digits", "prices are high", wanted="paused")
    job_store.acting(OLGA).patch("digits", "by oidc:eve", changed={"group_size": 4})
    job_store.acting(MIA).patch("digits", "", changed={"batch_size": 8}, wanted="running")
    job_store.hold(job_store.get("digits"), "the task raises", "Traceback")
    job_store.acting(OLGA).patch("digits", "resume", after_loss=AfterLoss())
    job_store.acting(MIA).note("digits", "requeued", "1 batches: 7")
    job_store.finish("digits", "400 updates applied", 2)
    record = JobOperations(log).get("digits")
    assert actions(record) == [
        ("submitted", "olga", "operator"),
        ("paused", "oidc:mia", "operator"),
        ("changed", "olga", "operator"),
        ("changed", "oidc:mia", "operator"),
        ("resumed", "oidc:mia", "operator"),
        ("held", "coordinator", "coordinator"),
        ("resumed after loss", "olga", "operator"),
        ("requeued", "oidc:mia", "operator"),
        ("finished", "coordinator", "coordinator"),
    ]
    assert [each.at_s for each in record.changes] == [1000.0] + [1005.0] * 8
    assert [each.reason for each in record.changes[1:6]] == [
        "prices are high",
        "by oidc:eve",
        "",
        "",
        "the task raises",
    ]


def test_change_without_a_reason_gets_a_default_reason(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    job_store.acting(OLGA).submit(parse_job(TEXT))
    assert job_store.acting(MIA).patch("digits", "", wanted="paused").reason == "paused by oidc:mia"
    assert job_store.acting(OLGA).patch("digits", "", wanted="running").reason == "resumed by olga"
    assert job_store.acting(OLGA).patch("digits", "enough", wanted="stopped").reason == "enough"


def test_request_without_effect_records_no_change(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    submitted = job_store.acting(OLGA).submit(parse_job(TEXT))
    job_store.acting(MIA).patch("digits", "again", changed={"group_size": 20}, wanted="running")
    with pytest.raises(ConflictError):
        job_store.acting(MIA).patch("digits", "", after_loss=AfterLoss())
    with pytest.raises(ConflictError):
        job_store.acting(MIA).delete("digits")
    job_store.acting(OLGA).patch("digits", "", wanted="paused")
    job_store.hold(job_store.get("digits"), "it is paused already")
    assert len(job_store.get("digits").changes) == len(submitted.changes) + 1


def test_reused_name_keeps_the_history_of_its_earlier_jobs(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    job_store.acting(OLGA).submit(parse_job(TEXT))
    job_store.acting(OLGA).patch("digits", "enough", wanted="stopped")
    job_store.acting(MIA).delete("digits")
    assert JobOperations(log).read() == {}
    with pytest.raises(NotFoundError, match=r'no job "digits" \(it was deleted by oidc:mia, 20'):
        JobOperations(log).get("digits")
    again = job_store.acting(OLGA).submit(parse_job(TEXT))
    assert again.incarnation == 1
    job_store.acting(OLGA).patch("digits", "enough", wanted="stopped")
    job_store.acting(OLGA).delete("digits")
    job_store.acting(MIA).free("digits")
    again = JobOperations(log).acting(MIA).submit(parse_job(TEXT))
    assert again.incarnation == 2
    assert actions(JobOperations(log).get("digits")) == [
        ("submitted", "olga", "operator"),
        ("deleted", "oidc:mia", "operator"),
        ("submitted", "olga", "operator"),
        ("deleted", "olga", "operator"),
        ("purged", "oidc:mia", "operator"),
        ("submitted", "oidc:mia", "operator"),
    ]


def test_record_of_a_frequently_reused_name_stays_small(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    for _ in range(EARLIER_KEPT):
        job_store.acting(OLGA).submit(parse_job(TEXT))
        job_store.acting(OLGA).patch("digits", "enough", wanted="stopped")
        job_store.acting(MIA).free("digits")
    record = job_store.acting(OLGA).submit(parse_job(TEXT))
    assert len(record.changes) == EARLIER_KEPT + 1
    for number in range(CHANGES_KEPT):
        wanted: Wanted = "running" if number % 2 else "paused"
        record = job_store.acting(OLGA).patch("digits", str(number), wanted=wanted)
    assert len(record.changes) == CHANGES_KEPT
    assert record.changes[-1].reason == str(CHANGES_KEPT - 1)
    assert record.changes[EARLIER_KEPT].action == "submitted"


def test_concurrent_changes_record_every_actor(log: MemoryLog) -> None:
    JobOperations(log).acting(OLGA).submit(parse_job(TEXT))
    actors = [NamedActor(f"key-{number}", "operator") for number in range(4)]

    def change(number: int) -> None:
        changed: dict[str, Value] = {"group_size": number + 2}
        JobOperations(log).acting(actors[number]).patch("digits", "", changed=changed)

    threads = [threading.Thread(target=change, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _, *changes = JobOperations(log).get("digits").changes
    assert {each.by for each in changes} == {each.name for each in actors}


def test_long_actor_names_and_reasons_are_truncated(log: MemoryLog) -> None:
    job_store = JobOperations(log)
    change = (
        job_store.acting(NamedActor("n" * 10**6, "operator")).submit(parse_job(TEXT)).changes[-1]
    )
    assert len(change.by) == 100
    change = job_store.acting(OLGA).patch("digits", "r" * 10**6, wanted="paused").changes[-1]
    assert len(change.reason) == 500


def test_each_change_writes_one_audit_log_line(
    log: MemoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    job_store = JobOperations(log)
    job_store.acting(OLGA).submit(parse_job(TEXT))
    job_store.acting(MIA).patch("digits", "late", changed={"batch_size": 8}, wanted="stopped")
    job_store.acting(OLGA).delete("digits")
    job_store.acting(MIA).free("digits")
    lines = [fields_of(each) for each in caplog.records if each.getMessage() == "audit"]
    shown = [(each["by"], each["role"], each["action"], each["job"]) for each in lines]
    assert shown == [
        ("olga", "operator", "submitted", "digits"),
        ("oidc:mia", "operator", "changed", "digits"),
        ("oidc:mia", "operator", "stopped", "digits"),
        ("olga", "operator", "deleted", "digits"),
        ("oidc:mia", "operator", "purged", "digits"),
    ]
    assert [each["outcome"] for each in lines] == ["done"] * 5
    assert lines[1]["reason"] == "late"


def test_unconfirmed_change_is_logged_with_unknown_outcome(
    log: MemoryLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    job_store = JobOperations(log)
    job_store.acting(OLGA).submit(parse_job(TEXT))
    caplog.clear()
    monkeypatch.setattr(MemoryWriter, "flush", lambda *_: False)
    with pytest.raises(UnavailableError):
        job_store.acting(MIA).patch("digits", "", wanted="paused")
    [line] = [fields_of(each) for each in caplog.records if each.getMessage() == "audit"]
    assert (line["by"], line["action"], line["outcome"]) == ("oidc:mia", "paused", "unknown")
