"""A join on the log in memory: each left record one sample, whoever is killed or stands still."""

from __future__ import annotations

import json
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.spans import Partition
from common.errors import ConflictError, UnavailableError, UserError
from common.jobs.build import codec_of
from common.jobs.spec import parse_job
from common.joining.machine import Times
from common.joining.records import JoinSpec, Records
from common.kafka.dead_letters import read_letters
from common.kafka.memory import MemoryLog, MemoryTransactions
from common.kafka.names import joins_topic
from common.kafka.read import records_of
from common.ports.servers import NewTopic
from common.telemetry.logging import event_logger
from common.telemetry.metrics.joiner import JoinerMetrics
from services.joiner.loop import Joiner, prepare
from services.joiner.partition import Shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.ports.servers import NewRecord

NOW_S = 1.8e9
TO = "samples"
SPEC = JoinSpec(
    "shown",
    "clicks",
    TO,
    "id",
    "of",
    Times(10_000, 0, 5_000, idle_s=3.0),
    {"label": "0"},
    {"label": "1"},
    "at",
    "at",
)


JOB = f"""
name: clicked
streams: [{TO}]
records:
  codec: json
  fields:
    features: {{dtype: float32, from: [id, at], scale: [1, 1.0e-9]}}
    label: {{dtype: int64, map: {{"0": 0, "yes": 1}}}}
task: {{name: logistic-regression, classes: 2}}
batch_size: 1
group_size: 1
optimizer: {{name: sgd, learning_rate: 1.0}}
"""


class UncertainLog(MemoryLog):
    """Whose transactions may fail, and nobody knows whether they were written.

    Or who writes stands still just before, and others have meanwhile what was its.
    """

    chance: Random | None = None
    meanwhile: Callable[[], None] | None = None

    def transactions(self, name: str) -> MemoryTransactions:
        """As a log's."""
        log = self

        class Uncertain(MemoryTransactions):
            def write(self, records: Sequence[NewRecord]) -> None:
                fate = log.chance.randint(0, 9) if log.chance else 9
                if fate == 0:
                    raise UnavailableError("nothing was written")
                if fate <= 3 and log.meanwhile is not None:
                    log.meanwhile()
                super().write(records)
                if fate == 1:
                    raise UnavailableError("all was written")

        super().transactions(name)
        uncertain = self._names[name] = Uncertain(self, name)
        return uncertain


class World:
    """Two topics, and processes that join them, on one clock."""

    def __init__(self, partitions: int = 2) -> None:
        self.log = UncertainLog()
        self.now = 100.0
        self.metrics = JoinerMetrics(TO)
        self.log.create_topics([NewTopic(SPEC.left, partitions), NewTopic(SPEC.right, partitions)])
        prepare(self.log, SPEC)
        self.joiners = dict[str, Joiner]()
        self._writer = self.log.writer()

    def start(self, name: str, spec: JoinSpec = SPEC) -> Joiner:
        """Another process."""
        records = Records(spec, lambda: NOW_S)
        shared = Shared(self.log, spec, records, event_logger("joiner"))
        self.joiners[name] = Joiner(shared, self.metrics, name, lambda: self.now)
        return self.joiners[name]

    def kill(self, name: str) -> None:
        """End a process without a word."""
        del self.joiners[name]
        self.log.lose(joins_topic(TO), name)

    def send(self, topic: str, value: object, partition: int = 0, key: bytes | None = None) -> None:
        """Write a record."""
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self._writer.append(topic, data, partition=partition, key=key)

    def drain(self) -> None:
        """Let time pass until all windows are closed."""
        for _ in range(150):
            for joiner in self.joiners.values():
                while joiner.turn(0.0):
                    pass
            self.now += 0.4

    def samples(self) -> list[tuple[dict[str, Any], dict[str, bytes]]]:
        """All of them, with their headers."""
        return [
            (json.loads(record.value or b""), dict(record.headers))
            for place in self.log.partitions(TO)
            for record in records_of(self.log, place)
        ]


@pytest.fixture
def world() -> World:
    return World()


def shown(number: int, at_s: float) -> dict[str, Any]:
    return {"id": number, "at": NOW_S - 10_000 + at_s, "x": [number]}


def click(number: int, at_s: float, **others: object) -> dict[str, Any]:
    return {"of": str(number), "at": NOW_S - 10_000 + at_s, **others}


