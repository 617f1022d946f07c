"""The `Transactions` port: all records of a transaction or none, one owner of a name at a time."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.core.spans import Partition
from common.errors import DeliveryError, RecordTooLargeError, UnknownTopicError
from common.kafka.port import NewRecord, NewTopic
from tests.contract.log_fixtures import eventually, everything

if TYPE_CHECKING:
    from common.kafka.port import LogRecord
    from tests.contract.log_fixtures import Rig

pytest_plugins = ["tests.servers", "tests.contract.log_fixtures"]

HEADERS = (("said", b"yes"), ("by", b"a test"))


def read(rig: Rig, topic: str, count: int) -> list[LogRecord]:
    """Return all records of a topic once it has this many."""
    found: list[LogRecord] = []

    def is_complete() -> bool:
        found[:] = everything(rig.log, Partition(topic, 0))
        return len(found) >= count

    eventually(is_complete)
    return found


def test_transaction_writes_records_and_headers_to_several_topics(rig: Rig, fresh: str) -> None:
    other = f"{fresh}-other"
    rig.log.create_topics([NewTopic(fresh), NewTopic(other)])
    with closing(rig.log.transactions(fresh)) as transactions:
        transactions.write([NewRecord(fresh, b"a", b"k", HEADERS), NewRecord(other, None, b"k")])
        (record,) = read(rig, fresh, 1)
        assert (record.key, record.value, record.headers) == (b"k", b"a", HEADERS)
        (record,) = read(rig, other, 1)
        assert (record.key, record.value, record.headers) == (b"k", None, ())


def test_new_owner_of_transactional_name_fences_the_previous(owned_rig: Rig, fresh: str) -> None:
    rig = owned_rig
    rig.log.create_topics([NewTopic(fresh)])
    with closing(rig.log.transactions(fresh)) as first:
        first.write([NewRecord(fresh, b"a")])
        with closing(rig.log.transactions(fresh)) as second:
            with pytest.raises(DeliveryError):
                first.write([NewRecord(fresh, b"b")])
            second.write([NewRecord(fresh, b"c")])
    assert [each.value for each in read(rig, fresh, 2)] == [b"a", b"c"]


def test_failed_transaction_writes_nothing_and_next_succeeds(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh)])
    with closing(rig.log.transactions(fresh)) as transactions:
        with pytest.raises(UnknownTopicError):
            transactions.write([NewRecord(fresh, b"a"), NewRecord(f"{fresh}-none", b"b")])
        with pytest.raises(RecordTooLargeError):
            transactions.write([NewRecord(fresh, b"a"), NewRecord(fresh, bytes(2_000_000))])
        transactions.write([NewRecord(fresh, b"c")])
    assert [each.value for each in read(rig, fresh, 1)] == [b"c"]
