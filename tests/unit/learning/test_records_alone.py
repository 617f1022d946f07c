"""Property of every codec: the other records of a poll change nothing about a record.

The verdict, the reason and the bits of a record are the same as if it were decoded alone, however
polls split the records. Each example draws a schema, a few records of it (sound ones, records that
do not suit the fields, and broken bytes), and polls that repeat these records in any order.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from itertools import pairwise
from math import inf, nan, prod
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, get_args

import msgspec
import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from hypothesis import given, settings
from hypothesis import strategies as st

from common.core.messages import Schema
from common.data.codecs import make_codec
from common.data.fields import DtypeName, Field
from common.data.registered import RegisteredCodec
from common.jobs.spec import RecordsSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.data.codecs import Codec

CASES = 10_000 if settings.get_current_profile_name() == "nightly" else settings().max_examples
LARGEST_POLL = 500
DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)
READINGS = ("parse", "hash", "map", "one_hot")
PATHS = ("a", "b", "c", "in.a", "in.b")
SYMBOLS = ("", "0", "1", "1.5", "true", "tcp", "2026-01-31T12:00:00Z", "1_0", "nan", "\x80")
NUMBERS = (0, 1, 1, 1, 0, 1, 2, 200, 300, -1, 2**40)
FLOATS = (0.0, 1.0, 1.0, 1.0, 2.0, 1.5, -2.0, 300.0, nan, inf, 1e38)
Value: TypeAlias = bytes | None
# The reason for skipping a record, or the dtype and bits of each field.
Verdict: TypeAlias = str | dict[str, tuple[str, bytes]]


class Case(NamedTuple):
    """A codec and a few different records."""

    codec: Codec
    values: list[Value]


def verdicts(codec: Codec, values: Sequence[Value]) -> list[Verdict]:
    """Return the verdict on each record of one poll."""
    decoded = codec.decode(values)
    found: dict[int, Verdict] = dict(decoded.skipped)
    assert [at for at, _ in decoded.skipped] == sorted(found)
    for row, at in enumerate(decoded.kept.tolist()):
        assert at not in found
        found[at] = {
            name: (column.dtype.str, column[row].tobytes())
            for name, column in decoded.records.items()
        }
    return [found[at] for at in range(len(values))]


# --- fields ---------------------------------------------------------------------------------------


def number_of(chance: Random, dtype: str) -> float:
    """Draw a number that fits a dtype."""
    if dtype.startswith("float"):
        return chance.choice([0.0, -1.5, 1e30, 7.0])
    return chance.randint(0, 1 if dtype == "bool" else 127)


def described(chance: Random) -> dict[str, Any]:
    """Draw a field as a job file describes it."""
    dtype = chance.choice(DTYPES)
    kinds = ["number", "array", "array", "joined", "parse", "hash", "map", "one_hot"]
    kind = chance.choice(kinds)
    field: dict[str, Any] = {"dtype": dtype, "from": chance.choice(PATHS)}
    match kind:
        case "joined":
            field["from"] = [chance.choice(PATHS) for _ in range(chance.randint(1, 3))]
        case "array":
            field["shape"] = chance.choice([[1], [2], [4], [2, 2], [1, 2], [2, 1, 2]])
        case "parse":
            field["parse"] = chance.choice(["number", "time"])
        case "hash":
            field["hash"] = 2
        case "map":
            field["map"] = {text: number_of(chance, dtype) for text in ("1", "tcp", "true", "")}
        case "one_hot":
            field["one_hot"] = ["tcp", 1, True]
    if chance.randint(0, 1):
        field["default"] = 0 if kind == "one_hot" else number_of(chance, dtype)
    if dtype.startswith("float") and kind in {"number", "array", "joined", "parse"}:
        for option in chance.choice([[], ["scale"], ["offset"], ["scale", "offset"]]):
            field[option] = chance.choice([2.0, -0.1, 1e300])
    return field


def codec_of(name: str, fields: dict[str, Any], **more: object) -> Codec:
    """Return the codec of a job's records."""
    records = {"codec": name, "fields": fields, **more}
    spec = RecordsSpec.model_validate_json(msgspec.json.encode(records))
    return make_codec(spec.codec, spec.described(), spec.hashed.buckets if spec.hashed else 0)


