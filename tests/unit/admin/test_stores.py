"""The thread that follows jobs and keys."""

from __future__ import annotations

import asyncio
from contextlib import closing

from common.api.keys import KeyStore
from common.core.spans import Partition
from common.jobs.spec import parse_job
from common.jobs.store import JobStore
from common.ports.servers import NewTopic
from common.testing.log import MemoryLog
from common.topics.names import JOBS, KEYS
from common.topics.table import NUMBER
from services.admin.stores import Stores
from tests.unit.jobs.test_spec import TEXT


def test_lost_records_that_stand_last_are_repaired() -> None:
    log = MemoryLog(lambda: 0.0)  # so all that is written is old
    log.create_topics([NewTopic("clinic-a"), NewTopic("clinic-b")])
    job = JobStore(log).submit(parse_job(TEXT))
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
    assert JobStore(log).read() == {"digits": job}
    assert KeyStore(log).read() == {"ci": key}
