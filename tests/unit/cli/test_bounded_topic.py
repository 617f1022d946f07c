"""What a small Kafka keeps: nothing is sent that would have it drop what a job still needs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.messages import LeaderStatus, ModelId
from common.core.snapshots import Snapshot
from common.errors import OutsideError, UnavailableError, UserError
from common.jobs.spec import parse_job
from common.jobs.store import JobStore
from common.kafka.memory import MemoryLog
from common.ports.servers import NewTopic
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.snapshot_file import SnapshotFile, to_bytes
from services.cli.commands.bounded_topic import BoundedTopic
from tests.unit.cli.test_job import JOB

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.messages import Positions
    from common.core.spans import Partition

TOPIC = "clinic-a"
KEEPS = 10_000
RECORD = 100  # bytes; with what Kafka adds to it 180, of the 8,750 that may be used


@dataclass
class World:
    """A Kafka that keeps `KEEPS` bytes of each partition, and a job that trains while one waits."""

    partitions: int = 1
    trains: int = 0  # records of each partition, at each wait
    log: MemoryLog = field(default_factory=MemoryLog)
    redis: MemoryRedis = field(default_factory=MemoryRedis)
    trained: Positions = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    waits: int = 0
    happens: Callable[[], None] = lambda: None  # at each wait

    def __post_init__(self) -> None:
        self.log.create_topics([NewTopic(TOPIC, self.partitions)])
        self.places = self.log.partitions(TOPIC)
        self.book = JobStore(self.log)
        self.board = MemoryBoard(self.redis, "digits")

    def submit(self) -> None:
        """A job reads the topic from its beginning."""
        self.trained = dict(self.book.submit(parse_job(JOB)).first)

    def write(self, value: bytes, partition: int = 0) -> None:
        """As another program does."""
        writer = self.log.writer()
        writer.append(TOPIC, value, partition=partition)
        assert writer.flush(1.0)
        self.drop()

    def topic(self) -> BoundedTopic:
        """What is tried."""
        return BoundedTopic(
            self.log,
            self.log.writer(),
            TOPIC,
            keeps_bytes=KEEPS,
            book=self.book,
            open_board=lambda job: MemoryBoard(self.redis, job),
            wait=self.wait,
            say=self.said.append,
        )

    def wait(self, _: float) -> None:
        """Let some time pass."""
        self.waits += 1
        assert self.waits < 10_000, "it waits for ever"
        self.happens()
        for place in self.trained:
            end = self.log.bounds(place).end
            self.trained[place] = min(end, self.trained[place] + self.trains)
        with suppress(UnavailableError):
            self.tell()

    def tell(self) -> None:
        """A checkpoint covers nothing yet; the hot snapshot covers what is trained."""
        self.board.put_leader_status(LeaderStatus(3, 0, self.trained, 0, 0, 1, {}))
        made = Snapshot(3, ModelId(3, 1), 0, 0, dict(self.trained))
        self.board.put_snapshot(3, to_bytes(SnapshotFile(made, b"weights")), "c1")

    def drop(self) -> None:
        """What such a Kafka does after each record, at its worst: each is a batch of its own."""
        for place in self.places:
            sizes = [
                len(each.value or b"") + 77
                for each in self.log.tail(place, self.start(place)).read(9999, 0)
            ]
            while sum(sizes) > KEEPS:
                del sizes[0]
            self.log.expire(place, self.log.bounds(place).end - len(sizes))

    def start(self, place: Partition) -> int:
        """The first offset that is still there."""
        return self.log.bounds(place).start


def send(topic: BoundedTopic, records: int) -> None:
    for _ in range(records):
        topic.send(b"." * RECORD)


def test_without_a_job_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    world = World(partitions=2)
    topic = world.topic()
    topic.check(96, RECORD)
    with pytest.raises(
        UserError, match=r"clinic-a has room for 96 of these 97 records, and no job"
    ):
        topic.check(97, RECORD)
    assert [world.log.bounds(place).end for place in world.places] == [0, 0]


def test_an_endless_stream_without_a_job_is_refused_once_the_topic_is_full() -> None:
    world = World(partitions=2)
    topic = world.topic()
    send(topic, 96)
    with pytest.raises(UserError, match=r"clinic-a is full after 96 records, and no job"):
        topic.send(b"." * RECORD)
    assert [world.log.bounds(place) for place in world.places] == [(0, 48), (0, 48)]


def test_with_a_job_records_go_as_fast_as_it_trains_them_and_people_hear_of_it_once() -> None:
    world = World(trains=10)
    world.submit()
    topic = world.topic()
    topic.check(1000, RECORD)
    for _ in range(1000):
        topic.send(b"." * RECORD)
        world.drop()
        assert world.start(world.places[0]) <= world.trained[world.places[0]]
    topic.verify()
    (said,) = world.said
    assert said == (
        "clinic-a is full: from now on records go as fast as digits trains them (`doll job watch"
        " digits` shows how fast that is)"
    )


def test_a_job_that_stops_makes_no_more_room() -> None:
    world = World(trains=1)
    world.submit()
    topic = world.topic()
    send(topic, 60)
    world.book.want("digits", "stopped", "enough")
    with pytest.raises(UserError, match="no job that is not stopped reads it"):
        send(topic, 60)
    assert world.start(world.places[0]) == 0


def test_what_is_there_of_others_takes_room_too() -> None:
    world = World()
    world.write(b"." * 7000)
    world.topic().check(9, RECORD)
    with pytest.raises(UserError, match="has room for 9 of these 10 records"):
        world.topic().check(10, RECORD)


@pytest.mark.parametrize(("away", "told"), [(5, 0), (30, 1)])
def test_while_redis_is_away_nothing_is_sent_past_what_there_is_room_for(
    away: int, told: int
) -> None:
    world = World(trains=10)
    world.submit()
    topic = world.topic()
    send(topic, 48)
    world.redis.kill()
    ends = list[int]()

    def happens() -> None:
        ends.append(world.log.bounds(world.places[0]).end)
        if len(ends) == away:
            world.redis.restart()

    world.happens = happens
    topic.send(b"." * RECORD)
    assert ends[:away] == [48] * away
    assert [line.startswith("waiting: ") for line in world.said] == [True] * told


def test_records_that_were_dropped_before_a_job_had_trained_them_are_told() -> None:
    world = World()
    world.submit()
    topic = world.topic()
    topic.send(b"." * RECORD)
    for _ in range(100):  # another program, which asks nobody
        world.write(b"." * RECORD)
    with pytest.raises(OutsideError, match=r"has dropped \d+ records of clinic-a that nobody had"):
        topic.verify()


@given(
    partitions=st.integers(1, 3),
    trains=st.integers(1, 30),
    before=st.lists(st.integers(0, 900), max_size=10),
    sizes=st.lists(st.integers(0, 900), max_size=150),
)
def test_whatever_is_sent_nothing_is_dropped_that_the_job_has_not_trained(
    partitions: int, trains: int, before: list[int], sizes: list[int]
) -> None:
    world = World(partitions, trains)
    world.submit()
    for number, size in enumerate(before):
        world.write(b"." * size, number % partitions)
    topic = world.topic()
    for size in sizes:
        topic.send(b"." * size)
        world.drop()
        for place in world.places:
            assert world.start(place) <= world.trained[place]
    topic.verify()
    assert sum(world.log.bounds(place).end for place in world.places) == len(before) + len(sizes)
