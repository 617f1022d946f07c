"""`doll join` on a real broker: each left record one sample, though processes die and stand still.

j1    ███████ killed
j2    █████████████████ frozen          awake: refused, and goes on
j3            ███████████████████████████████
sent  ▒▒▒▒▒▒▒▒  ▒▒▒▒▒▒▒▒   ▒▒▒▒▒▒▒▒       ▒▒▒▒▒▒▒▒
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from common.embedded.process import Child
from common.kafka.log import KafkaLog
from common.kafka.names import joins_topic
from common.kafka.read import records_of
from common.ports.servers import NewTopic
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.embedded.apache_kafka import ApacheKafka

pytest_plugins = ["tests.servers"]
pytestmark = pytest.mark.kafka

LEFT, RIGHT, TO = "joined-impressions", "joined-clicks", "joined-samples"
PHASE = 1_000  # records that are sent at once
FIRST_S = 1.7e9
OPTIONS = (
    *("--left", LEFT, "--right", RIGHT, "--to", TO, "--key", "id=impression.id", "--time", "at"),
    *("--within", "10s", "--grace", "1s", "--idle", "1h"),  # so the clock decides nothing
    *("--default", "label=0", "--joined", "label=1"),
)


class Joined:
    """Two topics, and what has become of them."""

    def __init__(self, log: KafkaLog, folder: Path, bootstrap: str) -> None:
        self._log = log
        self._folder = folder
        self._environ = {
            **os.environ,
            "DOLL_KAFKA": bootstrap,
            "DOLL_KAFKA_GROUP_PROTOCOL": "consumer",
        }
        self.sent = 0
        self.processes = dict[str, Child]()
        log.create_topics([NewTopic(LEFT, 2), NewTopic(RIGHT, 2), NewTopic(TO, 3)])
        self._tails = [log.tail(place, 0) for place in log.partitions(TO)]
        self._samples = list[dict[str, Any]]()

    def start(self, name: str) -> None:
        """Another process."""
        command = (sys.executable, "-m", "services.cli", "join", *OPTIONS, "--name", name)
        self.processes[name] = Child(
            command, self._folder / f"{name}.log", self._environ, forks=True
        )

    def send(self) -> None:
        """Records of both sides; of each third impression there is no click."""
        with closing(self._log.writer()) as writer:
            for number in range(self.sent, self.sent + PHASE):
                at_s, partition = FIRST_S + number / 10, number % 2
                shown = {"id": number, "at": at_s, "x": [number, 0.5]}
                writer.append(LEFT, json.dumps(shown).encode(), partition=partition)
                if number % 3:
                    click = {"impression": {"id": str(number)}, "at": at_s + 5.0}
                    writer.append(RIGHT, json.dumps(click).encode(), partition=partition)
            assert writer.flush(60.0)
        self.sent += PHASE

    def close_windows(self) -> None:
        """Records of both sides and partitions that are much later."""
        with closing(self._log.writer()) as writer:
            for partition in range(2):
                late = {"id": "", "impression": {"id": ""}, "at": FIRST_S + self.sent}
                for topic in (LEFT, RIGHT):
                    writer.append(topic, json.dumps(late).encode(), partition=partition)
            assert writer.flush(60.0)

    def samples(self) -> list[dict[str, Any]]:
        """All that there are by now."""
        for tail in self._tails:
            self._samples += [json.loads(record.value or b"") for record in tail.read(5_000, 0.0)]
        return self._samples

    def await_all_but_the_last(self) -> None:
        """Wait until what was sent has become samples, but for windows that may still be open."""

        def so() -> bool:
            left = [name for name, child in self.processes.items() if not child.running()]
            assert not left, self.processes[left[0]].last_words()
            closed = {sample["id"] for sample in self.samples()}
            return closed >= set(range(self.sent - PHASE // 2))

        await_condition(so, f"{self.sent - PHASE // 2} samples are there", 90.0)


@pytest.fixture
def joined(apache_kafka: ApacheKafka, tmp_path: Path) -> Iterator[Joined]:
    with closing(KafkaLog(apache_kafka.settings)) as log:
        made = Joined(log, tmp_path, apache_kafka.settings.bootstrap)
        yield made
        for child in made.processes.values():
            child.kill()


@pytest.mark.timeout(300)
def test_each_left_record_becomes_one_sample_though_processes_die_and_stand_still(
    joined: Joined, apache_kafka: ApacheKafka
) -> None:
    joined.start("j1")
    joined.start("j2")
    joined.send()
    joined.await_all_but_the_last()

    joined.send()
    joined.processes.pop("j1").kill()
    joined.start("j3")
    joined.await_all_but_the_last()

    os.kill(joined.processes["j2"].pid, signal.SIGSTOP)
    joined.send()
    joined.await_all_but_the_last()

    os.kill(joined.processes["j2"].pid, signal.SIGCONT)
    joined.send()
    joined.close_windows()
    await_condition(lambda: len(joined.samples()) >= joined.sent, "all windows are closed", 60.0)

    samples = joined.samples()
    assert sorted(sample["id"] for sample in samples) == list(range(joined.sent))
    expected = {number: int(number % 3 > 0) for number in range(joined.sent)}
    assert {sample["id"]: sample["label"] for sample in samples} == expected
    assert {tuple(sample["x"]) for sample in samples} == {(each, 0.5) for each in expected}
    with closing(KafkaLog(apache_kafka.settings)) as log:
        kept = {
            record.key or b"": record.value
            for place in log.partitions(joins_topic(TO))
            for record in records_of(log, place)
        }
    waiting = [json.loads(value) for key, value in kept.items() if value and b"left" in key]
    assert {each["key"] for each in waiting} == {""}
