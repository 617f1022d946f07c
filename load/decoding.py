"""Measures the processor time of decoding a record.

    python load/decoding.py

One thread decodes the records of one poll repeatedly, with the codec that a job's `records` names.
Cases take turns, so that a slow moment of the machine falls on all of them.
"""

from __future__ import annotations

import io
import json
import sys
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

import fastavro
import numpy as np
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from common.core.messages import Schema
from common.data.codecs import make_codec
from common.data.registered import RegisteredCodec
from common.jobs.spec import RecordsSpec
from load.harness import report

# Records of a poll, as in `services/worker/stream.py`.
_POLL = 2000
_TURNS, _CALLS = 15, 3
_NAMES = [f"c{number}" for number in range(40)]
_SYMBOLS = ["tcp", "udp", "icmp"]


def _cases() -> dict[str, tuple[dict[str, Any], list[bytes]]]:
    """Return a job's `records` and encoded values, by case."""
    random = np.random.default_rng(0)
    label = {"dtype": "int64"}
    rows = [
        dict(zip(_NAMES, row, strict=True)) | {"label": place % 2, "kind": _SYMBOLS[place % 3]}
        for place, row in enumerate(random.random((_POLL, 40)).tolist())
    ]
    named = [json.dumps(row).encode() for row in rows]
    sparse = [
        json.dumps({**row, **dict.fromkeys(_NAMES[place % 40 :: 10])}).encode()
        for place, row in enumerate(rows)
    ]
    whole = [json.dumps({**row, "label": float(row["label"])}).encode() for row in rows]
    enveloped = [json.dumps({"payload": {"after": row}}).encode() for row in rows]
    images = [
        json.dumps({"image": pixels, "label": 1}).encode()
        for pixels in random.integers(0, 256, (200, 28, 28)).tolist()
    ]
    one_each = {name: {"dtype": "float32"} for name in _NAMES} | {"label": label}
    x: dict[str, Any] = {"dtype": "float32", "from": _NAMES, "default": 0, "scale": 2.0}
    joined = {"x": x, "label": label}
    inside = [f"payload.after.{name}" for name in _NAMES]
    hot = {"kind": {"dtype": "float32", "one_hot": _SYMBOLS, "default": 0}}
    return {
        "40 numbers, a field each": ({"fields": one_each}, named),
        "40 numbers, joined, default and scale": ({"fields": joined}, named),
        "the same, 4 of them null": ({"fields": joined}, sparse),
        "the same, the label as 1.0": ({"fields": joined}, whole),
        "the same in an envelope": (
            {
                "fields": {
                    "x": {**x, "from": inside},
                    "label": {**label, "from": "payload.after.label"},
                }
            },
            enveloped,
        ),
        "the same and one of 3 symbols": ({"fields": joined | hot}, named),
        "an image of 28x28 and a label": (
            {"fields": {"image": {"dtype": "uint8", "shape": [28, 28]}, "label": label}},
            images,
        ),
    }


def _avro(type_: object, rows: list[dict[str, Any]]) -> tuple[str, list[bytes]]:
    """Return a schema whose fields all have this type, and records as serializers frame them."""
    fields = [{"name": name, "type": type_} for name in rows[0]]
    schema = {"type": "record", "name": "Row", "fields": fields}
    parsed, values = fastavro.parse_schema(schema), []
    for row in rows:
        data = io.BytesIO()
        data.write(bytes(5))
        fastavro.schemaless_writer(data, parsed, row)
        values.append(data.getvalue())
    return json.dumps(schema), values


def _protobuf(rows: list[dict[str, Any]]) -> tuple[str, list[bytes]]:
    """Return a schema whose fields are all doubles, and records as serializers frame them."""
    number, required = FieldDescriptorProto.TYPE_DOUBLE, FieldDescriptorProto.LABEL_OPTIONAL
    fields = [
        FieldDescriptorProto(name=name, number=at, type=number, label=required)
        for at, name in enumerate(rows[0], 1)
    ]
    file = FileDescriptorProto(name="row.proto", syntax="proto3")
    file.message_type.add(name="Row").field.extend(fields)
    pool = DescriptorPool()
    pool.Add(file)
    row = GetMessageClass(pool.FindMessageTypeByName("Row"))
    return b64encode(file.SerializeToString()).decode(), [
        bytes(6) + row(**each).SerializeToString() for each in rows
    ]


def _schema_cases() -> dict[str, tuple[dict[str, Any], list[bytes], str]]:
    """Return a job's `records`, encoded values and their schema, by case."""
    random = np.random.default_rng(0)
    rows = [dict(zip(_NAMES, row, strict=True)) for row in random.random((_POLL, 40)).tolist()]
    sparse = [{**row, **dict.fromkeys(_NAMES[place % 40 :: 10])} for place, row in enumerate(rows)]
    images = [{"image": random.bytes(784)} for _ in range(_POLL)]
    x = {"x": {"dtype": "float32", "from": _NAMES, "default": 0}}
    cases = {
        "40 numbers": (x, _avro("double", rows)),
        "40 nullable numbers": (x, _avro(["null", "double"], rows)),
        "the same, 4 of them null": (x, _avro(["null", "double"], sparse)),
        "an image of 28x28": (
            {"image": {"dtype": "uint8", "shape": [28, 28]}},
            _avro("bytes", images),
        ),
    }
    text, values = _protobuf(rows)
    avro = {
        f"Avro: {name}": ({"codec": "avro", "fields": fields}, values, schema)
        for name, (fields, (schema, values)) in cases.items()
    }
    return avro | {"Protobuf: 40 numbers": ({"codec": "protobuf", "fields": x}, values, text)}


def _decoder(records: dict[str, Any], values: list[bytes], schema: str = "") -> Callable[[], float]:
    """Return a function that measures the processor time of one record, in microseconds."""
    spec = RecordsSpec.model_validate_json(json.dumps({"codec": "json", **records}))
    codec = make_codec(spec.codec, spec.described())
    if isinstance(codec, RegisteredCodec):
        codec.learn(0, Schema("AVRO" if spec.codec == "avro" else "PROTOBUF", schema))

    def measured() -> float:
        started = process_time()
        for _ in range(_CALLS):
            assert not codec.decode(values).skipped  # noqa: S101 -- of a benchmark
        return (process_time() - started) / _CALLS / len(values) * 1e6

    return measured


def main() -> int:
    """Measure and report."""
    given = report.parser(__doc__, "python load/decoding.py", kafka=False).parse_args()
    cases = {name: _decoder(*case) for name, case in (_cases() | _schema_cases()).items()}
    turns = [{name: run() for name, run in cases.items()} for _ in range(_TURNS)]
    found = {name: report.spread([turn[name] for turn in turns]) for name in cases}
    rows = [(name, *(f"{value:.2f}" for value in of.values())) for name, of in found.items()]
    head = ("", "min", "quartile", "median", "quartile", "max")
    report.draw("processor time of a record in µs", head, rows)
    return report.conclude(given.json, report.machine(), {"us_per_record": found}, [])


if __name__ == "__main__":
    sys.exit(report.run(main))
