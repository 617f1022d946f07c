"""`doll dlq replay` on a real broker, killed again and again: each record is written anew once."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.adapters.kafka import KafkaLog
from common.core.messages import Skipped
from common.core.spans import Partition
from common.embedded.process import Child
from common.ports.servers import NewTopic
from common.topics.dead_letters import letter_of
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from pathlib import Path

    from common.embedded.apache_kafka import ApacheKafka

pytest_plugins = ["tests.servers"]
pytestmark = pytest.mark.kafka

RECORDS = 6_000  # a transaction has 500
KILLS = 3


@pytest.mark.timeout(240)
def test_each_record_is_written_anew_once_however_often_the_command_is_killed(
    apache_kafka: ApacheKafka, tmp_path: Path
) -> None:
    stream, fixed = "replayed", "replayed-fixed"
    command = (sys.executable, "-m", "services.cli", "dlq", "replay", stream)
    environ = {**os.environ, "DOLL_KAFKA": apache_kafka.settings.bootstrap}

    def replay(number: int) -> Child:
        log = tmp_path / f"replay-{number}.log"
        return Child([*command, "--reason", "no label", "--to", fixed], log, environ)

    with closing(KafkaLog(apache_kafka.settings)) as log, closing(log.writer()) as writer:
        log.create_topics([NewTopic(each) for each in (stream, f"{stream}.dlq", fixed)])
        for offset in range(RECORDS):
            value = b"%d" % offset
            writer.append(stream, value, key=b"k%d" % offset)
            letter = letter_of("job", Skipped(stream, 0, offset, "no label"), offset, value)
            writer.append(letter.topic, letter.value, key=letter.key, headers=letter.headers)
        assert writer.flush(60.0)

        place, seen = Partition(fixed, 0), 0
        for kill in range(KILLS):
            child = replay(kill)

            def began(seen: int = seen, child: Child = child) -> bool:
                assert child.running() or log.bounds(place).end > seen
                return log.bounds(place).end > seen

            await_condition(began, "some are written")
            child.kill()
            seen = log.bounds(place).end
        child = replay(KILLS)
        await_condition(lambda: not child.running(), "all are written")
        assert f"were written to {fixed}" in child.last_words()

        with closing(log.tail(place, 0)) as tail:
            records = []
            while tail.position() < log.bounds(place).end:
                records += tail.read(10_000, 1.0)
    values = [int(record.value or b"") for record in records]
    assert sorted(values) == list(range(RECORDS))
    first = {int(record.value or b""): dict(record.headers)["replayed_from"] for record in records}
    assert first == {value: f"{stream}[0]@{value}".encode() for value in values}
