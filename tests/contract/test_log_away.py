"""All parts of the log while the broker is unavailable, and after it has come back."""

from __future__ import annotations

import threading
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from common.core.spans import Assigned, Span
from common.errors import UnavailableError
from common.kafka.port import Bounds, Fetched
from tests.contract.log_fixtures import PATIENCE_S, eventually, everything, filled, on_servers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.core.spans import Partition
    from common.kafka.port import LogRecord, StreamReader
    from tests.contract.log_fixtures import Rig

pytest_plugins = ["tests.servers", "tests.contract.log_fixtures"]


@contextmanager
def away(rig: Rig) -> Iterator[None]:
    rig.go_away()
    try:
        yield
    finally:
        rig.come_back()


def test_records_appended_during_an_outage_arrive_once(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 10)
    offsets: list[int | None] = []
    with closing(rig.log.writer()) as writer:
        writer.append(fresh, b"10", on_delivered=offsets.append)
        assert writer.flush(PATIENCE_S)
        with away(rig):
            for i in range(11, 500):
                writer.append(fresh, b"%d" % i, on_delivered=offsets.append)
            assert not writer.flush(0.2)
            assert offsets == [10]
        assert writer.flush(PATIENCE_S)
    assert offsets == list(range(10, 500))
    values = [record.value for record in everything(rig.log, partition)]
    assert values == [b"%d" % i for i in range(500)]


@on_servers
def test_full_writer_waits_or_raises_and_others_work(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 1)
    with (
        closing(rig.log.writer(waits=False, max_bytes=11_000)) as hasty,
        closing(rig.log.writer(max_bytes=11_000)) as patient,
    ):
        for writer in (hasty, patient):
            writer.append(fresh, b"known")
            assert writer.flush(PATIENCE_S)

        def append_ten() -> None:
            for _ in range(10):
                patient.append(fresh, bytes(2_400))

        waiting = threading.Thread(target=append_ten)
        with away(rig):
            written = 4
            for _ in range(written):
                hasty.append(fresh, bytes(2_400))
            with pytest.raises(UnavailableError):
                hasty.append(fresh, bytes(2_400))
            waiting.start()
            # A single record always fits.
            rig.writer.append(fresh, bytes(20_000))
            assert not patient.flush(0.05) or waiting.is_alive()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
        for writer in (hasty, patient, rig.writer):
            assert writer.flush(PATIENCE_S)
        hasty.append(fresh, bytes(2_400))  # there is room again
        assert hasty.flush(PATIENCE_S)
    sizes = [len(record.value or b"") for record in everything(rig.log, partition)]
    assert sizes.count(2_400) == written + 10 + 1
    assert sizes.count(20_000) == 1


def test_readers_report_an_outage_and_resume_after_it(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 10)
    span = Span(*partition, 2, 8)
    records: list[LogRecord] = []
    with closing(rig.log.spans()) as spans, closing(rig.log.tail(partition, 10)) as tail:
        assert spans.read(span, PATIENCE_S).offsets == list(range(2, 8))
        assert tail.read(10, 0.05) == []

        def arrived() -> bool:
            try:
                records.extend(tail.read(10, 0.1))
            except UnavailableError:
                return False  # the caller tries again
            return bool(records)

        def is_away() -> bool:
            try:
                tail.read(10, 0.1)
            except UnavailableError:
                return True
            return False

        with away(rig):
            eventually(is_away)
            with pytest.raises(UnavailableError):
                spans.read(span, 0.2)
            with pytest.raises(UnavailableError):
                rig.log.bounds(partition)
            with pytest.raises(UnavailableError):
                rig.log.ends([partition])
        assert spans.read(span, PATIENCE_S).offsets == list(range(2, 8))
        eventually(lambda: rig.log.bounds(partition) == Bounds(0, 10))
        rig.writer.append(fresh, b"10")
        assert rig.writer.flush(PATIENCE_S)
        eventually(arrived)
    assert [record.offset for record in records] == [10]


class Patient:
    """A stream that is polled in any state of the broker, and placed at its last position."""

    def __init__(self, reader: StreamReader) -> None:
        self.offsets: list[int] = []
        self._reader = reader

    def found_nobody(self) -> bool:
        """Poll once; return True if the broker was unavailable."""
        try:
            events = self._reader.poll(100, 0.1)
        except UnavailableError:
            return True
        for event in events:
            if isinstance(event, Fetched):
                self.offsets += event.offsets
            # The group may assign the partitions again after it forgot this member.
            elif isinstance(event, Assigned):
                self._reader.place(dict.fromkeys(event.partitions, len(self.offsets)))
        return False

    def has_read(self, partition: Partition, count: int) -> bool:
        """Poll once; return True if this many records have been read."""
        self.found_nobody()
        assert len(self.offsets) <= count, f"too many of {partition}"
        return len(self.offsets) == count


def test_stream_resumes_after_an_outage(group_rig: Rig, fresh: str) -> None:
    partition = filled(group_rig, fresh, 10)
    with closing(group_rig.log.stream(f"{fresh}-group", [fresh], "alone")) as reader:
        patient = Patient(reader)
        eventually(lambda: patient.has_read(partition, 10))
        with away(group_rig):
            eventually(patient.found_nobody)
        for i in range(10, 20):
            group_rig.writer.append(fresh, b"%d" % i)
        assert group_rig.writer.flush(PATIENCE_S)
        eventually(lambda: patient.has_read(partition, 20))
    assert patient.offsets == list(range(20))
