"""Decode records whose schemas are in a schema registry. The schema's id precedes each record.

Only a record's bytes, the fields and the learned schemas decide if a record decodes. Before
decoding, call `unknown` for the missing ids, and `learn` with their schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np

from common.data.avro import AvroReader
from common.data.columns import Column, assembled
from common.data.fields import DecodedColumns, Field, Keys, concatenate
from common.data.record_bytes import RecordBytes, Wanted, wanted_of
from common.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.core.messages import Schema, SchemaKind

_FRAME = 5  # bytes: 0 and the schema's id


class Reader(Protocol):
    """Reads the records of one schema."""

    def paths(self) -> dict[Keys, None]:
        """Return the paths of the values in a record."""

    def read(self, records: RecordBytes, wanted: Wanted) -> None:
        """Read all records to their ends, and put the wanted values into their sinks."""


class RegisteredCodec:
    """Decodes records that serializers with a schema registry wrote, for one kind of schema."""

    def __init__(self, fields: Sequence[Field], kind: SchemaKind) -> None:
        self._columns = [Column(field) for field in fields]
        self._paths = [keys for column in self._columns for keys in column.source.paths]
        self._kind = kind
        # Readers by frame, or the reason why there is no reader.
        self._readers = dict[bytes, Reader | str]()

    def unknown(self, values: Sequence[bytes | None]) -> set[int]:
        """Return the ids of schemas that these records need and that are not learned yet."""
        frames = {value[:_FRAME] for value in values if _framed(value)} - self._readers.keys()
        return {int.from_bytes(frame[1:]) for frame in frames}

    def learn(self, number: int, schema: Schema) -> None:
        """Add the schema of an id."""
        frame = b"\0" + number.to_bytes(_FRAME - 1)
        if schema.kind != self._kind:
            self._readers[frame] = f"schema {number} is {schema.kind}, not {self._kind}"
        else:
            try:
                self._readers[frame] = _READERS[self._kind](schema)
            except UserError as error:
                self._readers[frame] = f"schema {number}: {error}"

    def decode(self, values: Sequence[bytes | None]) -> DecodedColumns:
        """Turn values into columns. Records whose schema is not learned are skipped."""
        places, skipped = dict[bytes, list[int]](), list[tuple[int, str]]()
        for index, value in enumerate(values):
            if _framed(value):
                places.setdefault(value[:_FRAME], []).append(index)
            else:
                skipped.append((index, _UNFRAMED if value else _EMPTY))
        parts = list[DecodedColumns]()
        for frame, indexes in places.items():
            number = int.from_bytes(frame[1:])
            reader = self._readers.get(
                frame, "the schema registry has no schema with the record's id"
            )
            if isinstance(reader, str):
                skipped += [(index, reader) for index in indexes]
            else:
                those = [values[index] or b"" for index in indexes]
                parts.append(self._read(reader, number, those, indexes))
        if not parts:
            return DecodedColumns(self._none(), np.zeros(0, np.intp), sorted(skipped))
        if len(parts) == 1:
            [decoded] = parts
            return DecodedColumns(
                decoded.records, decoded.kept, sorted([*decoded.skipped, *skipped])
            )
        kept = np.concatenate([part.kept for part in parts])
        order = np.argsort(kept)
        records = concatenate([part.records for part in parts])
        for part in parts:
            skipped += part.skipped
        return DecodedColumns(
            {k: v[order] for k, v in records.items()}, kept[order], sorted(skipped)
        )

    def objects(self, values: Sequence[bytes | None]) -> list[dict[str, Any]]:
        """Return the valid records with all their values, as JSON would have them."""
        objects = list[dict[str, Any]]()
        for frame, reader in self._readers.items():
            if isinstance(reader, str):
                continue
            those = [value for value in values if _framed(value) and value[:_FRAME] == frame]
            records, paths = RecordBytes(those, _FRAME), list(reader.paths())
            wanted, sinks = wanted_of(paths)
            reader.read(records, wanted)
            found: list[dict[str, Any]] = [{} for _ in those]
            for keys, sink in zip(paths, sinks, strict=True):
                cells, absent = sink.cells(len(those))
                listed = cells.tolist() if isinstance(cells, np.ndarray) else cells
                for row in np.flatnonzero(~absent).tolist():
                    inner = found[row]
                    for key in keys[:-1]:
                        inner = inner.setdefault(key, {})
                    inner[keys[-1]] = _as_json(listed[row])
            objects += [each for row, each in enumerate(found) if row not in records.reasons]
        return objects

    def encode(self, records: Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
        """Refuse: only the producer writes these records.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"records with a schema can only be written by their producer; found {sorted(records)}"
        )

    def _read(
        self, reader: Reader, number: int, values: list[bytes], indexes: list[int]
    ) -> DecodedColumns:
        records = RecordBytes(values, _FRAME)
        wanted, sinks = wanted_of(self._paths)
        reader.read(records, wanted)
        leaves, unsound, begin = list[Any](), dict[int, str](), 0
        for column in self._columns:
            for place, _ in enumerate(column.source.paths):
                cells = sinks[begin + place].cells(len(values))
                leaf, reasons = column.taken(place, *cells)
                leaves.append(leaf)
                unsound = {**reasons, **unsound}
            begin += len(column.source.paths)
        unsound |= {row: f"schema {number}: {why}" for row, why in records.reasons.items()}
        return assembled(self._columns, leaves, indexes, [], unsound)

    def _none(self) -> dict[str, npt.NDArray[Any]]:
        fields = [column.field for column in self._columns]
        return {field.name: np.zeros((0, *field.shape), field.numpy_dtype) for field in fields}


def _avro(schema: Schema) -> Reader:
    return AvroReader(schema.text, [each.text for each in schema.references])


def _protobuf(schema: Schema) -> Reader:
    from common.data.protobuf import ProtobufReader  # noqa: PLC0415 -- `doll[registry]` alone

    return ProtobufReader(schema.text, schema.references)


_READERS: dict[SchemaKind, Callable[[Schema], Reader]] = {"AVRO": _avro, "PROTOBUF": _protobuf}
_UNFRAMED = "the record does not begin with a schema id, so no schema-registry serializer wrote it"
_EMPTY = "no value (a tombstone)"


def _as_json(value: object) -> object:
    """Return a value with bytes replaced by lists of numbers."""
    return [_as_json(each) for each in value] if isinstance(value, bytes | list) else value


def _framed(value: bytes | None) -> TypeGuard[bytes]:
    return value is not None and len(value) >= _FRAME and value[0] == 0