def test_a_left_record_becomes_a_sample_with_what_the_right_one_says(world: World) -> None:
    world.start("j1")
    world.send(SPEC.left, shown(1, 0.0), key=b"k")
    world.send(SPEC.left, shown(2, 1.0))
    world.send(SPEC.left, shown(3, 2.0))
    world.send(SPEC.right, click(1, 5.0))
    world.send(SPEC.right, click(3, 5.0, label=7, other="left out"))
    world.drain()

    found = {sample["id"]: (sample["label"], headers) for sample, headers in world.samples()}
    assert found == {
        1: (1, {"left": b"shown[0]@0", "right": b"clicks[0]@0"}),
        2: (0, {"left": b"shown[0]@1"}),
        3: (7, {"left": b"shown[0]@2", "right": b"clicks[0]@1"}),
    }
    sample = next(sample for sample, _ in world.samples() if sample["id"] == 1)
    assert sample == {**shown(1, 0.0), "label": 1}
    exposed = world.metrics.meters.exposed().decode()
    assert 'doll_join_samples_total{outcome="joined",to="samples"} 2.0' in exposed
    assert 'doll_join_samples_total{outcome="alone",to="samples"} 1.0' in exposed
    assert 'doll_join_waiting_records{side="left",to="samples"} 0.0' in exposed


def test_a_job_reads_samples_by_its_fields(world: World) -> None:
    world.start("j1")
    for number in range(4):
        world.send(SPEC.left, shown(number, 0.0))
    world.send(SPEC.right, click(2, 1.0, label="yes"))
    world.drain()
    values = [
        record.value
        for place in world.log.partitions(TO)
        for record in records_of(world.log, place)
    ]
    decoded = codec_of(parse_job(JOB)).decode(values)

    assert decoded.skipped == []
    rows = zip(decoded.records["features"].tolist(), decoded.records["label"], strict=True)
    assert sorted((features[0], label) for features, label in rows) == [
        *((0.0, 0), (1.0, 0), (2.0, 1), (3.0, 0))
    ]


BAD = [
    (b"not JSON", "malformed"),
    (b"[1]", "a record is an object, not a list"),
    ({"at": 1.0}, "id: is null or absent"),
    ({"id": [1], "at": 1.0}, "id: is a list"),
    ({"id": 1}, "at: is null or absent"),
    ({"id": 1, "at": 1.8e12}, "ahead of the clock"),
    ({"id": 1, "at": "yesterday"}, "not known"),
    ({"id": "x" * 2_000, "at": 1.0}, "its key has more than 1000 bytes"),
    ({"id": 1, "at": 1.0, "x": "x" * 600_000}, "more than the 500000 bytes that can be joined"),
]


def test_what_cannot_be_joined_becomes_a_dead_letter_and_stops_nothing(world: World) -> None:
    world.start("j1")
    for value, _ in BAD:
        world.send(SPEC.left, value)
    world.send(SPEC.left, shown(1, 0.0))
    world.send(SPEC.right, click(1, 0.0, label=None))
    world.drain()

    letters = read_letters(world.log, SPEC.left).letters
    assert [each.span.start for each in letters] == list(range(len(BAD)))
    assert {each.job for each in letters} == {TO}
    for letter, (_, reason) in zip(letters, BAD, strict=True):
        assert reason in letter.reason
    assert [sample["label"] for sample, _ in world.samples()] == [1]


def test_a_partition_waits_whose_samples_are_too_large_and_the_others_go_on(world: World) -> None:
    world.log.configure(TO, {"max.message.bytes": "200"})
    world.start("j1")
    world.send(SPEC.left, shown(1, 0.0), partition=0)
    world.send(SPEC.left, shown(2, 1.0) | {"text": "x" * 300}, partition=0)
    world.send(SPEC.left, shown(3, 0.0), partition=1)
    world.drain()
    written = {sample["id"] for sample, _ in world.samples()}
    assert 3 in written
    assert 2 not in written

    world.log.configure(TO, {"max.message.bytes": "1000"})
    world.drain()
    assert sorted(sample["id"] for sample, _ in world.samples()) == [1, 2, 3]


def test_a_right_record_without_the_field_is_a_dead_letter_where_nothing_says_what_it_means(
    world: World,
) -> None:
    world.start("j1", msgspec.structs.replace(SPEC, joined={}))
    world.send(SPEC.left, shown(1, 0.0))
    world.send(SPEC.right, click(1, 0.0))
    world.drain()

    [letter] = read_letters(world.log, SPEC.right).letters
    assert letter.reason == "label: is null or absent; `--joined label=1` says what it means"
    assert [sample["label"] for sample, _ in world.samples()] == [0]


