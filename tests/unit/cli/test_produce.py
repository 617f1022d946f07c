"""`doll produce` writes a data set into a topic: the requested number of records, in its shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from common.core.spans import Partition
from common.data.codecs import make_codec
from common.data.fields import Field
from common.kafka.memory import MemoryLog, MemoryWriter
from common.kafka.port import NewTopic
from services.cli import exits
from tests.unit.cli.conftest import World

if TYPE_CHECKING:
    from pathlib import Path

FIELDS = (Field("image", "uint8", (1, 8, 8)), Field("label", "int64"))


def values(world: World, topic: str) -> list[bytes | None]:
    return [
        record.value
        for place in world.log.partitions(topic)
        for record in world.log.tail(place, 0).read(10_000, 0.0)
    ]


def test_produce_sends_a_data_set_once_to_all_partitions(world: World) -> None:
    result = world.run("produce", "digits", "--topic", "a", "--create-partitions", "4")
    sent = values(world, "a")
    assert len(sent) == 1438
    assert all(world.log.bounds(place).end > 300 for place in world.log.partitions("a"))
    assert make_codec("tensor", FIELDS).decode(sent).skipped == []
    assert "sent 1,438 records to a" in result.stderr
    assert (
        "records: {codec: tensor, fields: {image: {dtype: uint8, shape: [1, 8, 8]},"
        " label: {dtype: int64}}}" in result.stderr
    )


def test_produce_reports_a_request_for_more_records_than_exist(world: World) -> None:
    options = ("--topic", "a", "--create-partitions", "1", "--records", "6000")
    result = world.run("produce", "digits", *options)
    assert len(values(world, "a")) == 1438
    assert (
        "digits has only 1,438 of the 6,000 requested records; add --repeat to send them again\n"
        in result.stderr
    )


class InterruptedWriter(MemoryWriter):
    """Raises KeyboardInterrupt after a fixed number of records, as Ctrl-C does."""

    left = 1100

    def append(self, *record: Any, **options: Any) -> None:  # noqa: ANN401 -- as the port has them
        """Append a record, or raise KeyboardInterrupt."""
        self.left -= 1
        if self.left == -1:
            raise KeyboardInterrupt
        super().append(*record, **options)


class InterruptedLog(MemoryLog):
    """A log that returns interrupted writers."""

    def writer(self, **_: object) -> MemoryWriter:
        """Return an interrupted writer."""
        return InterruptedWriter(self)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "/s); interrupted, 338 were not sent\n"),
        (("--repeat",), "/s)\n"),
    ],
)
def test_interrupted_produce_reports_the_records_sent(
    options: tuple[str, ...], expected: str
) -> None:
    world = World(InterruptedLog())
    result = world.run("produce", "digits", "--topic", "a", "--create-partitions", "1", *options)
    assert len(values(world, "a")) == 1100
    assert "sent 1,100 records to a in " in result.stderr
    assert result.stderr.endswith(expected)


def test_produce_stops_an_endless_stream_at_the_requested_number(world: World) -> None:
    options = ["--repeat", "--warp", "--records", "2000", "--rate", "1e6", "--poisson"]
    world.run("produce", "digits", "--topic", "a", "--create-partitions", "1", *options)
    sent = values(world, "a")
    assert len(sent) == 2000
    # Warped records are all different.
    assert len(set(sent)) == 2000


def test_seed_determines_the_records(world: World) -> None:
    for topic, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        options = ["--topic", topic, "--create-partitions", "1", "--records", "50", "--warp"]
        world.run("produce", "digits", "--seed", seed, *options)
    assert values(world, "a") == values(world, "b")
    assert values(world, "a") != values(world, "c")


def test_produce_sends_a_csv_file_in_order_as_json(world: World, tmp_path: Path) -> None:
    path = tmp_path / "market.csv"
    path.write_text("price,up\n1.5,0\n2.5,1\n")
    options = ["--topic", "m", "--create-partitions", "1", "--in-order", "--codec", "json"]
    world.run("produce", str(path), *options)
    assert values(world, "m") == [
        b'{"features":[1.5],"label":0}',
        b'{"features":[2.5],"label":1}',
    ]


def test_produce_sends_csv_rows_unchanged_and_describe_proposes_a_job(
    world: World, tmp_path: Path
) -> None:
    path = tmp_path / "some.csv"
    path.write_text("id,colour,size,label\n" + "7,red,1.5,cat\n8,,,dog\n" * 3)
    options = ["--create-partitions", "1", "--in-order", "--rows", "--leave-out", "id"]
    output = world.run("produce", str(path), "--topic", "t", *options).stderr
    assert "run `doll topic describe t`" in output
    rows = [
        b'{"colour":"red","size":1.5,"label":"cat"}',
        b'{"colour":null,"size":null,"label":"dog"}',
    ]
    assert values(world, "t") == rows * 3
    assert world.run("topic", "describe", "t").stdout.splitlines() == [
        "# 6 of 6 records decode with this proposal",
        "records:",
        "  codec: json",
        "  fields:",
        "    numbers: {dtype: float32, from: [size], default: 0, scale: [0.1]}",
        "    colour: {dtype: float32, one_hot: [red], default: 0}",
        "    label: {dtype: int64, map: {cat: 0, dog: 1}}",
        "task: {name: tabular-mlp, classes: 2}",
    ]
    world.run("produce", str(path), "--topic", "t", *options, "--text", "s*")
    assert b'"size":"1.5"' in (values(world, "t")[-2] or b"")
    options += ["--label", "size"]
    refused = world.run("produce", str(path), "--topic", "t", *options, code=exits.REFUSED).stderr
    assert "--label cannot be used with --rows" in refused


def test_produce_creates_no_topic_unless_requested(world: World) -> None:
    result = world.run("produce", "digits", "--topic", "a", code=exits.REFUSED)
    assert 'there is no topic "a"; create it with --create-partitions 4' in result.stderr


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("my clinic", "error: --topic: 'my clinic' cannot be a Kafka topic; use up to 245 letters"),
        ("..", "error: --topic: '..' cannot be a Kafka topic"),
        ("doll.digits.updates", "error: --topic: 'doll.digits.updates' is reserved; use a name"),
    ],
)
def test_produce_to_a_reserved_or_invalid_topic_is_rejected(
    world: World, topic: str, expected: str
) -> None:
    options = ("--topic", topic, "--create-partitions", "1")
    assert expected in world.run("produce", "digits", *options, code=exits.REFUSED).stderr


def test_produce_keeps_the_partitions_of_an_existing_topic(world: World) -> None:
    world.log.create_topics([NewTopic("a", 2)])
    world.run("produce", "digits", "--topic", "a", "--create-partitions", "7", "--records", "3")
    assert len(world.log.partitions("a")) == 2


def test_invalid_produce_command_is_rejected_in_one_line(world: World, tmp_path: Path) -> None:
    np.savez(tmp_path / "odd.npz", a=np.array([1 + 2j]))
    np.savez(tmp_path / "plain.npz", a=np.arange(3))
    for arguments, message in (
        (["nowhere.csv"], "nowhere.csv: there is no such file"),
        ([str(tmp_path / "odd.npz")], "field 'a': must be one of uint8"),
        ([str(tmp_path / "plain.npz"), "--warp"], "--warp: needs a field `image`"),
        (["digits", "--codec", "avro"], "--codec: must be tensor or json, got 'avro'"),
        (["digits", "--max-lag", "5"], "--job, --max-lag: give both or neither"),
        (["digits", "--label", "x"], "no columns"),
        ([str(tmp_path / "plain.npz"), "--rows"], "can only be chosen in CSV files"),
    ):
        result = world.run(
            "produce", *arguments, "--topic", "a", "--create-partitions", "1", code=exits.REFUSED
        )
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_produce_without_kafka_is_reported_with_a_remedy(world: World) -> None:
    world.log.go_away()
    result = world.run("produce", "digits", "--topic", "a", code=exits.UNAVAILABLE)
    assert result.stderr.startswith("error: ")
    assert "use --kafka to name another server" in result.stderr


def test_produce_writes_from_the_beginning_of_a_partition(world: World) -> None:
    world.run("produce", "digits", "--topic", "a", "--create-partitions", "1", "--records", "1")
    assert world.log.bounds(Partition("a", 0)) == (0, 1)


def test_produce_held_out_sends_only_the_test_digits(world: World) -> None:
    for topic, option in (("a", "--in-order"), ("b", "--held-out")):
        world.run("produce", "digits", "--topic", topic, "--create-partitions", "1", option)
    trained, held_out = values(world, "a"), values(world, "b")
    assert len(held_out) == 359
    assert not {*trained} & {*held_out}


def test_produce_held_out_of_a_file_is_rejected(world: World) -> None:
    arguments = ("produce", "market.csv", "--topic", "a", "--held-out")
    result = world.run(*arguments, code=exits.REFUSED)
    assert "--held-out: only `digits` has a test set" in result.stderr


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        # 600 records of 10 KB do not fit into the 5 MB that one partition retains.
        (("--create-partitions", "1"), None),
        (("--create-partitions", "2"), [300, 300]),
        (("--create-partitions", "1", "--records", "400"), [400]),
        (("--create-partitions", "4", "--repeat"), None),  # endless
    ],
)
def test_produce_rejects_more_than_the_built_in_kafka_can_retain(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    sent: list[int] | None,
) -> None:
    monkeypatch.setenv("DOLL_KAFKA", "embedded:nowhere")
    path = tmp_path / "images.npz"
    np.savez(path, image=np.zeros((600, 100, 100), np.uint8), label=np.zeros(600, np.int64))
    command = ("produce", str(path), "--topic", "a", *options)
    code = exits.OK if sent else exits.REFUSED
    output = world.run(*command, code=code).stderr
    assert ("do not fit into the built-in Kafka, which keeps 5 MB" in output) == (sent is None)
    ends = [world.log.bounds(place).end for place in world.log.partitions("a")]
    assert ends == (sent or [0] * len(ends))
    if sent:  # existing records count as sent
        world.run(*command, code=exits.REFUSED)
        assert [world.log.bounds(place).end for place in world.log.partitions("a")] == sent
