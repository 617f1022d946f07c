"""Commands that write in real transactions are killed repeatedly: each record is written once."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from common.core.messages import Skipped
from common.core.spans import Partition
from common.embedded.process import Child
from common.kafka.dead_letters import encode_dead_letter
from common.kafka.log import KafkaLog
from common.kafka.port import NewTopic
from common.kafka.read import records_of
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common.embedded.apache_kafka import ApacheKafka
    from common.kafka.port import Log, LogRecord

pytest_plugins = ["tests.servers"]
pytestmark = pytest.mark.kafka

RECORDS = 6_000  # a transaction has 500
KILLS = 3
FEW = pytest.param(KILLS, marks=pytest.mark.timeout(240))
MANY = pytest.param(50, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])


def run_and_kill(start: Callable[[int], Child], log: Log, topic: str, kills: int = KILLS) -> str:
    """Kill a command several times after its first writes, then let it finish. Returns its output.

    If this process is too slow, the command has written everything, and the next one ends at once.
    """
    place, seen = Partition(topic, 0), 0
    for kill in range(kills):
        child = start(kill)

        def began(seen: int = seen, child: Child = child) -> bool:
            return not child.running() or log.bounds(place).end > seen

        await_condition(began, "some are written")
        assert log.bounds(place).end > 0, child.last_words()
        child.kill()
        seen = log.bounds(place).end
    child = start(kills)
    await_condition(lambda: not child.running(), "all are written")
    return child.last_words()


def records_in(log: Log, topic: str) -> list[LogRecord]:
    return list(records_of(log, Partition(topic, 0)))


@pytest.mark.parametrize("kills", [FEW, MANY])
def test_killed_replay_writes_each_record_once(
    apache_kafka: ApacheKafka, tmp_path: Path, kills: int
) -> None:
    # Each record has dead letters of two jobs.
    stream, fixed, count = f"replayed-{kills}", f"fixed-{kills}", max(RECORDS, 550 * kills)
    command = (sys.executable, "-m", "services.cli", "dlq", "replay", stream)
    environ = {**os.environ, "DOLL_KAFKA": apache_kafka.settings.bootstrap}

    def replay(number: int) -> Child:
        log = tmp_path / f"replay-{number}.log"
        return Child([*command, "--reason", "no label", "--to", fixed], log, environ, forks=True)

    with closing(KafkaLog(apache_kafka.settings)) as log, closing(log.writer()) as writer:
        log.create_topics([NewTopic(each) for each in (stream, f"{stream}.dlq", fixed)])
        topic_id = log.describe([stream])[stream].topic_id
        assert topic_id
        for offset in range(count):
            value, skipped = b"%d" % offset, Skipped(stream, 0, offset, "no label")
            writer.append(stream, value, key=b"k%d" % offset)
            for job in ("one", "other"):
                dead_letter = encode_dead_letter(job, skipped, offset, value, topic_id)
                writer.append(
                    dead_letter.topic,
                    dead_letter.value,
                    key=dead_letter.key,
                    headers=dead_letter.headers,
                )
        assert writer.flush(60.0)

        assert f"were written to {fixed}" in run_and_kill(replay, log, fixed, kills)
        records = records_in(log, fixed)
    values = [int(record.value or b"") for record in records]
    assert sorted(values) == list(range(count))
    first = {int(record.value or b""): dict(record.headers)["replayed_from"] for record in records}
    assert first == {value: f"{stream}[0]@{value}".encode() for value in values}


@pytest.mark.timeout(240)
def test_killed_produce_sends_each_parquet_row_once(
    apache_kafka: ApacheKafka, tmp_path: Path
) -> None:
    topic, rows = "lake", 10 * RECORDS  # a transaction has 5,000
    pq.write_table(pa.table({"id": list(range(rows))}), tmp_path / "rows.parquet")
    command = (sys.executable, "-m", "services.cli", "produce", str(tmp_path / "rows.parquet"))
    environ = {**os.environ, "DOLL_KAFKA": apache_kafka.settings.bootstrap}

    def produce(number: int) -> Child:
        log = tmp_path / f"produce-{number}.log"
        return Child([*command, "--topic", topic], log, environ, forks=True)

    with closing(KafkaLog(apache_kafka.settings)) as log:
        log.create_topics([NewTopic(topic)])
        assert "rows were sent by earlier runs" in run_and_kill(produce, log, topic)
        records = records_in(log, topic)
    assert [json.loads(record.value or b"")["id"] for record in records] == list(range(rows))