class Drawn:
    """Drawn fields, and draws of types, lengths and items for their records."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.fields = {f"f{at}": described(chance) for at in range(chance.choice([1, 1, 2, 3]))}
        # Type that fields read at each path: an array, a number or a text.
        self.taken = {
            path: "array" if "shape" in field else "text" if field.keys() & READINGS else "number"
            for field in self.fields.values()
            for path in (field["from"] if isinstance(field["from"], list) else [field["from"]])
        }
        fitting = [prod(field.get("shape", [2])) for field in self.fields.values()]
        self._lengths: list[int] = [*fitting * 3, 0, 1, 3]

    def suits(self, path: str) -> str:
        """Return the type that suits a field at a path, or occasionally none."""
        return self.taken.get(path, "") if self.chance.randint(0, 4) else ""

    def length(self) -> int:
        """Draw the number of items of an array. It usually fits one of the fields."""
        return self.chance.choice(self._lengths)

    def items(self, each: Callable[[], Any]) -> list[Any]:
        """Return a list with a drawn number of items."""
        return [each() for _ in range(self.length())]


def values_of(chance: Random, draw: Callable[[], bytes]) -> list[Value]:
    """Draw a few values, most of them sound, some broken or absent."""
    values = list[Value]()
    for _ in range(chance.randint(1, 8)):
        value: Value = draw()
        if not chance.randint(0, 3) and value is not None:
            at = chance.randint(0, len(value))
            other = chance.choice([b"", b"\0", b"\1", b"\xff", b"\xff" * 9])
            behind = value[at + len(other) :] if chance.randint(0, 1) else b""
            value = chance.choice([value[:at] + other + behind, None, b"", b"\0"])
        values.append(value)
    return values


# --- cases of each codec --------------------------------------------------------------------------


def tensor_case(chance: Random) -> Case:
    """Return a case of records with a fixed size."""
    fields = [
        Field(f"f{at}", chance.choice(DTYPES), chance.choice([(), (2,), (1, 3)]))
        for at in range(chance.randint(1, 3))
    ]
    size = sum(field.numpy_dtype.itemsize * prod(field.shape) for field in fields)
    values = values_of(chance, lambda: bytes(chance.choices(range(256), k=size)))
    return Case(make_codec("tensor", fields), values)


def json_cell(drawn: Drawn, path: str, depth: int = 2) -> object:
    """Draw a number, a text or an array that may or may not suit a field."""
    numbers = [0, 1, 1.0, 2, True, False]
    match drawn.suits(path):
        case "text":
            return drawn.chance.choice(SYMBOLS)
        case "number":
            return drawn.chance.choice(numbers)
        case "array":
            [shape, *_] = [
                f["shape"] for f in drawn.fields.values() if "shape" in f and f["from"] == path
            ]
            cells: list[object] = [drawn.chance.choice(numbers) for _ in range(prod(shape))]
            for size in reversed(shape[1:]):
                cells = [cells[at : at + size] for at in range(0, len(cells), size)]
            return cells
    if depth and not drawn.chance.randint(0, 2):
        return drawn.items(lambda: json_cell(drawn, "", depth - 1))
    others: list[object] = [1.5, 300, -1, 2**63, 2**70, 1e300, None, {}]
    return drawn.chance.choice([*numbers, *numbers, *others, *(SYMBOLS if depth == 2 else ())])


def json_case(chance: Random, *, hashed: bool = False) -> Case:
    """Return a case of objects, some of them behind a schema registry's header."""
    drawn = Drawn(chance)
    fields, more = dict(drawn.fields), dict[str, Any]()
    if hashed:
        fields["index"] = {"dtype": "int32", "shape": [3]}
        fields["value"] = {"dtype": "float32", "shape": [3]}
        more["hashed"] = {"buckets": 9}

    def cells(paths: Sequence[str]) -> dict[str, object]:
        read = [path for path in paths if path in drawn.taken or not chance.randint(0, 3)]
        return {path[-1]: json_cell(drawn, path) for path in read if chance.randint(0, 5)}

    def value() -> bytes:
        inner = cells(["in.a", "in.b"])
        row = msgspec.json.encode(cells("abc") | ({"in": inner} if inner else {}))
        odd = chance.choice([row] * 9 + [b"[]", b'{"a": 1e400, "b": 1}', b"{"])
        return chance.choice([b"", b"", b"\0\0\0\0\7"]) + odd

    return Case(codec_of("json", fields, **more), values_of(chance, value))


def hashed_json_case(chance: Random) -> Case:
    """Return a case of objects whose other keys are hashed."""
    return json_case(chance, hashed=True)


def varint(number: int) -> bytes:
    """Encode seven bits per byte, the lowest first."""
    number &= 2**64 - 1
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])


def zigzag(number: int) -> bytes:
    """Encode a varint whose lowest bit is the sign."""
    return varint(number << 1 ^ number >> 63)


AvroType: TypeAlias = Any  # a schema in JSON
SINGLE = ["boolean", "int", "double", "float", "string", "bytes", "fixed", "enum", "decimal"]


