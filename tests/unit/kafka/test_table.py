"""A table with several writers: each acknowledged change is made, and none is made twice.

In the model, each writer is a thread that stops before it reads and before it appends, and a
schedule chooses the writer that continues. A writer that stops for good plays a crash; one that
continues late plays a record that is delivered late. The table is the real one, on a log in memory.

`common.kafka.table` explains when a record is lost.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from common.core.spans import Partition
from common.errors import ConflictError, UnavailableError, UnknownOutcomeError, WireError
from common.kafka.backup import BackupTable
from common.kafka.memory import MemoryLog, MemoryWriter
from common.kafka.port import NewRecord
from common.kafka.table import (
    COMPACTION_LAG_S,
    NUMBER,
    REPAIR_S,
    InForce,
    table_topic,
)
from tests.fakes.clock import ManualClock

if TYPE_CHECKING:
    from common.kafka.port import Bounds

TOPIC = "doll.things"
PLACE = Partition(TOPIC, 0)
NAME = "thing"
# Four reads and four appends of each writer, which is more than any writer here needs.
STEPS = 8

Value: TypeAlias = tuple[str, ...]
Change: TypeAlias = Callable[[Value | None], Value]
Table: TypeAlias = BackupTable[Value]


def decode(_key: bytes | None, value: bytes) -> Value:
    try:
        return tuple(json.loads(value))
    except ValueError as error:
        raise WireError(f"thing: {error}") from error


def encode(value: Value) -> bytes:
    return json.dumps(value).encode()


def table_of(log: MemoryLog, clock: ManualClock, *, closed: bool = False) -> Table:
    return BackupTable(log, TOPIC, decode, "thing", closed=closed, clock=clock)


def compact(log: MemoryLog, below: int) -> None:
    """Compact as a broker does: keep the last record of each key below an offset."""
    with log.anyway():
        stored = log.stored(PLACE)
        last = {each.key: each.offset for each in stored.records if each.offset < below}
        stored.records = [each for each in stored.records if last.get(each.key, 0) <= each.offset]


class Crash(BaseException):
    """Ends a writer at its present step."""


class Writer(threading.Thread):
    """Makes a change, a step at a time.

    Attributes:
        outcome: "made", "refused", "unknown", or "failed" if the table is at fault.
    """

    def __init__(self, log: SteppedLog, table: Table, change: Change, times: int = 1) -> None:
        super().__init__(daemon=True)
        self.outcome = ""
        self.times = times
        self._table = table
        self._change = change
        self._log = log
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self.crashes_after = 1000  # steps
        self.start()
        assert self._stopped.acquire(timeout=60.0)

    def run(self) -> None:
        """Make the change `times` times."""
        self._log.writers[threading.get_ident()] = self
        try:
            for _ in range(self.times):
                self._table.update(NAME, self._change, encode)
            self.outcome = "made"
        except ConflictError:
            self.outcome = "refused"
        except (Crash, UnavailableError):
            # The table is unavailable if, say, a record is compacted before its writer reads it.
            self.outcome = "unknown"
        finally:
            self.outcome = self.outcome or "failed"
            del self._log.writers[threading.get_ident()]
            self._stopped.release()

    def pause(self) -> None:
        """Wait for the next step; called in the thread."""
        self._stopped.release()
        self._go.acquire()
        if self.crashes_after <= 0:
            raise Crash

    def step(self) -> None:
        """Continue to the next read or append, or to the end."""
        if not self.outcome:
            self._go.release()
            assert self._stopped.acquire(timeout=60.0)
            self.crashes_after -= 1

    def crash(self) -> None:
        """Crash at the present step."""
        self.crashes_after = 0
        self.step()

    def finish(self) -> None:
        """Continue to the end."""
        while not self.outcome:
            self.step()


class SteppedLog(MemoryLog):
    """A log that pauses writers before each call."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.writers = dict[int, Writer]()  # thread to writer

    def bounds(self, partition: Partition) -> Bounds:
        """Wait for the next step before the normal call."""
        self._pause()
        return super().bounds(partition)

    def writer(self, **given: Any) -> MemoryWriter:  # noqa: ANN401 -- passed on
        """Wait for the next step before the normal call."""
        self._pause()
        return super().writer(**given)

    def copy(self, offset: int) -> None:
        """Deliver a record once more, as a producer that is not idempotent may do."""
        record = next(each for each in self.stored(PLACE).records if each.offset == offset)
        with self.anyway():
            self.append(NewRecord(TOPIC, record.value, record.key, record.headers, 0))

    def _pause(self) -> None:
        writer = self.writers.get(threading.get_ident())
        if writer is not None:
            writer.pause()


