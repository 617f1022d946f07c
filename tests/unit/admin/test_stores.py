"""Threads that follow jobs and keys, and threads that write jobs."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.api.keys import KeyStore
from common.core.spans import Partition
from common.errors import UnavailableError, UnknownOutcomeError
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.kafka.memory import MemoryLog
from common.kafka.names import JOBS, KEYS
from common.kafka.port import NewTopic
from common.kafka.table import NUMBER
from services.admin import stores as module
from services.admin.stores import Stores
from tests.unit.jobs.test_spec import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.jobs.store import JobRecord


def test_lost_records_are_repaired_by_writing_the_previous_value() -> None:
    # All records have an old time.
    log = MemoryLog(lambda: 0.0)
    log.create_topics([NewTopic("clinic-a"), NewTopic("clinic-b")])
    job = JobOperations(log).submit(parse_job(TEXT))
    _, key = KeyStore(log).create("ci", "viewer")
    with closing(log.writer()) as writer:
        for topic, name in ((JOBS, "digits"), (KEYS, "ci")):
            writer.append(topic, b"{}", key=name.encode(), headers=[(NUMBER, b"1")])
    stores = Stores(lambda: log, lambda: 1000.0)

    asyncio.run(stores.write(lambda store: store.read()))
    stores.close()

    for topic in (JOBS, KEYS):
        first, _lost, last = log.stored(Partition(topic, 0)).records
        assert last.value == first.value
        assert dict(last.headers)[NUMBER] == b"2"
    assert JobOperations(log).read() == {"digits": job}
    assert KeyStore(log).read() == {"ci": key}


def test_write_waits_until_jobs_have_been_read() -> None:
    log, may_open = MemoryLog(), threading.Event()

    def open_log() -> MemoryLog:
        assert may_open.wait(60.0)
        return log

    stores = Stores(open_log, lambda: 1000.0)

    async def change() -> dict[str, JobRecord]:
        asked = asyncio.create_task(stores.write(lambda store: store.read()))
        done, _ = await asyncio.wait([asked], timeout=0.2)
        assert not done
        may_open.set()
        return await asked

    assert asyncio.run(change()) == {}
    stores.close()


def test_writes_run_concurrently() -> None:
    stores = Stores(MemoryLog, time.time)
    both = threading.Barrier(2, timeout=60.0)

    async def write() -> list[int]:
        return await asyncio.gather(*(stores.write(lambda _: both.wait()) for _ in range(2)))

    with closing(stores):
        asyncio.run(stores.ready())
        assert sorted(asyncio.run(write())) == [0, 1]


def test_write_that_did_not_start_in_time_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITERS", 1)
    monkeypatch.setattr(module, "WRITE_S", 0.2)
    stores, done = Stores(MemoryLog, time.time), threading.Event()
    made = list[str]()

    def hang(_: JobOperations) -> None:
        assert done.wait(60.0)
        made.append("first")

    async def refused(act: Callable[[JobOperations], None]) -> UnavailableError:
        with pytest.raises(UnavailableError) as error:
            await stores.write(act)
        return error.value

    async def write() -> None:
        # A busy machine may need several attempts until one starts in time. The service cannot
        # tell if a change that has started will be carried out. This one is.
        while not isinstance(first := await refused(hang), UnknownOutcomeError):
            pass
        assert "may have been made" in str(first)
        second = await refused(lambda _: made.append("second"))
        assert not isinstance(second, UnknownOutcomeError)
        assert "nothing was changed" in str(second)
        done.set()
        monkeypatch.setattr(module, "WRITE_S", 60.0)
        await stores.write(lambda _: made.append("third"))

    with closing(stores):
        asyncio.run(stores.ready())
        asyncio.run(write())
    assert made == ["first", "third"]


def test_write_is_acknowledged_even_if_it_cannot_be_read_back_at_once() -> None:
    log = MemoryLog()
    log.create_topics([NewTopic("clinic-a"), NewTopic("clinic-b")])
    stores = Stores(lambda: log, time.time)

    def submit(store: JobOperations) -> JobRecord:
        record = store.submit(parse_job(TEXT))
        log.go_away()
        return record

    with closing(stores):
        asyncio.run(stores.ready())
        record = asyncio.run(stores.write(submit))
        log.come_back()
    assert JobOperations(log).read() == {"digits": record}
