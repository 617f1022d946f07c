"""`doll dlq`: dead letters are counted by reason, and each of their records is replayed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.core.history import History
from common.core.messages import Batch, Quarantined, Replayed, Requeued, Skipped, WorkerId
from common.core.spans import Partition, Span
from common.errors import UnavailableError
from common.jobs import replay
from common.jobs.changes import local_user
from common.jobs.store import JobStore
from common.kafka import names as topics
from common.kafka.dead_letters import (
    EncodedDeadLetter,
    Note,
    TopicIdPartition,
    encode_dead_letter,
    encode_dead_letters,
)
from common.kafka.memory import MemoryLog, MemoryTransactions
from common.kafka.port import NewTopic
from common.wire import messages as wire
from services.cli import exits
from tests.unit.cli.conftest import World
from tests.unit.cli.test_job import JOB, submitted
from tests.unit.cli.test_requeue import LEAD, UPDATES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.kafka.port import LogRecord, NewRecord

ADDRESS = "clinic-a[0]@{}"
NO_LABEL, TORN = "label: is missing", "has 3 bytes, not 8"
POISON = Batch(
    0, WorkerId("w1"), (Span("clinic-a", 0, 0, 3),), 2, (Skipped("clinic-a", 0, 1, "x"),)
)
QUARANTINED = Quarantined(0, POISON, "poison: raised: KeyError")


class MortalLog(MemoryLog):
    """A log whose writer dies after a fixed number of transactions."""

    left = 10**6

    def transactions(self, name: str) -> MemoryTransactions:
        """Return transactions that fail after `left` of them."""
        super().transactions(name)
        mortal = self._names[name] = _Mortal(self, name)
        return mortal


class _Mortal(MemoryTransactions):
    def write(self, records: Sequence[NewRecord]) -> None:
        log = self._log
        assert isinstance(log, MortalLog)
        if log.left == 0:
            raise UnavailableError("killed")
        log.left -= 1
        super().write(records)


def happened(world: World, records: int = 10, bad: Sequence[tuple[int, str]] = ()) -> None:
    """Submit a job with this many records, some dead letters and a poison batch."""
    submitted(world)
    writer = world.log.writer()
    for number in range(records):
        headers = (("trace", b"t%d" % number),)
        writer.append("clinic-a", b"r%d" % number, key=b"k%d" % number, headers=headers)
    writer.flush(1.0)
    for offset, reason in bad:
        fail(world, offset, reason)
    world.write(UPDATES, *map(wire.encode_audit, (LEAD, QUARANTINED)))


def fail(world: World, offset: int, reason: str = NO_LABEL, job: str = "digits") -> None:
    (record,) = [each for each in stream(world) if each.offset == offset]
    skipped = Skipped("clinic-a", 0, offset, reason)
    put(world, encode_dead_letter(job, skipped, offset, record.value, topic_id(world)))


def topic_id(world: World) -> str:
    return world.log.describe(["clinic-a"])["clinic-a"].topic_id


def quarantine(world: World, record: Quarantined = QUARANTINED, job: str = "digits") -> None:
    """Write the dead letters of a quarantined batch."""
    put(world, *encode_dead_letters(job, record, {Partition("clinic-a", 0): topic_id(world)}))


def other_job(world: World, record: Quarantined) -> None:
    """Submit a second job that reads the stream and has quarantined a batch."""
    world.run("job", "submit", "-", typed=JOB.replace("digits", "other"))
    world.write(topics.updates_topic("other"), *map(wire.encode_audit, (LEAD, record)))
    quarantine(world, record, "other")


def put(world: World, *dead_letters: EncodedDeadLetter) -> None:
    world.log.create_topics([NewTopic("clinic-a.dlq")])
    writer = world.log.writer()
    for dead_letter in dead_letters:
        writer.append(
            dead_letter.topic, dead_letter.value, key=dead_letter.key, headers=dead_letter.headers
        )
    assert writer.flush(1.0)


def stream(world: World, topic: str = "clinic-a") -> list[LogRecord]:
    return world.log.tail(Partition(topic, 0), 0).read(10_000, 0.0)


def new(world: World, topic: str = "clinic-a", old: int = 10) -> list[tuple[bytes | None, str]]:
    """Return the values of the replayed records, and their first addresses."""
    records = stream(world, topic)[old if topic == "clinic-a" else 0 :]
    return [(each.value, dict(each.headers)["replayed_from"].decode()) for each in records]


def test_dlq_show_counts_dead_letters_by_reason(world: World) -> None:
    happened(world, bad=[(3, NO_LABEL), (4, TORN), (5, NO_LABEL), (5, NO_LABEL)])
    fail(world, 5, NO_LABEL, job="other")
    quarantine(world)

    output = [line.split() for line in world.run("dlq", "show", "digits").stdout.splitlines()]

    assert ["clinic-a", "2", "0", "0", *NO_LABEL.split()] in output
    assert ["clinic-a", "0", "1", "0", *QUARANTINED.reason.split()] in output
    assert output[-1] == ["4", "dead", "letters"]
    assert ["clinic-a", "1", "0", "0", *TORN.split()] in output
    assert 'no job "other"' in world.run("dlq", "show", "other", code=exits.REFUSED).stderr


def test_replay_by_reason_writes_records_once_with_key_headers_and_address(
    world: World,
) -> None:
    happened(world, bad=[(3, NO_LABEL), (4, TORN), (5, NO_LABEL)])
    # The other job's dead letter has the address of the same record.
    fail(world, 5, NO_LABEL, job="other")
    options = ("dlq", "replay", "clinic-a", "--reason", "label")

    assert "2 records and 0 batches" not in world.run(*options).stdout

    assert new(world) == [(b"r3", ADDRESS.format(3)), (b"r5", ADDRESS.format(5))]
    assert [(each.key, each.headers[0]) for each in stream(world)[10:]] == [
        (b"k3", ("trace", b"t3")),
        (b"k5", ("trace", b"t5")),
    ]
    assert world.run(*options).stdout == "0 records were written to clinic-a\n"
    world.run("dlq", "replay", "clinic-a.dlq", "--all", "--job", "digits")
    assert new(world)[2:] == [(b"r4", ADDRESS.format(4))]


def test_replay_is_recorded_once_in_the_changes_of_the_job(world: World) -> None:
    happened(world, bad=[(3, NO_LABEL), (4, TORN), (5, NO_LABEL)])
    fail(world, 5, NO_LABEL, job="of-nobody")
    for _ in range(2):
        world.run("dlq", "replay", "clinic-a", "--reason", NO_LABEL)
    changes = JobStore(world.log).get("digits").changes
    assert [(each.action, each.by, each.role, each.reason) for each in changes[1:]] == [
        ("replayed", *local_user(), "2 dead letters of clinic-a to clinic-a")
    ]


def test_dry_run_counts_and_writes_nothing(world: World) -> None:
    happened(world, bad=[(3, NO_LABEL), (4, TORN)])
    quarantine(world)

    output = world.run("dlq", "replay", "clinic-a", "--all", "--dry-run").stdout

    assert output == "would be replayed: 2 records and 1 batches\n"
    assert len(stream(world)) == 10


@pytest.mark.parametrize("options", [(), ("--all", "--reason", "x"), ("--all", "--to", "a.dlq")])
def test_replay_with_missing_or_conflicting_options_is_rejected(
    world: World, options: tuple[str, ...]
) -> None:
    happened(world)
    world.run("dlq", "replay", "clinic-a", *options, code=exits.REFUSED)


def test_record_that_failed_again_is_replayed_only_with_the_again_option(world: World) -> None:
    happened(world, bad=[(3, NO_LABEL)])
    world.log.create_topics([NewTopic("other"), NewTopic("other.dlq")])
    world.run("dlq", "replay", "clinic-a", "--all", "--to", "other")
    dead_letter = encode_dead_letter("j", Skipped("other", 0, 0, NO_LABEL), 0, b"r3")
    put(world, dead_letter)

    output = world.run("dlq", "replay", "other", "--all", "--to", "clinic-a").stdout

    assert output.endswith(
        "not written: 1 records that were replayed before and failed again; add --again\n"
    )
    assert new(world) == []
    world.run("dlq", "replay", "other", "--all", "--to", "clinic-a", "--again")
    # The header has the address of the original record, not that of its first replay.
    assert new(world) == [(b"r3", ADDRESS.format(3))]


def test_deleted_record_is_replayed_from_a_complete_dead_letter_only(
    world: World,
) -> None:
    happened(world, bad=[(3, NO_LABEL), (4, NO_LABEL)])
    cut, whole = (Skipped("clinic-a", 0, offset, NO_LABEL) for offset in (5, 8))
    dead_letter = encode_dead_letter("digits", cut, 5, b"r5" * 200, topic_id(world)).shortened()
    assert dead_letter is not None
    put(world, dead_letter, encode_dead_letter("digits", whole, 8, b"not r8", topic_id(world)))
    world.log.expire(Partition("clinic-a", 0), 6)

    output = world.run("dlq", "replay", "clinic-a", "--all").stdout

    assert output.endswith(
        "not written: 1 records that Kafka deleted and whose dead letters are truncated\n"
    )
    assert [(each.value, each.key) for each in stream_from(world, 10)] == [
        (b"r3", None),
        (b"r4", None),
        # Kafka lost record 8, and another one has its offset.
        (b"not r8", None),
    ]


def stream_from(world: World, offset: int) -> list[LogRecord]:
    return world.log.tail(Partition("clinic-a", 0), offset).read(100, 0.0)


def test_batch_is_replayed_once_and_cannot_be_requeued_afterwards(world: World) -> None:
    happened(world)
    quarantine(world)

    output = world.run("dlq", "replay", "clinic-a", "--reason", "KeyError").stdout

    assert output == "batch 0: 2 records were written\n2 records were written to clinic-a\n"
    assert new(world) == [(b"r0", ADDRESS.format(0)), (b"r2", ADDRESS.format(2))]
    world.run("dlq", "replay", "clinic-a", "--all")
    world.run("job", "requeue", "digits", "--batch", "0", code=exits.REFUSED)
    assert len(new(world)) == 2


def test_requeued_batch_is_not_replayed(world: World) -> None:
    happened(world)
    quarantine(world)
    world.write(UPDATES, wire.encode_audit(Requeued(POISON, "ada", 1.0)))

    output = world.run("dlq", "replay", "clinic-a", "--all").stdout

    assert output == "0 records were written to clinic-a\n"


@pytest.mark.parametrize("command", [("dlq", "replay", "clinic-a"), ("job", "replay", "digits")])
def test_replay_interrupted_after_its_final_quarantine_record_continues(
    command: tuple[str, ...],
) -> None:
    log = MortalLog()
    world = World(log)
    happened(world)
    quarantine(world)
    log.left = 0

    world.run(*command, "--all", code=exits.UNAVAILABLE)
    assert isinstance(wire.decode_audit(stream(world, UPDATES)[-1].value or b""), Replayed)
    assert new(world) == []
    log.left = 1

    world.run(*command, "--all")
    assert [value for value, _ in new(world)] == [b"r0", b"r2"]
    world.run(*command, "--all")
    world.run("job", "replay", "digits", "--all")
    assert len(new(world)) == 2
    assert sum(isinstance(each, Replayed) for each in audit(world)) == 1


class BusyLog(MemoryLog):
    """A log in which another command runs just before a command takes its transactional id."""

    other: Callable[[], object] | None = None

    def transactions(self, name: str) -> MemoryTransactions:
        """Return transactions, after the other command has run."""
        if self.other is not None:
            act, self.other = self.other, None
            act()
        return super().transactions(name)


@pytest.mark.parametrize("command", [("dlq", "replay", "clinic-a"), ("job", "replay", "digits")])
def test_records_that_a_concurrent_command_replayed_are_not_written_again(
    command: tuple[str, ...],
) -> None:
    log = BusyLog()
    world = World(log)
    happened(world, bad=[(5, TORN)])
    quarantine(world)
    log.other = lambda: world.run("dlq", "replay", "clinic-a", "--all")

    world.run(*command, "--all")

    assert sorted(value or b"" for value, _ in new(world)) == [b"r0", b"r2", b"r5"]


def audit(world: World) -> list[object]:
    fold, records = History(), stream(world, UPDATES)
    decoded = [wire.decode_audit(record.value or b"") for record in records]
    return [each for offset, each in enumerate(decoded) if fold.feed(offset, each)]


@pytest.mark.parametrize("survived", range(4))
def test_interrupted_replay_continues_where_it_stopped(
    survived: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_RECORDS", 3)
    log = MortalLog()
    world = World(log)
    happened(world, bad=[(offset, NO_LABEL) for offset in range(9)])
    log.left = survived

    world.run(
        *("dlq", "replay", "clinic-a", "--all"), code=0 if survived == 3 else exits.UNAVAILABLE
    )
    assert len(new(world)) == 3 * survived
    log.left = 10
    world.run("dlq", "replay", "clinic-a", "--all")

    assert [value for value, _ in new(world)] == [b"r%d" % offset for offset in range(9)]


OVERLAPPING = Batch(0, WorkerId("w1"), (Span("clinic-a", 0, 2, 6),), 4)


@pytest.mark.parametrize("survived", range(3))
def test_records_quarantined_by_two_jobs_are_written_once_despite_interruptions(
    survived: int,
) -> None:
    # digits   r0 (r1 does not decode) r2
    # other                            r2 r3 r4 r5
    log = MortalLog()
    world = World(log)
    happened(world)
    quarantine(world)
    other_job(world, Quarantined(0, OVERLAPPING, "poison: raised: KeyError"))
    log.left = survived

    world.run("dlq", "replay", "clinic-a", "--all", code=0 if survived == 2 else exits.UNAVAILABLE)
    log.left = 10
    world.run("dlq", "replay", "clinic-a", "--all")
    for job in ("digits", "other"):
        world.run("job", "replay", job, "--all")
        world.run("job", "requeue", job, "--batch", "0", code=exits.REFUSED)

    assert [value for value, _ in new(world)] == [b"r0", b"r2", b"r3", b"r4", b"r5"]


@pytest.mark.parametrize("survived", range(2))
def test_batch_replayed_by_two_jobs_is_written_once(survived: int) -> None:
    log = MortalLog()
    world = World(log)
    happened(world)
    quarantine(world)
    other_job(world, QUARANTINED)
    log.left = survived

    world.run("job", "replay", "digits", "--all", code=0 if survived else exits.UNAVAILABLE)
    log.left = 10
    for job in ("other", "digits", "other"):
        world.run("job", "replay", job, "--all")

    assert [value for value, _ in new(world)] == [b"r0", b"r2"]


def test_bad_record_inside_a_replayed_batch_can_still_be_replayed(
    world: World,
) -> None:
    happened(world, bad=[(1, NO_LABEL)])
    quarantine(world)
    world.run("job", "replay", "digits", "--all")

    world.run("dlq", "replay", "clinic-a", "--reason", NO_LABEL)

    assert [value for value, _ in new(world)] == [b"r0", b"r2", b"r1"]


def test_dead_letters_of_a_recreated_topic_are_replayed_separately(
    world: World,
) -> None:
    happened(world, bad=[(3, NO_LABEL), (4, NO_LABEL)])
    world.run("dlq", "replay", "clinic-a", "--all")
    fail(world, 5)
    world.log.recreate("clinic-a")
    writer = world.log.writer()
    for number in range(10):
        writer.append("clinic-a", b"n%d" % number)
    assert writer.flush(1.0)
    fail(world, 3)

    output = world.run("dlq", "replay", "clinic-a", "--all").stdout

    assert output == "2 records were written to clinic-a\n"
    assert sorted(new(world)) == [(b"n3", ADDRESS.format(3)), (b"r5", ADDRESS.format(5))]


def test_batch_of_a_recreated_topic_is_not_read_from_the_new_one(world: World) -> None:
    happened(world)
    quarantine(world)
    world.log.recreate("clinic-a")
    writer = world.log.writer()
    for number in range(10):
        writer.append("clinic-a", b"n%d" % number)
    assert writer.flush(1.0)

    output = world.run("job", "replay", "digits", "--all").stdout

    assert "not written, because Kafka deleted some of its records" in output
    assert new(world) == []


def test_dead_letter_after_a_replay_is_new_only_for_another_job(world: World) -> None:
    #   letter of digits   replayed   the same letter, of a new leader   a letter of other
    happened(world, bad=[(3, NO_LABEL)])
    world.run("dlq", "replay", "clinic-a", "--all")
    fail(world, 3)
    world.run("dlq", "replay", "clinic-a", "--all")
    assert [value for value, _ in new(world)] == [b"r3"]

    fail(world, 3, job="other")
    world.run("dlq", "replay", "clinic-a", "--all")
    world.run("dlq", "replay", "clinic-a", "--all")

    assert [value for value, _ in new(world)] == [b"r3", b"r3"]


def test_replay_to_one_topic_does_not_count_for_another(world: World) -> None:
    happened(world, bad=[(3, NO_LABEL)])
    world.log.create_topics([NewTopic("fixed")])
    for _ in range(2):
        world.run("dlq", "replay", "clinic-a", "--all", "--to", "fixed")
        world.run("dlq", "replay", "clinic-a", "--all")

    assert new(world, "fixed") == new(world) == [(b"r3", ADDRESS.format(3))]


@pytest.mark.parametrize("replays", range(3))
def test_compacted_dead_letter_topic_keeps_dead_letters_and_replays(
    world: World, replays: int
) -> None:
    happened(world, bad=[(3, NO_LABEL), (4, NO_LABEL)])
    quarantine(world)
    other_job(world, QUARANTINED)
    fail(world, 3, job="other")
    for number in range(3):
        if number < replays:
            world.run("dlq", "replay", "clinic-a", "--all")
        newest = {record.key: record.offset for record in stream(world, "clinic-a.dlq")}
        for record in stream(world, "clinic-a.dlq"):
            if newest[record.key] != record.offset:
                world.log.punch(Partition("clinic-a.dlq", 0), record.offset)
        # A new leader writes it again.
        fail(world, 3)

    shown = {
        (job, *map(int, line.split()[1:4]))
        for job in ("digits", "other")
        for line in world.run("dlq", "show", job).stdout.splitlines()
        if "clinic-a" in line
    }
    assert shown == {
        ("digits", 2, 0, 2 if replays else 0),
        ("other", 1, 0, 1 if replays else 0),
        ("digits", 0, 1, 1 if replays else 0),
        ("other", 0, 1, 1 if replays else 0),
    }
    world.run("dlq", "replay", "clinic-a", "--all")
    assert sorted(value or b"" for value, _ in new(world)) == [b"r0", b"r2", b"r3", b"r4"]


def test_forged_replay_note_about_too_many_records_is_ignored(world: World) -> None:
    happened(world, bad=[(3, NO_LABEL)])
    place = TopicIdPartition(topic_id(world), Partition("clinic-a", 0))
    forged = Note(place, 0, 2**62, "clinic-a", frozenset({"digits"})).record
    put(world, EncodedDeadLetter(forged.topic, forged.key or b"", None, forged.headers))

    world.run("dlq", "replay", "clinic-a", "--all")

    assert new(world) == [(b"r3", ADDRESS.format(3))]