class World:
    """A log with one entry, and writers that change it."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.log = SteppedLog(self.clock)
        self.repairer = self.table()
        self.repairer.update(NAME, lambda _: ("start",), encode)
        self.writers = list[Writer]()

    def table(self) -> Table:
        """Return the table as another process has it."""
        return table_of(self.log, self.clock)

    def begin(self, change: Change, times: int = 1) -> Writer:
        """Start a writer."""
        table = self.table()
        table.read()
        self.writers.append(Writer(self.log, table, change, times))
        return self.writers[-1]

    def add(self, times: int = 1) -> Writer:
        """Start a writer that adds its number."""
        number = str(len(self.writers))
        return self.begin(lambda value: (*(value or ()), number), times)

    def value(self) -> Value:
        """Return the entry as a new reader finds it."""
        return self.table().read()[NAME]

    def repair(self) -> None:
        """Let a service read the table, and repair it after `REPAIR_S`."""
        self.repairer.read()
        self.clock.advance(REPAIR_S)
        self.repairer.repair()

    def let_an_hour_pass(self) -> None:
        """Compact everything, after a service had time to repair."""
        self.repair()
        self.clock.advance(COMPACTION_LAG_S)
        compact(self.log, self.log.bounds(PLACE).end)

    def ends_with_a_lost_record(self) -> bool:
        """Return True if the last record is neither in force nor a copy of one that is."""
        value = self.log.stored(PLACE).records[-1].value
        return value is None or decode(None, value) != self.value()

    def check_sums(self) -> None:
        """Check that each outcome matches the entry."""
        value = self.value()
        for number, writer in enumerate(self.writers):
            made, most = value.count(str(number)), writer.times
            allowed = {"made": [most], "refused": [0], "unknown": range(most + 1)}
            assert made in allowed[writer.outcome], (writer.outcome, value)

    def check_readers(self, *, late: bool = False) -> None:
        """Check that all readers read the same, with every prefix of the log compacted.

        Args:
            late: True to check readers that have read a part of the log before it is compacted.
        """
        expected = self.value()
        for writer in self.writers:
            assert writer._table.read()[NAME] == expected  # noqa: SLF001 -- our own
        stored = self.log.stored(PLACE)
        records, end = list(stored.records), stored.end
        for read in range(end + 1) if late else [0]:
            for below in range(1, end + 1):
                stored.records = [each for each in records if each.offset < read]
                stored.end = read
                reader = self.table()
                reader.read()
                stored.records, stored.end = list(records), end
                compact(self.log, below)
                assert reader.read()[NAME] == expected, (read, below)
        stored.records = records


def interleavings(begin: Callable[[World], object], writers: int) -> Iterator[World]:
    """Yield a world after each interleaving of the first `STEPS` steps of identical writers.

    All writers have finished by then. They begin in the order of their numbers, because it does
    not matter which of several identical writers is first.
    """
    # At each step, the index of the chosen writer among those that can continue.
    taken, more = list[int](), True
    while more:
        world, choices = World(), list[int]()
        for _ in range(writers):
            begin(world)
        left = [STEPS] * writers
        while True:
            fresh = [number for number in range(writers) if left[number] == STEPS][:1]
            able = [
                number
                for number, writer in enumerate(world.writers)
                if not writer.outcome and (0 < left[number] < STEPS or number in fresh)
            ]
            if not able:
                break
            if len(choices) == len(taken):
                taken.append(0)
            number = able[taken[len(choices)]]
            choices.append(len(able))
            left[number] -= 1
            world.writers[number].step()
        for writer in world.writers:
            writer.finish()
        yield world
        while taken and taken[-1] == choices[len(taken) - 1] - 1:
            taken.pop()
        if more := bool(taken):
            taken[-1] += 1


@pytest.mark.parametrize(("writers", "times"), [(2, 1), (2, 2), (3, 1)])
def test_each_acknowledged_change_is_made_once_in_every_interleaving(
    writers: int, times: int
) -> None:
    for world in interleavings(lambda world: world.add(times), writers):
        assert [writer.outcome for writer in world.writers] == ["made"] * writers
        world.check_sums()
        assert not world.ends_with_a_lost_record()
        world.check_readers(late=(writers, times) == (2, 1))


@pytest.mark.parametrize("writers", [2, 3])
def test_one_writer_of_the_same_revision_succeeds_in_every_interleaving(
    writers: int,
) -> None:
    def change(number: str, value: Value | None) -> Value:
        if value != ("start",):
            raise ConflictError("it has another revision")
        return (*value, number)

    def begin(world: World) -> None:
        world.begin(partial(change, str(len(world.writers))))

    for world in interleavings(begin, writers):
        outcomes = sorted(writer.outcome for writer in world.writers)
        assert outcomes == ["made", *["refused"] * (writers - 1)]
        world.check_sums()
        assert not world.ends_with_a_lost_record(), "who is refused leaves no lost record behind"
        world.check_readers(late=writers == 2)


def test_crash_at_any_step_loses_no_acknowledged_change() -> None:
    def victim(world: World, after: int) -> None:
        writer = world.add()
        if len(world.writers) == 1:
            writer.crashes_after = after

    for after in range(STEPS + 1):
        for world in interleavings(lambda world, after=after: victim(world, after), 2):  # type: ignore[misc]
            world.check_sums()
            world.repair()
            assert not world.ends_with_a_lost_record()
            world.check_readers()


@pytest.mark.parametrize("seed", range(4))
def test_no_disturbance_loses_an_acknowledged_change(seed: int) -> None:
    """Writers start, stop and crash; records are repeated; hours pass and the log is compacted."""
    for each in range(150):
        choice = random.Random(1000 * seed + each)  # noqa: S311 -- not for secrets
        world = World()
        for _ in range(choice.randrange(10, 50)):
            living = [writer for writer in world.writers if not writer.outcome]
            what = choice.choices(
                ("step", "begin", "crash", "copy", "repair", "hour"), (20, 4, 1, 1, 1, 1)
            )[0]
            if what == "begin" and len(living) < 3:
                world.add()
            elif what == "step" and living:
                choice.choice(living).step()
            elif what == "crash" and living:
                choice.choice(living).crash()
            elif what == "copy":
                world.log.copy(choice.choice(world.log.stored(PLACE).records).offset)
            elif what == "repair":
                world.repair()
            elif what == "hour":
                world.let_an_hour_pass()
        for writer in world.writers:
            writer.finish()
        world.check_sums()
        world.repair()
        assert not world.ends_with_a_lost_record()
        world.check_readers()


def test_late_record_is_repaired_for_readers_of_a_compacted_log() -> None:
    """Compaction leaves the lost record, but also the copy that the repair wrote.

    offset      0   1   2   3   4
    number      1   2   3   2   4
    counts      x   x   x       x    offset 4 is a copy of offset 2
    compacted               3   4
    """
    world = World()
    late = world.add()
    late.step()
    world.add().finish()
    world.add().finish()
    late.step()
    late.crash()
    assert world.ends_with_a_lost_record()
    expected = world.value()

    world.repair()
    compact(world.log, 4)

    assert [each.offset for each in world.log.stored(PLACE).records] == [3, 4]
    assert world.value() == expected == ("start", "1", "2")


def test_reader_absent_for_longer_than_the_compaction_lag_reads_on() -> None:
    world = World()
    away = world.table()
    away.read()
    for _ in range(3):
        world.add().finish()
    world.let_an_hour_pass()
    assert away.read()[NAME] == ("start", "0", "1", "2")


def test_two_concurrent_repairs_converge() -> None:
    world = World()
    late = world.add()
    late.step()
    world.add().finish()
    late.step()
    late.crash()
    tables = [world.table(), world.table()]
    for table in tables:
        table.read()
    world.clock.advance(REPAIR_S)
    repairs = [
        # The table repairs the log before the change.
        Writer(world.log, table, lambda value: value or ())
        for table in tables
    ]
    for _ in range(2):
        for repair in repairs:
            repair.step()
    for repair in repairs:
        repair.finish()
    end = world.log.bounds(PLACE).end
    for table in tables:
        table.read()
        world.clock.advance(REPAIR_S)
        table.repair()
    assert world.log.bounds(PLACE).end == end
    world.check_readers()


def test_lost_record_is_repaired_after_five_seconds() -> None:
    world = World()
    late = world.add()
    late.step()
    world.add().finish()
    late.step()
    late.crash()
    world.repairer.read()
    end = world.log.bounds(PLACE).end
    world.clock.advance(REPAIR_S - 0.1)
    world.repairer.repair()
    assert world.log.bounds(PLACE).end == end
    world.clock.advance(0.1)
    world.repairer.repair()
    assert world.log.bounds(PLACE).end == end + 1
    world.repairer.repair()
    assert world.log.bounds(PLACE).end == end + 1


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def log(clock: ManualClock) -> MemoryLog:
    return MemoryLog(clock)


def write(log: MemoryLog, value: bytes | None, number: str = "") -> None:
    """Write a record of the name, with a number if one is given."""
    writer = log.writer()
    headers = [(NUMBER, number.encode())] if number else []
    writer.append(TOPIC, value, key=NAME.encode(), headers=headers)
    assert writer.flush(1.0)


@pytest.mark.parametrize("number", ["", "-3", "2.0", "+3", "9" * 16])
@pytest.mark.parametrize("value", [b'["theirs"]', None])
def test_record_without_a_valid_number_is_ignored_and_repaired(
    log: MemoryLog, clock: ManualClock, number: str, value: bytes | None
) -> None:
    table = table_of(log, clock)
    table.update(NAME, lambda _: ("ours",), encode)
    write(log, value, number)
    assert table.read() == table_of(log, clock).read() == {NAME: ("ours",)}
    assert table.unreadable == {}

    clock.advance(REPAIR_S)
    table.repair()
    compact(log, 2)

    assert table_of(log, clock).read() == {NAME: ("ours",)}


def test_record_without_a_value_removes_nothing(log: MemoryLog, clock: ManualClock) -> None:
    table = table_of(log, clock)
    table.update(NAME, lambda _: ("ours",), encode)
    write(log, None, "2")
    assert table.read() == {NAME: ("ours",)}


@pytest.mark.parametrize("closed", [False, True])
def test_record_that_does_not_parse_counts_by_its_number(
    log: MemoryLog, clock: ManualClock, *, closed: bool
) -> None:
    table = table_of(log, clock, closed=closed)
    table.update(NAME, lambda _: ("ours",), encode)
    write(log, b"[", "2")
    assert table.read() == ({} if closed else {NAME: ("ours",)})
    assert table.unreadable[NAME].offset == 1
    write(log, b'["made from the first, too"]', "2")
    assert table.read() == ({} if closed else {NAME: ("ours",)})

    clock.advance(REPAIR_S)
    table.repair()

    assert log.stored(PLACE).records[-1].value == b"[", "what is repaired is as it was"
    table.update(NAME, lambda _: ("ours again",), encode)
    assert table.read() == {NAME: ("ours again",)}
    assert table.unreadable == {}


def test_change_that_reads_the_table_loses_nothing(log: MemoryLog, clock: ManualClock) -> None:
    table, rival = table_of(log, clock), table_of(log, clock)
    table.update(NAME, lambda _: ("start",), encode)

    def change(value: Value | None) -> Value:
        if len(value or ()) == 1:
            rival.update(NAME, lambda value: (*(value or ()), "theirs"), encode)
            table.read()
        return (*(value or ()), "ours")

    assert table.update(NAME, change, encode) == ("start", "theirs", "ours")


def test_change_without_effect_writes_nothing(log: MemoryLog, clock: ManualClock) -> None:
    table = table_of(log, clock)
    table.update(NAME, lambda _: ("ours",), encode)
    assert table.update(NAME, lambda value: value or (), encode) == ("ours",)
    assert log.bounds(PLACE).end == 1


def test_unacknowledged_change_raises_and_may_have_been_made(clock: ManualClock) -> None:
    log = SilentLog(clock)
    table = table_of(log, clock)
    with pytest.raises(UnavailableError, match=r'the change of the thing "thing" may have been m'):
        table.update(NAME, lambda _: ("ours",), encode)
    assert table.read() == {NAME: ("ours",)}


class SilentWriter(MemoryWriter):
    """A writer whose records arrive without a delivery report."""

    def flush(self, timeout_s: float) -> bool:
        """Write everything, but report failure."""
        super().flush(timeout_s)
        return False


class SilentLog(MemoryLog):
    """A log that accepts records without a report."""

    def writer(self, **_: object) -> MemoryWriter:
        """Return a silent writer."""
        return SilentWriter(self)


def test_writer_that_always_loses_raises_conflict(clock: ManualClock) -> None:
    log = RivalLog(clock)
    table = table_of(log, clock)
    log.rival = table_of(log, clock)
    with pytest.raises(ConflictError, match=r"other programs changed .* this change was not made"):
        table.update(NAME, lambda _: ("ours",), encode)
    assert table.read() == {NAME: ("theirs",)}
    assert log.stored(PLACE).records[-1].value == b'["theirs"]'


class RivalLog(MemoryLog):
    """A log where another writer always writes first."""

    rival: Table | None = None

    def writer(self, **given: Any) -> MemoryWriter:  # noqa: ANN401 -- passed on
        """Let the rival write before the normal call."""
        rival, self.rival = self.rival, None
        if rival is not None:
            rival.update(NAME, lambda _: ("theirs",), encode)
            self.rival = rival
        return super().writer(**given)


def test_table_topic_is_not_compacted_for_an_hour(log: MemoryLog, clock: ManualClock) -> None:
    table_of(log, clock).read()
    assert log.settings([TOPIC])[TOPIC]["min.compaction.lag.ms"] == "3600000"
    assert table_topic(TOPIC).settings["cleanup.policy"] == "compact"


def test_entries_of_a_deleted_topic_are_kept_and_missing_until_restored(
    log: MemoryLog, clock: ManualClock
) -> None:
    # table     a b          a b, both missing     a b
    # topic     a1 b1 b2     (created again)       a1 b2
    table = table_of(log, clock)
    table.update("a", lambda _: ("1",), encode)
    table.update("b", lambda _: ("1",), encode)
    table.update("b", lambda _: ("2",), encode)
    saved = table.in_force()
    log.recreate(TOPIC)

    assert table.read() == {"a": ("1",), "b": ("2",)}
    assert table.missing == {"a", "b"}
    assert table_of(log, clock).read() == {}

    assert table_of(log, clock).restore(saved, replace=False) == 2
    assert table.read() == table_of(log, clock).read() == {"a": ("1",), "b": ("2",)}
    assert table.missing == set()
    assert table_of(log, clock).in_force() == saved
    table.update("b", lambda _: ("3",), encode)
    assert table_of(log, clock).in_force()["b"].number == saved["b"].number + 1


def test_entries_are_kept_while_the_deleted_topic_does_not_exist(
    log: MemoryLog, clock: ManualClock
) -> None:
    table = table_of(log, clock)
    table.update("a", lambda _: ("1",), encode)
    log.delete_topics([TOPIC])
    with pytest.raises(UnavailableError):
        table.refresh(0.0)
    assert table.refresh(0.0) == {"a": ("1",)}
    assert table.missing == {"a"}


def test_record_of_a_new_topic_overrides_the_memory_of_a_table(
    log: MemoryLog, clock: ManualClock
) -> None:
    # A service that remembers number 3 and one that starts now agree on the restored number 1.
    table = table_of(log, clock)
    table.update("a", lambda _: ("1",), encode)
    saved = table.in_force()
    table.update("a", lambda _: ("2",), encode)
    table.update("a", lambda _: ("3",), encode)
    log.recreate(TOPIC)
    table_of(log, clock).restore(saved, replace=False)
    assert table.read() == table_of(log, clock).read() == {"a": ("1",)}


def test_update_of_a_missing_entry_writes_it(log: MemoryLog, clock: ManualClock) -> None:
    table = table_of(log, clock)
    table.update("a", lambda _: ("1",), encode)
    log.recreate(TOPIC)
    table.read()
    table.update("a", lambda entry: (*(entry or ()), "2"), encode)
    assert table_of(log, clock).read() == {"a": ("1", "2")}
    assert table.missing == set()


def test_restore_refuses_different_records_unless_replace_is_set(
    log: MemoryLog, clock: ManualClock
) -> None:
    table = table_of(log, clock)
    table.update("a", lambda _: ("1",), encode)
    table.update("b", lambda _: ("1",), encode)
    saved = table.in_force()
    assert table.restore(saved, replace=False) == 0
    table.update("a", lambda _: ("2",), encode)
    other = table_of(log, clock)
    with pytest.raises(ConflictError, match="already has other records of a, nothing was written"):
        other.restore(saved, replace=False)
    assert other.read()["a"] == ("2",)
    assert other.restore(saved, replace=True) == 1
    assert table.read() == table_of(log, clock).read() == {"a": ("1",), "b": ("1",)}


def test_restore_during_another_write_raises_conflict(clock: ManualClock) -> None:
    # The other writer's record of the same name arrives between the read and the write.
    saved = {NAME: InForce(3, encode(("saved",)))}

    class Interrupted(MemoryLog):
        interrupts = False

        def writer(self, **given: Any) -> MemoryWriter:  # noqa: ANN401 -- passed on
            if self.interrupts:
                self.interrupts = False
                with self.anyway():
                    header = (NUMBER, b"9")
                    self.append(NewRecord(TOPIC, encode(("other",)), NAME.encode(), (header,), 0))
            return super().writer(**given)

    log = Interrupted(clock)
    table = table_of(log, clock)
    table.read()
    log.interrupts = True
    with pytest.raises(ConflictError, match="other programs wrote thing meanwhile"):
        table.restore(saved, replace=False)
    assert table_of(log, clock).read() == {NAME: ("other",)}


class TogetherLog(MemoryLog):
    """A log that confirms records once two threads wait for that."""

    def __init__(self) -> None:
        super().__init__()
        self.both = threading.Barrier(2, timeout=60.0)

    def writer(self, **options: Any) -> MemoryWriter:  # noqa: ANN401
        """Return a writer whose flush waits for another one's."""
        writer = super().writer(**options)
        flush = writer.flush

        def together(timeout_s: float) -> bool:
            self.both.wait()
            return flush(timeout_s)

        writer.flush = together  # type: ignore[method-assign]
        return writer


