"""`doll topic describe` proposes job file blocks that read the sampled records."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml

from common.core.messages import Schema
from common.data.codecs import codec_of, make_codec
from common.data.fields import Field
from common.errors import UserError
from common.jobs.job_file import parse_job
from common.kafka.port import NewTopic
from common.learning.tasks import task_of
from services.cli import exits
from services.cli.commands.proposal import propose
from tests.unit.cli.conftest import World
from tests.unit.data.test_registered import framed, message_of, schema_of
from tests.unit.kafka.test_schemas import Registry

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec

REST = {"name": "j", "streams": ["s"], "batch_size": 2, "group_size": 1}


def described(world: World, *values: bytes | None, label: str = "") -> tuple[JobSpec, str]:
    """Return the job that is proposed for these records, and the messages beside it."""
    world.log.create_topics([NewTopic("s", 2)])
    writer = world.log.writer()
    for number, value in enumerate(values):
        writer.append("s", value, partition=number % 2)
    options = ("--label", label) if label else ()
    text = world.run("topic", "describe", "s", *options).stdout
    rest = yaml.safe_dump(REST | {"optimizer": {"learning_rate": 0.1}})
    spec = parse_job(text + rest)
    task_of(spec, ())
    return spec, text


def envelope(number: int) -> bytes:
    after = {
        "amount": number * 15.5,
        "age": None if number % 7 == 0 else number,
        "geo.country": ["DE", "IN", "no"][number % 3],
        "device": f"device-{number}",
        "opened": f"2024-03-0{1 + number % 9}T10:00:00Z",
        "rate": f"{number}.5",
        "taps": [number, 1.5],
        "is_fraud": number % 2 == 0,
    }
    header = b"\0\0\0\0\7" if number % 2 else b""
    payload = {"before": None, "after": after, "op": "c", "ts_ms": 1_700_000_000_000 + number}
    return header + json.dumps({"schema": {"type": "struct"}, "payload": payload}).encode()


def test_describe_opens_an_envelope_and_classifies_its_columns(world: World) -> None:
    spec, text = described(world, *map(envelope, range(60)), b"no JSON", None)
    assert text.startswith(
        "# 60 of 61 records decode with this proposal\n# 1 do not: JSON is malformed"
    )
    assert "left out: payload.after.device: 60 different texts" in text
    fields = {name: field.options for name, field in spec.records.fields.items()}
    assert fields["numbers"] == {
        "from": ("payload.after.amount", "payload.after.age"),
        "default": 0,
        "scale": (0.001, 0.01),
    }
    assert fields["geo.country"] == {
        "from": r"payload.after.geo\.country",
        "one_hot": ("DE", "IN", "no"),
        "default": 0,
    }
    assert fields["opened"]["parse"] == "time"
    assert fields["rate"] == {"from": "payload.after.rate", "parse": "number", "default": 0}
    assert spec.records.fields["taps"].shape == (2,)
    assert fields["label"] == {"from": "payload.after.is_fraud"}
    assert spec.task_options == {
        "classes": 2,
        "features": 9,
        "inputs": ("numbers", "geo.country", "opened", "rate", "taps"),
    }
    found = codec_of(spec.records).decode([envelope(61)]).records
    # A larger number of seconds would lose precision as a float32.
    assert abs(found["opened"][0]) < 10_000_000


@pytest.mark.parametrize(
    ("label", "labels", "classes"),
    [("kind", [0, 1, 2], 3), ("size", [0, 1, 2], 3), ("y", [4, 0, 4], 5)],
)
def test_describe_maps_labels_to_class_numbers(
    world: World, label: str, labels: list[int], classes: int
) -> None:
    kinds = [("ant", -1, 4), ("bee", 0.5, 0), ("cat", 7, 4)]
    values = [json.dumps({"kind": k, "size": s, "y": y}).encode() for k, s, y in kinds]
    spec, _ = described(world, *values, label=label)
    assert spec.task_options["classes"] == classes
    assert codec_of(spec.records).decode(values).records["label"].tolist() == labels


def test_describe_recognizes_images_in_json_and_packed_bytes(world: World) -> None:
    image = [[[row * column for column in range(8)] for row in range(8)]]
    value = json.dumps({"pixels": image, "target": 9}).encode()
    spec, _ = described(world, value, value)
    assert (spec.task.name, spec.task.options) == ("image-classifier", {"classes": 10})
    packed = make_codec("tensor", [Field("image", "uint8", (1, 8, 8)), Field("label", "int64")])
    decoded = codec_of(spec.records).decode([value] * 9).records
    spec, text = described(World(), *packed.encode(decoded))
    assert (spec.records.codec, spec.task.name) == ("tensor", "image-classifier")
    assert "are a guess" in text
    floats = make_codec("tensor", [Field("x", "float32", (3,)), Field("label", "int64")])
    encoded = floats.encode(
        {"x": decoded["image"][:, 0, 0, :3].astype("f4"), "label": decoded["label"]}
    )
    spec, _ = described(World(), *encoded)
    assert spec.records.fields["features"].shape == (3,)


def test_describe_tolerates_a_few_lists_of_another_shape(world: World) -> None:
    most = [json.dumps({"x": [n, 1.5, 2], "label": n % 3}).encode() for n in range(6)]
    odd = [json.dumps({"x": x, "label": 0}).encode() for x in ([1, 2], [[1], [2, 3]], ["a"], 7)]
    spec, text = described(world, *most, *odd[:3], odd[3])
    assert text.startswith("# 6 of 10 records decode with this proposal\n")
    assert spec.records.fields["x"].shape == (3,)


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([], (), 'topic "s" has no records'),
        (
            [b'{"a": 1, "b": {"c": 2}}'],
            (),
            "--label: no path looks like a label; choose one of a, b.c",
        ),
        ([b'{"a": 1}'], ("--label", "b"), "--label: no record has the path 'b'; choose one of a"),
        ([b'{"label": 1}'], (), "only the label can be read as numbers: the records have no other"),
        ([b'{"label": 1, "x": []}', b'{"label": 1, "x": ["a"]}'], (), "x: lists of different"),
        ([b'{"label": "u", "x": 1}'], (), "label label: must have 2 to 32 different values"),
        ([b"abc", b"defgh"], (), "neither JSON objects nor of one length, got 1 of 3 bytes"),
        ([b"\xff" * 16], (), "16 bytes each, which do not end in a label"),
        ([b"\0\0\0\0\7rest"] * 3, (), "the header of a schema registry (schema 7)"),
    ],
)
def test_describe_reports_why_it_cannot_propose_a_job(
    world: World, values: list[bytes], options: tuple[str, ...], expected: str
) -> None:
    world.log.create_topics([NewTopic("s", 1)])
    world.write("s", *values)
    result = world.run("topic", "describe", "s", *options, code=exits.REFUSED)
    assert expected in " ".join(result.stderr.split())


def test_describe_uses_the_schema_registry_for_avro() -> None:
    avro = schema_of({"x": ["null", "double"], "when": "string", "image": "bytes", "label": "int"})
    rows = [
        {"x": n or None, "when": f"2026-01-0{1 + n}", "image": bytes(4), "label": n % 2}
        for n in range(6)
    ]
    registry = Registry()
    registry.schemas = {7: Schema("AVRO", json.dumps(avro))}
    values = [framed(7, avro, row) for row in rows]
    proposal = propose(values, None, registry)
    text = "\n".join(proposal.text(values))
    assert text.startswith("# 6 of 6 records decode with this proposal\nrecords:\n  codec: avro")
    assert proposal.records["fields"]["when"]["parse"] == "time"
    assert proposal.records["fields"]["numbers"]["from"] == ["x"]
    assert proposal.task == {"name": "tabular-mlp", "classes": 2}
    with pytest.raises(
        UserError, match=r"no schema of the registry reads the records, which name \[8\]"
    ):
        propose([framed(8, avro, row) for row in rows], None, registry)


def test_describe_uses_the_schema_registry_for_protobuf() -> None:
    text, message = message_of({"x": 1.5, "label": 1.0, "kind": "u"})
    rows = [message(x=n, label=n % 2, kind="uv"[n % 2]) for n in range(6)]
    registry = Registry()
    registry.schemas = {7: Schema("PROTOBUF", text)}
    values = [b"\0\0\0\0\7\0" + row.SerializeToString() for row in rows]
    proposal = propose(values, None, registry)
    assert next(proposal.text(values)) == "# 6 of 6 records decode with this proposal"
    assert proposal.records["codec"] == "protobuf"
    assert proposal.records["fields"]["kind"]["one_hot"] == ["u", "v"]


def test_describe_of_a_missing_topic_is_rejected(world: World) -> None:
    result = world.run("topic", "describe", "s", code=exits.REFUSED)
    assert 'there is no topic "s"' in result.stderr