def avro_type(drawn: Drawn, depth: int = 2) -> AvroType:
    """Draw the type of one value."""
    several = ["array", "array", "union", "union", "map"] if depth else ["bytes", "null"]
    match kind := drawn.chance.choice([*SINGLE, *several]):
        case "fixed":
            size = drawn.length()
            return {"type": "fixed", "name": f"F{size}", "size": size}
        case "enum":
            return {"type": "enum", "name": "E", "symbols": list(SYMBOLS)}
        case "decimal":
            return {"type": "bytes", "logicalType": "decimal", "scale": 1}
        case "array" | "map":
            name = "items" if kind == "array" else "values"
            return {"type": kind, name: avro_type(drawn, depth - 1)}
        case "union":
            others = [avro_type(drawn, depth - 1) for _ in range(drawn.chance.randint(0, 3))]
            return [drawn.chance.choice(["null", "bytes"]), *others]
    return kind


def avro_record(name: str, fields: dict[str, AvroType]) -> dict[str, Any]:
    """Return the type of a record."""
    written = [{"name": name, "type": type_} for name, type_ in fields.items()]
    return {"type": "record", "name": name, "fields": written}


def avro_bytes(drawn: Drawn, type_: AvroType) -> bytes:  # noqa: C901, PLR0911 -- one case per type
    """Draw and encode a value of a type."""
    chance = drawn.chance

    def sized(data: bytes) -> bytes:
        return zigzag(len(data)) + data

    match type_:
        case "null":
            return b""
        case "boolean":
            return chance.choice([b"\0", b"\0", b"\1", b"\1", b"\2"])
        case "int":
            return zigzag(chance.choice(NUMBERS))
        case "double" | "float":
            return struct.pack(f"<{type_[0]}", chance.choice(FLOATS))
        case "string":
            return sized(chance.choice([*(symbol.encode() for symbol in SYMBOLS), b"\xff"]))
        case "bytes":
            return sized(chance.choice([b"\0", b"\1", b"\xff"]) * drawn.length())
        case {"type": "fixed", "size": size}:
            return bytes(chance.choices(range(256), k=size))
        case {"type": "enum"}:
            return zigzag(chance.randint(0, len(SYMBOLS)))
        case {"type": "bytes"}:
            return sized(chance.choice([b"", b"\1", b"\x0a", b"\x7f" * 200]))
        case {"type": "array" | "map" as kind}:
            inner, key = type_["items" if kind == "array" else "values"], sized(b"a")
            items = drawn.items(
                lambda: (b"" if kind == "array" else key) + avro_bytes(drawn, inner)
            )
            cut = chance.choice([0, 0, 1])
            blocks = [block for block in (items[:cut], items[cut:]) if block]
            return b"".join(zigzag(len(each)) + b"".join(each) for each in blocks) + b"\0"
        case {"type": "record", "fields": fields}:
            return b"".join(avro_bytes(drawn, each["type"]) for each in fields)
    branch = chance.randrange(len(type_))
    return zigzag(branch) + avro_bytes(drawn, type_[branch])


def avro_case(chance: Random) -> Case:
    """Return a case of records with two known schemas and an unknown one."""
    drawn = Drawn(chance)
    codec, schemas = codec_of("avro", drawn.fields), list[AvroType]()
    assert isinstance(codec, RegisteredCodec)

    def type_of(path: str) -> AvroType:
        numbers = chance.choice(["boolean", "int", "double", "float"])
        match drawn.suits(path):
            case "array":
                return chance.choice(["bytes", "bytes", {"type": "array", "items": numbers}])
            case "text":
                return "string"
            case "number":
                return chance.choice([numbers, numbers, ["null", numbers]])
        return avro_type(drawn)

    for number in (1, 2):
        inner = avro_record("In", {name: type_of(f"in.{name}") for name in "ab"})
        fields = {name: type_of(name) for name in "abc"} | {"in": inner}
        schemas.append(avro_record("R", fields))
        codec.learn(number, Schema("AVRO", msgspec.json.encode(schemas[-1]).decode()))

    def value() -> bytes:
        number = chance.choice([1, 1, 1, 1, 1, 2, 2, 3])
        data = avro_bytes(drawn, schemas[number - 1]) if number < 3 else b""
        return b"\0" + number.to_bytes(4) + data

    return Case(codec, values_of(chance, value))


KIND = FieldDescriptorProto
VARINTS = (KIND.TYPE_INT32, KIND.TYPE_SINT64, KIND.TYPE_UINT64, KIND.TYPE_BOOL, KIND.TYPE_ENUM)
PACKED = {KIND.TYPE_DOUBLE: "<d", KIND.TYPE_FLOAT: "<f", KIND.TYPE_FIXED32: "<I"}
SIZED = (KIND.TYPE_STRING, KIND.TYPE_BYTES, KIND.TYPE_BYTES)