def test_changes_of_two_names_wait_for_confirmation_together() -> None:
    log = TogetherLog()
    table = table_of(log, ManualClock())
    changes = [
        threading.Thread(target=table.update, args=(name, lambda _, n=name: (n,), encode))
        for name in ("one", "other")
    ]
    for each in changes:
        each.start()
    for each in changes:
        each.join(60.0)
    assert table.read() == {"one": ("one",), "other": ("other",)}


def test_concurrent_changes_of_one_name_are_all_made() -> None:
    log = MemoryLog()
    table = table_of(log, ManualClock())

    def add(number: int) -> None:
        table.update(NAME, lambda value: (*(value or ()), str(number)), encode)

    changes = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for each in changes:
        each.start()
    for each in changes:
        each.join(60.0)
    assert sorted(table.read()[NAME]) == [str(number) for number in range(8)]
    assert sorted(table_of(log, ManualClock()).read()[NAME]) == sorted(table.read()[NAME])


def test_unconfirmed_change_raises_unknown_outcome() -> None:
    log = MemoryLog()
    table = table_of(log, ManualClock())
    table.read()

    make = log.writer
    log.writer = lambda **options: _broken(make(**options))  # type: ignore[method-assign]

    with pytest.raises(UnknownOutcomeError, match="may have been made"):
        table.update(NAME, lambda _: ("new",), encode)


def _broken(writer: MemoryWriter) -> MemoryWriter:
    def flush(timeout_s: float) -> bool:
        return timeout_s < 0

    writer.flush = flush  # type: ignore[method-assign]
    return writer