class Chaos:
    """Does anything to a world, in any order."""

    def __init__(
        self, world: World, chance: Random, waiting: list[tuple[str, object, int]]
    ) -> None:
        self._world = world
        self._chance = chance
        self._waiting = waiting  # to be sent
        self._started = 0

    def start(self) -> None:
        """Another process, of three at most."""
        if len(self._world.joiners) < 3:
            self._started += 1
            self._world.start(f"j{self._started}")

    def send(self) -> None:
        """The next record."""
        if self._waiting:
            self._world.send(*self._waiting.pop())

    def let_time_pass(self) -> None:
        """For a moment, or for longer than what was decided waits for more."""
        self._world.now += self._chance.choice((0.05, 0.2, 0.6))

    def rebalance(self) -> None:
        """All partitions go to the next."""
        if self._world.joiners:
            self._world.log.rebalance(joins_topic(TO))

    def turn(self) -> None:
        """Of one."""
        if name := self._any():
            self._world.log.meanwhile = partial(self._others_take_over, name)
            self._world.joiners[name].turn(0.0)
            self._world.log.meanwhile = None

    def kill(self) -> None:
        """End one."""
        if name := self._any():
            self._world.kill(name)

    def _others_take_over(self, name: str) -> None:
        self._world.log.meanwhile = None
        self._world.log.lose(joins_topic(TO), name)
        others = [joiner for other, joiner in self._world.joiners.items() if other != name]
        for joiner in others * self._chance.randint(0, 8):
            joiner.turn(0.0)
            self._world.now += 0.05

    def _any(self) -> str | None:
        names = sorted(self._world.joiners)
        return self._chance.choice(names) if names else None


@given(st.builds(Random, st.integers(0, 2**32)))
def test_each_left_record_becomes_one_sample_whoever_is_killed_or_stands_still(
    chance: Random,
) -> None:
    world, numbers = World(), range(chance.randint(1, 30))
    world.log.chance = chance
    waiting = [
        *((SPEC.left, shown(each, each * 5.0), each % 2) for each in numbers),
        *((SPEC.right, click(each, each * 5.0 + 1), each % 2) for each in numbers if each % 3),
    ]
    waiting.sort(key=lambda each: each[1]["at"], reverse=True)
    chaos = Chaos(world, chance, list(waiting))
    steps = (*[chaos.turn] * 6, chaos.send, chaos.send, chaos.let_time_pass, chaos.start)
    steps += (chaos.rebalance, chaos.kill)
    for _ in range(150):
        chance.choice(steps)()
    for _ in waiting:
        chaos.send()
    world.log.chance = None
    world.start("last")
    world.drain()

    samples = [sample for sample, _ in world.samples()]
    assert sorted(sample["id"] for sample in samples) == list(numbers)
    assert {sample["id"]: sample["label"] for sample in samples} == {
        each: int(each % 3 > 0) for each in numbers
    }


def test_sides_that_are_partitioned_otherwise_are_refused() -> None:
    world = World()
    world.log.create_topics([NewTopic("fewer", 1)])
    with pytest.raises(UserError, match="shown has 2 partitions and fewer 1: records of one key"):
        prepare(world.log, msgspec.structs.replace(SPEC, right="fewer"))
    with pytest.raises(UserError, match="--left, --right: there is no"):
        prepare(world.log, msgspec.structs.replace(SPEC, left="nothing"))
    world.log.create_topics([NewTopic("shown3", 3), NewTopic("clicks3", 3)])
    with pytest.raises(UserError, match="have 3 partitions, and had 2 when the join to samples"):
        prepare(world.log, msgspec.structs.replace(SPEC, left="shown3", right="clicks3"))


def test_another_join_to_the_same_topic_is_refused(world: World) -> None:
    world.start("j1")
    world.send(SPEC.left, shown(1, 0.0))
    world.drain()
    world.kill("j1")
    world.start("j2", msgspec.structs.replace(SPEC, right_key="id"))
    with pytest.raises(ConflictError, match="samples has samples of shown by id at at and clicks"):
        world.drain()


def test_other_windows_are_no_other_join(world: World) -> None:
    world.start("j1")
    world.send(SPEC.left, shown(1, 0.0))
    world.drain()
    world.kill("j1")
    world.start("j2", msgspec.structs.replace(SPEC, times=Times(1_000, 0, 0, 1.0)))
    world.send(SPEC.left, shown(2, 0.0))
    world.drain()
    assert sorted(sample["id"] for sample, _ in world.samples()) == [1, 2]


def test_what_expired_unread_is_told_and_a_topic_made_anew_is_refused(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.start("j1")
    world.send(SPEC.left, shown(1, 0.0))
    world.drain()
    world.kill("j1")
    for number in range(2, 5):
        world.send(SPEC.left, shown(number, 100.0))
    world.log.expire(Partition(SPEC.left, 0), 3)
    world.start("j2")
    world.drain()
    assert sorted(sample["id"] for sample, _ in world.samples()) == [1, 4]
    assert "records_expired" in [record.message for record in caplog.records]

    world.kill("j2")
    world.log.recreate(SPEC.left)
    world.start("j3")
    with pytest.raises(ConflictError, match=r"delete doll\.samples\.joins to begin anew"):
        world.drain()