def protobuf_bytes(drawn: Drawn, kind: int, number: int, *, repeated: bool) -> bytes:
    """Draw and encode a field of a message, with its tag, once or packed."""
    chance = drawn.chance

    def one() -> bytes:
        if kind in PACKED:
            numbers = (0, 1, 200) if kind == KIND.TYPE_FIXED32 else FLOATS
            return struct.pack(PACKED[KIND.Type.ValueType(kind)], chance.choice(numbers))
        return varint(chance.choice(NUMBERS))

    if kind in SIZED:
        texts = [symbol.encode() for symbol in SYMBOLS] if kind == KIND.TYPE_STRING else []
        data = chance.choice([*texts, bytes(drawn.length())])
    elif repeated and chance.randint(0, 3):
        data = b"".join(drawn.items(one))
    else:
        wire = {"<d": 1, None: 0}.get(PACKED.get(KIND.Type.ValueType(kind)), 5)
        return varint(number << 3 | wire) + one()
    length = -1 if not chance.randint(0, 19) else len(data)
    return varint(number << 3 | 2) + varint(length) + data


def protobuf_case(chance: Random) -> Case:
    """Return a case of messages with present, absent and repeated fields in any order."""
    drawn = Drawn(chance)
    codec = codec_of("protobuf", drawn.fields)
    assert isinstance(codec, RegisteredCodec)
    file = FileDescriptorProto(name="r.proto", syntax=chance.choice(["proto2", "proto3"]))
    enum = file.enum_type.add(name="E")
    for at, symbol in enumerate(("none", "tcp")):
        enum.value.add(name=symbol, number=at)
    # Message to (kind, number, repeated).
    written = dict[str, list[tuple[int, int, bool]]]()
    for name, above in (("R", ""), ("In", "in.")):
        message = file.message_type.add(name=name)
        written[name] = []
        for number, field in enumerate("abc", 1):
            kind, repeated = chance.choice([*VARINTS, *PACKED, *SIZED]), chance.random() < 0.4
            if suits := drawn.suits(above + field):
                repeated = suits == "array" and repeated
                bytes_ = KIND.TYPE_STRING if suits == "text" else KIND.TYPE_BYTES
                numbers = chance.choice([*VARINTS, *PACKED])
                kind = numbers if repeated or suits == "number" else bytes_
            label = KIND.LABEL_REPEATED if repeated else KIND.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, type=kind, label=label)
            if kind == KIND.TYPE_ENUM:
                made.type_name = ".E"
            if not repeated and chance.randint(0, 1):
                made.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field}")
            written[name].append((kind, number, repeated))
    file.message_type[0].field.add(
        name="in", number=4, type="TYPE_MESSAGE", type_name=".In", label="LABEL_OPTIONAL"
    )
    codec.learn(1, Schema("PROTOBUF", b64encode(file.SerializeToString()).decode()))

    def body(name: str) -> bytes:
        parts = [part for part in written[name] if chance.randint(0, 5)]
        parts += [chance.choice(written[name])] * (not chance.randint(0, 5))
        data = [protobuf_bytes(drawn, kind, at, repeated=several) for kind, at, several in parts]
        # The schema lacks this field.
        data += [varint(9 << 3) + varint(7)]
        if name == "R" and chance.randint(0, 3):
            inner = body("In")
            data.append(varint(4 << 3 | 2) + varint(len(inner)) + inner)
        chance.shuffle(data)
        return b"".join(data)

    def value() -> bytes:
        which = chance.choice([b"\0"] * 6 + [b"\2\0", b"\2\2", b"\2\4"])
        return b"\0\0\0\0\1" + which + body("R")

    return Case(codec, values_of(chance, value))


CODECS = {
    "tensor": tensor_case,
    "json": json_case,
    "hashed json": hashed_json_case,
    "avro": avro_case,
    "protobuf": protobuf_case,
}


@pytest.mark.timeout(3600)  # seconds, for a nightly run
@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=CASES)
@given(seed=st.integers(0, 2**64 - 1))
def test_record_decodes_the_same_in_any_poll(name: str, seed: int) -> None:
    chance = Random(seed)  # noqa: S311 -- of a test
    case = CODECS[name](chance)
    alone = [verdicts(case.codec, [value])[0] for value in case.values]
    # Some records are much more frequent, so that many polls hold only one kind.
    weights = [chance.random() ** 4 for _ in case.values]
    size = chance.randint(1, chance.choice([4, 20, LARGEST_POLL]))
    order = chance.choices(range(len(case.values)), weights, k=size)
    cuts = sorted(chance.sample(range(size), min(size, chance.randint(0, 4))))
    for begin, end in pairwise([0, *cuts, size]):
        places = order[begin:end]
        polled = verdicts(case.codec, [case.values[place] for place in places])
        for place, verdict in zip(places, polled, strict=True):
            assert verdict == alone[place], case.values[place]
