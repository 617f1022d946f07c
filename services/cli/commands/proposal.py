"""Proposal of a job file for a topic's records: `doll topic describe`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import ceil, isqrt, log10
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from common.data.codecs import REGISTERED, make_codec, unframed
from common.data.columns import text_of
from common.data.fields import Keys
from common.data.registered import RegisteredCodec
from common.errors import UserError
from common.jobs.spec import RecordsSpec

if TYPE_CHECKING:
    from common.core.messages import Schema
    from common.kafka.port import SchemaRegistry

# Common names of the value to predict.
_LABELS = ("label", "target", "class", "y", "outcome")
# Maximum number of different texts for one-hot columns.
_SYMBOLS = 32
_CLASSES = 1000
# Upper limit of a registry's schema ids, which start at 1.
_SCHEMAS = 1 << 24
_LABEL_BYTES = 8  # int64
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*")
# YAML does not read these as texts.
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")


class Proposal(NamedTuple):
    """Two blocks of a job file."""

    records: dict[str, Any]
    task: dict[str, Any]
    # Paths that are left out, with reasons.
    left_out: tuple[str, ...]
    # Schemas of records with schema ids.
    schemas: Mapping[int, Schema] = MappingProxyType({})

    def text(self, values: Sequence[bytes]) -> Iterator[str]:
        """Yield lines of YAML, and how many of these records decode with them."""
        skipped = Counter(why for _, why in self._decoded(values))
        bad = sum(skipped.values())
        yield f"# {len(values) - bad:,} of {len(values):,} records decode with this proposal"
        for why, count in skipped.most_common(3):
            yield f"# {count:,} do not: {why}"
        for line in self.left_out:
            yield f"# left out: {line}"
        yield "records:"
        yield f"  codec: {self.records['codec']}"
        yield "  fields:"
        for name, field in self.records["fields"].items():
            yield f"    {_yaml(name)}: {_yaml(field)}"
        yield f"task: {_yaml(self.task)}"

    def _decoded(self, values: Sequence[bytes]) -> list[tuple[int, str]]:
        spec = RecordsSpec.model_validate_json(json.dumps(self.records))
        codec = make_codec(spec.codec, spec.described())
        if isinstance(codec, RegisteredCodec):
            for number, schema in self.schemas.items():
                codec.learn(number, schema)
        return codec.decode(values).skipped


def propose(
    values: Sequence[bytes], label: str | None = None, registry: SchemaRegistry | None = None
) -> Proposal:
    """Propose a codec, fields and a task for some records.

    Args:
        values: Some records, at least one.
        label: Optional. Path of the value to predict. If unset, guessed.
        registry: Optional. Source of the schemas of records with schema ids.

    Raises:
        UnavailableError: If the registry does not answer.
        UserError: If no codec fits the records, or nothing can be predicted.
    """
    records = [record for value in values if isinstance(record := _parsed(value), dict)]
    if 2 * len(records) >= len(values):
        return _Objects(records, label).proposal()
    # The header is a 0 and an id of four bytes.
    schemas = {int.from_bytes(value[:5], "big") for value in values}
    if min(schemas) > 0 and max(schemas) < _SCHEMAS and len(schemas) <= _SYMBOLS:
        if registry is None:
            raise UserError(
                f"the records have the header of a schema registry (schema {min(schemas)}) and are"
                " not JSON; set DOLL_SCHEMA_REGISTRY_URL"
            )
        found = {number: schema for number in schemas if (schema := registry.schema(number))}
        for name, kind in REGISTERED.items():
            codec = RegisteredCodec((), kind)
            for number, schema in found.items():
                codec.learn(number, schema)
            if records := codec.objects(values):
                proposal = _Objects(records, label).proposal()
                return proposal._replace(records={**proposal.records, "codec": name}, schemas=found)
        raise UserError(
            f"no schema of the registry reads the records, which name {sorted(schemas)}"
        )
    return _tensors(values)


def _parsed(value: bytes) -> object:
    try:
        return msgspec.json.decode(unframed(value))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _tensors(values: Sequence[bytes]) -> Proposal:
    """Return a likely proposal for raw bytes, which do not describe themselves, to be corrected."""
    lengths = Counter(map(len, values))
    size, count = lengths.most_common(1)[0]
    if 2 * count < len(values) or size <= _LABEL_BYTES:
        found = ", ".join(f"{count} of {size} bytes" for size, count in lengths.most_common(3))
        raise UserError(f"the records are neither JSON objects nor of one length, got {found}")
    table = np.frombuffer(b"".join(value for value in values if len(value) == size), np.uint8)
    labels = np.ascontiguousarray(table.reshape(count, size)[:, -_LABEL_BYTES:]).view("<i8")
    rest = size - _LABEL_BYTES
    if not (labels.min() >= 0 and labels.max() < _CLASSES):
        raise UserError(
            f"the records have {size} bytes each, which do not end in a label (int64); ask their"
            " producer for the fields"
        )
    label, classes = {"dtype": "int64"}, max(2, int(labels.max()) + 1)
    fields: dict[str, Any] = {"features": {"dtype": "uint8", "shape": [rest]}, "label": label}
    task = {"name": "tabular-mlp", "classes": classes}
    if isqrt(rest) ** 2 == rest and rest > 16:
        side = isqrt(rest)
        fields = {"image": {"dtype": "uint8", "shape": [1, side, side]}, "label": label}
        task["name"] = "image-classifier"
    elif rest % 4 == 0:
        fields["features"] = {"dtype": "float32", "shape": [rest // 4]}
    guess = "nothing; but the fields are a guess from raw bytes, so ask the producer"
    return Proposal({"codec": "tensor", "fields": fields}, task, (guess,))


class _Objects:
    """JSON objects, by their paths."""

    def __init__(self, records: Sequence[Mapping[str, Any]], label: str | None) -> None:
        self._count = len(records)
        self._root: Keys = ()
        for envelope, inner in (({"schema", "payload"}, "payload"), ({"after", "op"}, "after")):
            inside = [_at(record, self._root) for record in records]
            if all(isinstance(each, dict) and envelope <= each.keys() for each in inside):
                self._root = (*self._root, inner)
        self._values = dict[Keys, list[Any]]()
        for record in records:
            for keys, value in _leaves(_at(record, self._root), self._root):
                self._values.setdefault(keys, []).append(value)
        self._names = {_path(keys): keys for keys in self._values}
        self._label = self._found_label(label)
        self._fields = dict[str, dict[str, Any]]()
        self._left_out = list[str]()

    def proposal(self) -> Proposal:
        label, classes = self._label_field()
        numbers = [keys for keys in self._values if self._is(keys, bool, int, float)]
        numbers = [keys for keys in numbers if keys != self._label]
        if numbers:
            self._fields["numbers"] = self._numbers(numbers)
        for keys, values in self._values.items():
            if keys != self._label and keys not in numbers:
                self._describe(keys, values)
        if not self._fields:
            why = "; ".join(self._left_out) or "the records have no other values"
            raise UserError(f"only the label can be read as numbers: {why}")
        task = {"name": "tabular-mlp", "classes": classes}
        if list(self._fields) == ["image"]:
            task["name"] = "image-classifier"
        return Proposal(
            {"codec": "json", "fields": {**self._fields, "label": label}},
            task,
            tuple(self._left_out),
        )

    def _found_label(self, label: str | None) -> Keys:
        if label is not None:
            if label not in self._names:
                raise UserError(
                    f"--label: no record has the path {label!r}; choose one of"
                    f" {', '.join(self._names)}"
                )
            return self._names[label]
        by_name = [keys for word in _LABELS for keys in self._values if keys[-1].lower() == word]
        by_kind = [keys for keys in self._values if self._is(keys, bool)]
        for keys in [*by_name, *by_kind]:
            return keys
        paths = ", ".join(self._names)
        raise UserError(f"--label: no path looks like a label; choose one of {paths}")

    def _label_field(self) -> tuple[dict[str, Any], int]:
        path, values = _path(self._label), self._values[self._label]
        symbols = sorted({text_of(each) for each in values if isinstance(each, str | int | float)})
        field: dict[str, Any] = {"dtype": "int64", **_from("label", path)}
        whole = self._is(self._label, bool, int) or self._is(self._label, bool, int, float)
        if whole and all(0 <= each < _CLASSES and each == int(each) for each in values):
            return field, max(2, 1 + int(max(values)))
        if not 1 < len(symbols) <= _SYMBOLS:
            raise UserError(
                f"label {path}: must have 2 to {_SYMBOLS} different values or be a small"
                " integer, got"
                f" {len(symbols)} values; choose another with --label, or write a task of your own"
            )
        field["map"] = {symbol: place for place, symbol in enumerate(symbols)}
        return field, len(symbols)

    def _is(self, keys: Keys, *kinds: type) -> bool:
        """Return True if all values of a path are of these types."""
        return {type(value) for value in self._values[keys]} <= set(kinds)

    def _numbers(self, several: Sequence[Keys]) -> dict[str, Any]:
        largest = [max(abs(value) for value in self._values[keys]) for keys in several]
        scale = [10.0 ** -max(0, ceil(log10(most))) if most > 1 else 1.0 for most in largest]
        field: dict[str, Any] = {"dtype": "float32", "from": [_path(keys) for keys in several]}
        if any(self._lacks(keys) for keys in several):
            field["default"] = 0
        return field | ({"scale": scale} if set(scale) != {1.0} else {})

    def _lacks(self, keys: Keys) -> bool:
        return len(self._values[keys]) < self._count

    def _describe(self, keys: Keys, values: Sequence[Any]) -> None:
        path, name = _path(keys), keys[-1]
        if name in (*self._fields, "label", "numbers"):
            name = "_".join(keys)
        texts = Counter(value for value in values if isinstance(value, str) and value)
        if 2 * sum(isinstance(value, list) for value in values) >= len(values):
            shape, whole = _shape(values)
            if shape is None:
                self._left_out.append(f"{path}: lists of different lengths or without numbers")
                return
            pixels = len(shape) == 3 and whole
            name = "image" if pixels else name
            dtype = "uint8" if pixels else "float32"
            field: dict[str, Any] = {"dtype": dtype, "shape": shape, **_from(name, path)}
        elif not self._is(keys, str, int, float, bool) or not texts:
            self._left_out.append(f"{path}: values of different types")
            return
        elif all(map(_is_number, texts)):
            field = {"dtype": "float32", **_from(name, path), "parse": "number", "default": 0}
        elif all(map(_is_time, texts)):
            first = min(datetime.fromisoformat(text).year for text in texts)
            offset = -float(datetime(first, 1, 1, tzinfo=UTC).timestamp() // 1e6 * 1e6)
            field = {"dtype": "float32", **_from(name, path), "parse": "time", "offset": offset}
        elif len(texts) <= _SYMBOLS:
            symbols = sorted(set(map(text_of, values)))
            field = {"dtype": "float32", **_from(name, path), "one_hot": symbols, "default": 0}
        else:
            self._left_out.append(
                f"{path}: {len(texts)} different texts (use the task `sparse-logistic` with"
                " `hashed`)"
            )
            return
        self._fields[name] = field


def _from(name: str, path: str) -> dict[str, str]:
    return {} if name == path else {"from": path}


def _path(keys: Keys) -> str:
    return ".".join(key.replace(".", "\\.") for key in keys)


def _at(record: Any, keys: Keys) -> Any:  # noqa: ANN401 -- a record holds any JSON
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def _leaves(value: Any, above: Keys) -> Iterator[tuple[Keys, Any]]:  # noqa: ANN401 -- a record holds any JSON
    if not isinstance(value, dict):
        if above and value is not None:
            yield above, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, (*above, key))


def _shape(values: Sequence[Any]) -> tuple[list[int] | None, bool]:
    """Return the shape that at least half of some arrays have, and True if they are integers.

    Records with another shape do not decode; `Proposal.text` counts them.
    """
    kinds = dict[tuple[int, ...], Counter[str]]()
    for value in values:
        try:
            array = np.array(value)
        # The lists in it have different lengths.
        except ValueError:
            continue
        if array.size and array.ndim and array.dtype.kind in "if":
            kinds.setdefault(array.shape, Counter())[array.dtype.kind] += 1
    if not kinds:
        return None, False
    shape, found = max(kinds.items(), key=lambda item: item[1].total())
    if 2 * found.total() < len(values):
        return None, False
    return list(shape), "f" not in found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _yaml(value: object) -> str:
    """Format a value as YAML on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_yaml(key)}: {_yaml(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    if isinstance(value, float):
        return f"{value:g}" if "e" not in f"{value:g}" else f"{value:.1e}"
    return json.dumps(value, ensure_ascii=False)
