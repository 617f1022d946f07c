"""Producers of the GPU benchmark stay a bounded distance ahead of their reader."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.config.settings import Settings
from common.core.spans import Partition
from common.embedded.kafka import EmbeddedKafka
from common.kafka.opening import open_log
from common.kafka.port import NewTopic
from load.gpus.live import LiveProducers
from load.harness.stack import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.kafka.port import Log

PLACES = [Partition("s", index) for index in range(3)]
UNIT = 10
# 2 updates of 10 records over 3 partitions.
AHEAD = 6
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def settings() -> Iterator[Settings]:
    with EmbeddedKafka() as kafka:
        yield Settings(kafka=f"embedded:{kafka.control.path}")


@pytest.fixture
def log(settings: Settings) -> Iterator[Log]:
    with closing(open_log(settings, "test")) as log:
        yield log


def test_producers_follow_their_reader_and_end_with_a_whole_update(
    settings: Settings, log: Log
) -> None:
    log.create_topics([NewTopic("s", len(PLACES))])

    def ends() -> list[int]:
        return [log.bounds(place).end for place in PLACES]

    with closing(LiveProducers(settings, PLACES, [b"a", b"b"], UNIT, 2)) as producers:
        assert producers.hold() == 0

        producers.resume()
        await_until(lambda: ends() == [AHEAD] * 3, PATIENCE_S, "all are ahead")
        producers.follow({PLACES[1]: 5})
        await_until(lambda: ends() == [6, 11, 6], PATIENCE_S, "one has followed")
        assert producers.waiting() == 23 - 5

        assert producers.hold() == 30
        producers.follow({PLACES[2]: 6})
        await_until(lambda: sum(ends()) == 30, PATIENCE_S, "the update is complete")
        assert producers.hold() == 30

    assert [record.value for record in log.tail(PLACES[0], 0).read(3, 1.0)] == [b"a", b"b", b"a"]
