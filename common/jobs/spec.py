"""Specification of a job: the job file that a user submits, validated as a whole before it runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import to_json

from common.config.policy_names import PolicyName  # noqa: TC001 -- pydantic reads it when run
from common.config.synchronisation import (
    MOST,
    PROPORTIONAL,
    SYNCHRONOUS,
    AggregationSpec,
    Count,
    Positive,
    SpecPart,
    SynchronisationSpec,
)
from common.config.validation import complaint, field_names
from common.core.settings import CONSTANT, RateSchedule, ScheduleKind
from common.data.columns import fits, text_of
from common.data.fields import (
    INTEGERS,
    LABELS,
    NUMBERS,
    DtypeName,
    Hashed,
    Keys,
    Mapped,
    OneHot,
    Parsed,
    Source,
    keys_of,
    records_per_pass,
)
from common.data.fields import Field as RecordField
from common.errors import UserError
from common.kafka import names as topics
from common.kafka.names import check_name
from doll.yaml_file import shown

if TYPE_CHECKING:
    from common.core.messages import SynchronisationMode
    from common.core.settings import AggregationSettings, SliceSettings


_ENTRYPOINT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MODEL = re.compile(r"[^/:]+")

# Number of workers to assume if a job sets no bound: a few machines, started by hand.
UNKNOWN_WORKERS = 8

NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _one_of(value: object, offered: Sequence[str]) -> object:
    if value in offered:
        return value
    raise ValueError(f"must be one of {', '.join(offered)}, got {value!r}")


# A field that the job's record omits while it is unset.
_Later = Field(exclude_if=lambda value: value is None)
# A list that the job's record omits while it is empty.
_IfAny = Field(exclude_if=lambda value: not value)
_Number = Annotated[float, Field(ge=-1e300, le=1e300)]
_Numbers = Annotated[_Number | tuple[_Number, ...] | None, _Later]
_Symbol = str | Annotated[int, Field(ge=-(2**53), le=2**53)] | _Number | bool


class FieldSpec(SpecPart):
    """One field of a record, and how its numbers are read from the record."""

    model_config = ConfigDict(serialize_by_alias=True)

    dtype: DtypeName
    """Type of the field's numbers. With `codec: tensor`, their bytes are little-endian."""
    shape: tuple[Count, ...] = Field(default=(), max_length=8)
    """Shape of the field's array in one record, such as [1, 8, 8]. Optional. If unset, the field
    is a single number, or has one number per entry if `from` or `one_hot` is a list."""
    source: Annotated[str | tuple[str, ...] | None, _Later] = Field(
        default=None, alias="from", min_length=1
    )
    """Path of the field's value in the record: keys joined by dots (`\\.` is a dot inside a key). A
    list of paths makes a field with one number per path. Optional. If unset, the field's own name
    is the key."""
    default: _Numbers = None
    """Number to use if the field's value is null, absent, or not listed in `map` or `one_hot`. One
    number, or a list with one number per path of `from`. With `one_hot` it must be 0. Optional. If
    unset, a record without a value is skipped."""
    scale: _Numbers = None
    """Factor to multiply each of the field's numbers by. One number, or a list with one number per
    path of `from`. For float fields only. Optional. If unset, 1."""
    offset: _Numbers = None
    """Number to add to each of the field's numbers, after `scale`. One number, or a list with one
    number per path of `from`. For float fields only. Optional. If unset, 0."""
    parse: Annotated[Literal["number", "time"] | None, _Later] = None
    """Conversion of the field's text to a number: `number` for text such as `12.5`; `time` for
    `2026-01-31T12:00:00Z`, which becomes seconds since 1970 (UTC unless the text names a zone).
    Optional. If unset, text is not converted."""
    hash: Annotated[Count | None, _Later] = None
    """Number of buckets into which the field's values are hashed. The field's number is then that
    of a bucket: CRC-32 of `path=value`, modulo the number of buckets. Values may be text, numbers,
    true or false. Optional. If unset, values are not hashed."""
    map: Annotated[dict[str, _Number] | None, _Later] = Field(default=None, min_length=1)
    """Number to use for each text that may occur as the field's value. Numbers and booleans in the
    record are matched by their text, such as `"1"` and `"true"`. Optional. If unset, texts are not
    mapped."""
    one_hot: Annotated[tuple[_Symbol, ...] | None, _Later] = Field(default=None, min_length=1)
    """List of symbols that may occur as the field's value. The field has one number per symbol: 1
    for the symbol that equals the value, 0 for all others. Optional. If unset, the value is a
    number itself."""

    @property
    def options(self) -> dict[str, Any]:
        """Options that the field sets besides dtype and shape."""
        return self.model_dump(exclude={"dtype", "shape"})

    @property
    def paths(self) -> tuple[str, ...] | None:
        """Paths of the field's columns; None if the field is one value."""
        return self.source if isinstance(self.source, tuple) else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the field: as given, or as implied by `from` or `one_hot`."""
        columns = self.one_hot if self.one_hot is not None else self.paths
        return self.shape if columns is None else (len(columns),)

    @property
    def reading(self) -> Parsed | Hashed | Mapped | OneHot | None:
        """Conversion of values that are not numbers; None if the field sets no conversion."""
        if self.parse is not None:
            return Parsed(self.parse)
        if self.hash is not None:
            return Hashed(self.hash)
        if self.map is not None:
            return Mapped(self.map)
        return None if self.one_hot is None else OneHot(tuple(map(text_of, self.one_hot)))

    def described(self, name: str) -> RecordField:
        """Return the field as codecs take it."""
        if not self.options:
            return RecordField(name, self.dtype, self.shape)
        paths: tuple[Keys, ...] = ((name,),)
        if self.source is not None:
            paths = tuple(map(_keys_of, self.paths or (str(self.source),)))
        default = self._by_path("default")
        if default is not None and self.one_hot is not None:
            # A default of -1 means for one_hot that no symbol matches.
            default = (-1.0,)
        scale, offset = self._by_path("scale"), self._by_path("offset")
        joined = self.paths is not None
        source = Source(paths, joined, self.reading, default, scale, offset)
        return RecordField(name, self.dtype, self.sizes, source)

    def _by_path(self, option: str) -> tuple[float, ...] | None:
        given: float | tuple[float, ...] | None = getattr(self, option)
        return (given,) * len(self.paths or "1") if isinstance(given, float | int) else given

    @model_validator(mode="after")
    def _stands_somewhere(self) -> FieldSpec:
        for path in self.paths or filter(None, [self.source]):
            _keys_of(str(path))
        if self.shape and self.shape != self.sizes:
            implied = "one_hot" if self.one_hot is not None else "from"
            raise ValueError(
                f"shape: {list(self.shape)} conflicts with the shape implied by `{implied}`"
                f" ({list(self.sizes)}); remove it"
            )
        if self.one_hot is not None and self.paths is not None:
            raise ValueError(
                "one_hot: requires a single path in `from`; write one field for each path"
            )
        for option in ("default", "scale", "offset"):
            if len(self._by_path(option) or self.paths or "1") != len(self.paths or "1"):
                raise ValueError(f"{option}: must be one number, or one for each path of `from`")
        return self

    @model_validator(mode="after")
    def _becomes_numbers(self) -> FieldSpec:
        several = [name for name in _READINGS if getattr(self, name) is not None]
        if len(several) > 1:
            raise ValueError(f"{' and '.join(several)} cannot be combined; keep one")
        if self.shape and several and not self.sizes == (len(self.one_hot or ()),):
            raise ValueError(
                f"shape: {several[0]} converts a single value, got {list(self.shape)}; remove it,"
                " or list several paths in `from`"
            )
        scaled = self.scale is not None or self.offset is not None
        if scaled and (not self.dtype.startswith("float") or several not in ([], ["parse"])):
            raise ValueError(
                "scale and offset require dtype float32 or float64, without hash, map and one_hot"
            )
        symbols = list(map(text_of, self.one_hot or ()))
        if len(set(symbols)) < len(symbols):
            raise ValueError("one_hot: lists a symbol twice; remove one of them")
        if symbols and self.default not in (None, 0):
            raise ValueError(f"default: must be 0 with one_hot, got {shown(self.default)}")
        written = [("map", number) for number in (self.map or {}).values()]
        written += [("hash", self.hash - 1)] if self.hash else []
        written += [("default", number) for number in self._by_path("default") or ()]
        for option, number in written:
            if not fits(number, self.dtype):
                raise ValueError(f"{option}: must fit into dtype {self.dtype}, got {number:g}")
        return self


_READINGS = ("parse", "hash", "map", "one_hot")


def _keys_of(path: str) -> Keys:
    """Split a path into its keys.

    Raises:
        ValueError: If the path is malformed.
    """
    try:
        return keys_of(path)
    except ValueError as error:
        raise ValueError(f"from: {error}, got {shown(path)}") from error


# Allowed dtypes of the fields index and value.
_HASHED = (("int32", "float32"), ("int64", "float32"))


class HashedSpec(SpecPart):
    """Hashing of all keys of a record that no field names into the fields `index` and `value`."""

    buckets: Count
    """Number of buckets to hash features into. The bucket of a feature is a CRC-32 modulo this
    number: of `path=value` for a text, of the path alone for a number."""


_CODECS = ("tensor", "json", "avro", "protobuf")


class RecordsSpec(SpecPart):
    """Format of the records in a job's streams, and their fields."""

    codec: str = Field(default="tensor", json_schema_extra={"enum": list(_CODECS)})
    """Encoding of a record: `tensor` for the bytes of all fields, in the order of `fields`; `json`
    for a JSON object, with or without JSON Schema; `avro` or `protobuf` with schemas in the
    registry that DOLL_SCHEMA_REGISTRY_URL names."""
    fields: dict[str, FieldSpec] = Field(min_length=1)
    """Fields of a record, by name."""
    hashed: Annotated[HashedSpec | None, _Later] = None
    """Treat every key of the record that is not in `fields` as a feature, and hash it into the
    fields `index` and `value`. For `codec: json` only. Optional. If unset, other keys are
    ignored."""

    @property
    def buckets(self) -> int:
        """Number of buckets into which keys are hashed; 0 if none are."""
        return self.hashed.buckets if self.hashed else 0

    def described(self) -> tuple[RecordField, ...]:
        """Return the fields as codecs take them."""
        return tuple(field.described(name) for name, field in self.fields.items())

    @field_validator("codec")
    @classmethod
    def _offered(cls, value: str) -> object:
        if value == "json-schema":
            raise ValueError("must be json for records with JSON Schema, got 'json-schema'")
        return _one_of(value, _CODECS)

    @model_validator(mode="after")
    def _has_names(self) -> RecordsSpec:
        for name, field in self.fields.items() if self.codec == "tensor" else ():
            for option in field.options:
                raise ValueError(
                    f"fields.{name}.{option}: requires records with named values, such as those of"
                    " `codec: json`, got `codec: tensor`; remove it"
                )
        return self

    @model_validator(mode="after")
    def _has_room_for_features(self) -> RecordsSpec:
        index, value = self.fields.get("index"), self.fields.get("value")
        fit = (
            self.codec == "json"
            and index is not None
            and value is not None
            and (index.dtype, value.dtype) in _HASHED
            and index.shape == value.shape
            and len(index.shape) == 1
        )
        if self.hashed and not fit:
            raise ValueError(
                "hashed: requires `codec: json` and two fields of the same shape [n], with n the"
                " maximum number of features of a record: index, int32 or int64, and value, float32"
            )
        return self


class TaskSpec(SpecPart):
    """Task to learn: built in (`name`), or your own class (`entrypoint`) or module (`module`)."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None
    """Name of a built-in task, such as `image-classifier`. Optional. If unset, `entrypoint` or
    `module` must name a task."""
    entrypoint: str | None = None
    """Class that defines a task of your own, as `package.module:Class`. The setting DOLL_TASKS of
    coordinators and workers must list this class. Optional. If unset, `name` or `module` must name
    a task."""
    module: str | None = None
    """Class of a torch module that is the task, as `package.module:Class`. The setting DOLL_TASKS
    of coordinators and workers must list this class. The option `loss` names a loss of
    `torch.nn.functional`, `inputs` lists the fields that the module gets, and `target` is the field
    that the loss compares with. All other options are arguments of the class. Optional. If unset,
    `name` or `entrypoint` must name a task."""

    @property
    def own(self) -> str | None:
        """The user's class: `entrypoint` or `module`. None for a built-in task."""
        return self.entrypoint or self.module

    @property
    def options(self) -> dict[str, Any]:
        """Options of the task, as given, and `module`, which says how to read them."""
        module = {} if self.module is None else {"module": self.module}
        return module | (self.model_extra or {})

    @field_validator("name")
    @classmethod
    def _built_in(cls, value: str | None) -> object:
        return None if value is None else _one_of(value, tuple(BUILT_IN_TASKS))

    @field_validator("entrypoint", "module")
    @classmethod
    def _importable(cls, value: str | None) -> str | None:
        if value is not None and not _ENTRYPOINT.fullmatch(value):
            raise ValueError(f"must be package.module:Class, got {value!r}")
        return value

    @model_validator(mode="after")
    def _one_way(self) -> TaskSpec:
        if [self.name, self.entrypoint, self.module].count(None) != 2:
            raise ValueError("must have one of name, entrypoint and module")
        return self


_OBJECT = re.compile(r"(s3://[A-Za-z0-9._-]+)/[^\x00-\x1f]+")
_URL = re.compile(r"(https?)://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/[!-~]*")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def place_of(source: str) -> str:
    """Return the host, or the bucket as `s3://bucket`, of a file's address; empty for a path.

    Raises:
        ValueError: If the address is none that `init` accepts.
    """
    parts = source.split("/")
    found = _OBJECT.fullmatch(source)
    if found and not {".", ".."} & {*parts}:
        return found[1]
    if found := _URL.fullmatch(source):
        host = found[2].strip("[]").lower()
        if found[1] == "http" and host not in _LOOPBACK:
            raise ValueError("must begin with https://, because the host is not this machine's own")
        return host
    if not all(parts) or not source.isprintable() or {".", ".."} & {*parts} or ":" in parts[0]:
        raise ValueError(
            "must be s3://bucket/key, https://host/path or a relative path without `..`"
        )
    return ""


class InitSpec(SpecPart):
    """Pretrained weights to start from; without this block, the task's `build` sets all weights.

    The job's first leader reads the file once, before the first update, and stores the weights with
    the checkpoints. Later changes of the file have no effect.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    source: str = Field(alias="from", max_length=2000)
    """Safetensors file with tensors of the module's `state_dict`: `s3://bucket/key`, a URL
    `https://host/path`, or a path below the folder that the coordinators' setting DOLL_MODELS
    names. Other hosts and buckets than the bucket of DOLL_BLOBS must stand in DOLL_INIT_HOSTS. The
    address is part of the job, which all viewers may read."""
    sha256: str = Field(json_schema_extra={"pattern": f"^{_SHA256.pattern}$"})
    """SHA-256 of the file, as 64 hexadecimal digits in lower case. A file with another checksum is
    not used."""
    new: Annotated[tuple[str, ...], Field(max_length=100)] = ()
    """Patterns of names that are not taken from the file, such as `head.*`, where `*` stands for
    any text, dots included. The module's tensors with such names keep the values of `build`. Every
    other tensor of the module must be in the file with the same shape, and the file must have no
    others."""

    @property
    def shown(self) -> str:
        """Address for messages, without the query of a URL, which may hold a secret."""
        return self.source.partition("?")[0] if "://" in self.source else self.source

    def why_unlisted(self, hosts: Collection[str], blobs: str) -> str:
        """Return why the file's host or bucket may not be read; empty if it may.

        Args:
            hosts: The setting DOLL_INIT_HOSTS.
            blobs: The setting DOLL_BLOBS.
        """
        place = place_of(self.source)
        if place in ("", *hosts) or f"{blobs}/".startswith(f"{place}/"):
            return ""
        return (
            f"{place} is not listed in the setting DOLL_INIT_HOSTS of coordinators and of the admin"
            " service; add it there"
        )

    @field_validator("source")
    @classmethod
    def _readable(cls, value: str) -> str:
        place_of(value)
        return value

    @field_validator("sha256")
    @classmethod
    def _checksum(cls, value: str) -> str:
        if not _SHA256.fullmatch(value):
            raise ValueError(f"must be 64 hexadecimal digits in lower case, got {shown(value)}")
        return value


class CompressionSpec(SpecPart):
    """Limit on which changes of the model are sent to workers; without this block, all of them are.

    An update always contains complete gradients. Only the weights at which workers compute
    gradients are inexact.
    """

    significance: float | None = Field(default=None, gt=0)
    """Significance threshold v: the change of a weight is sent to workers if it is larger than v /
    sqrt(J) times the weight, where J is the model's version (its number of updates). 1.5 is
    recommended. Required unless `changes` is set."""
    changes: float | None = Field(default=None, gt=0, le=1)
    """Maximum share of the model's weights to send to a worker with each new version, from 0 to 1.
    The weights that changed most are sent. Required unless `significance` is set."""

    @model_validator(mode="after")
    def _one_way(self) -> CompressionSpec:
        if (self.significance is None) == (self.changes is None):
            raise ValueError("must have either significance or changes")
        return self


class TunerSpec(SpecPart):
    """Settings of a job that DOLL tunes while the job runs; without this block, none are."""

    group_size: tuple[Count, Count] | None = None
    """Range within which DOLL tunes `group_size` (K), as [least, most]: the more noise the
    gradients have, the more batches an update gets. K is tuned from update 20 on, while no rule of
    `synchronisation` applies. `learning_rate` is the rate for the job's own `group_size`; with
    `sgd` and `momentum`, it is adapted to the tuned K. Optional. If unset, K is not tuned."""
    workers: Literal["balanced"] | None = None
    """Rule for the number of rented machines: `balanced` rents the number, at most
    `provisioning.workers`, with the least product of an update's time and cost. Only updates for
    which enough records waited are measured. Optional. If unset, the number of workers is not
    tuned."""

    @field_validator("workers", mode="before")
    @classmethod
    def _offered(cls, value: object) -> object:
        if value == "cost":
            raise ValueError(
                "`cost` would always choose one worker; use balanced, or"
                " provisioning.policy: pools, which rents as few workers as keep up with arrivals"
            )
        return value

    @model_validator(mode="after")
    def _fits(self) -> TunerSpec:
        if self.group_size is None and self.workers is None:
            raise ValueError("must have group_size, workers, or both")
        least, most = self.group_size or (2, 2)
        if not 2 <= least <= most:
            raise ValueError(
                "group_size: must be [least, most] with least at least 2, because noise is measured"
                f" between two gradients, got [{least}, {most}]"
            )
        return self


class ScheduleSpec(SpecPart):
    """Schedule by which the learning rate changes during a job."""

    kind: ScheduleKind
    """Shape of the schedule. At t updates after the warm-up, with n = `updates`: `constant` keeps
    the full rate (the optimizer's `learning_rate`); `step` multiplies the rate by `factor` after
    every n updates; `cosine` falls along half a cosine wave and reaches `final` at n;
    `inverse_sqrt` multiplies the full rate by 1 / sqrt(1 + t / n)."""
    warmup_updates: Annotated[int, Field(ge=0, le=MOST)] = 0
    """Number of updates at the start of the job over which the learning rate rises linearly to its
    full value."""
    updates: Count | None = None
    """Length of the schedule (n in the formulas of `kind`), as a number of updates. An update with
    another number of batches than the job's `group_size` counts in proportion. Required unless
    `kind` is `constant`."""
    factor: Share | None = None
    """Factor by which `kind: step` multiplies the learning rate after every `updates` updates.
    Optional. If unset, 0.1."""
    final: Share | None = None
    """Lowest learning rate of `kind: step` and `kind: cosine`, as a share of the optimizer's
    `learning_rate`. Optional. If unset, 0.01."""

    _own: ClassVar[dict[str, frozenset[str]]] = {
        "constant": frozenset(),
        "step": frozenset({"updates", "factor", "final"}),
        "cosine": frozenset({"updates", "final"}),
        "inverse_sqrt": frozenset({"updates"}),
    }

    @property
    def _given(self) -> dict[str, Any]:
        return self.model_dump(exclude={"kind", "warmup_updates"}, exclude_none=True)

    @model_validator(mode="after")
    def _fits(self) -> ScheduleSpec:
        for option in sorted(self._given.keys() - self._own[self.kind]):
            raise ValueError(f"{option}: is not an option of kind {self.kind}; remove it")
        if self.updates is None and self.kind != "constant":
            raise ValueError(f"updates: is missing; kind {self.kind} requires it, for example 1000")
        return self

    @property
    def core(self) -> RateSchedule:
        """Return the schedule as the core takes it."""
        return RateSchedule(self.kind, self.warmup_updates, **self._given)


class ParameterGroupSpec(SpecPart):
    """Learning rate and weight decay of some of the model's parameters."""

    match: Annotated[str, Field(min_length=1, max_length=1000)]
    """Pattern for the dotted names of parameters, as in `module.named_parameters()`: `*` stands for
    any characters, also dots. Example: `encoder.*`. The first group that matches a parameter
    applies. A pattern that matches no trained parameter is refused."""
    learning_rate: Annotated[Positive | None, _Later] = None
    """Learning rate of these parameters. A schedule applies to it, and with a tuned or another
    `group_size` of a rule it is adapted like the optimizer's. Learning rates of rules, and later
    changes of the job's learning rate, do not apply to it. Optional. If unset, the optimizer's."""
    weight_decay: Annotated[NotNegative | None, _Later] = None
    """Weight decay of these parameters. Not for `ftrl`. Optional. If unset, the optimizer's."""

    @model_validator(mode="after")
    def _has_options(self) -> ParameterGroupSpec:
        if self.learning_rate is None and self.weight_decay is None:
            raise ValueError("must have learning_rate, weight_decay, or both")
        return self


class OptimizerSpec(SpecPart):
    """Optimizer that applies the gradient of each update to the model's weights."""

    name: Literal["sgd", "momentum", "adam", "adamw", "adagrad", "ftrl"] = "sgd"
    """Name of the optimizer: `ftrl` is FTRL-Proximal (McMahan et al. 2013), and the others are
    PyTorch's. The optimizer `momentum` is `sgd`, but its option `momentum` is 0.9 if unset."""
    learning_rate: Positive
    """Learning rate of the optimizer; for `ftrl`, the parameter alpha."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Momentum factor, at least 0 and below 1. For the optimizers `sgd` and `momentum`. Optional.
    If unset, 0 for `sgd` and 0.9 for `momentum`."""
    nesterov: bool | None = None
    """True to use Nesterov momentum. For the optimizer `momentum`, and for `sgd` if the option
    `momentum` is set. Optional. If unset, false."""
    weight_decay: NotNegative | None = None
    """L2 penalty on the weights; with the optimizer `adamw` decoupled from the gradient. Not for
    `ftrl`. Optional. If unset, 0.01 for `adamw` and 0 for all others."""
    betas: tuple[Beta, Beta] | None = None
    """Decay rates of the running means of the gradient and of its square. For the optimizers `adam`
    and `adamw`. Optional. If unset, [0.9, 0.999]."""
    eps: Positive | None = None
    """Term added to the divisor of a step, so that it is never zero. For the optimizers `adam`,
    `adamw` and `adagrad`. Optional. If unset, 1e-10 for `adagrad` and 1e-8 for the others."""
    l1: Annotated[NotNegative | None, _Later] = None
    """L1 penalty of the optimizer `ftrl`: weights that no gradient pulls away from zero become
    exactly zero. Optional. If unset, 0."""
    l2: Annotated[NotNegative | None, _Later] = None
    """L2 penalty of the optimizer `ftrl`. Optional. If unset, 0."""
    clip_norm: Annotated[Positive | None, _Later] = None
    """Maximum norm of an update's gradient, applied once, after `reduction`. A gradient with a
    larger norm is scaled down to this norm. Optional. If unset, gradients are not clipped."""
    schedule: Annotated[ScheduleSpec | None, _Later] = None
    """Schedule of the learning rate. Optional. If unset, the rate is constant."""
    groups: Annotated[tuple[ParameterGroupSpec, ...], _IfAny] = Field(default=(), max_length=100)
    """Groups of parameters with a learning rate or weight decay of their own. Optional. If unset,
    all parameters have the optimizer's."""
    no_decay: Annotated[tuple[Literal["norms", "biases"], ...], _IfAny] = ()
    """Kinds of parameters without weight decay, even if a group sets one: `norms` for those of
    normalization layers, `biases` for those with the word `bias` in their own name, such as `bias`
    or `in_proj_bias`. Not for `ftrl`. Optional. If unset, none."""

    _own: ClassVar[dict[str, frozenset[str]]] = {
        "sgd": frozenset({"weight_decay", "momentum", "nesterov"}),
        "momentum": frozenset({"weight_decay", "momentum", "nesterov"}),
        "adam": frozenset({"weight_decay", "betas", "eps"}),
        "adamw": frozenset({"weight_decay", "betas", "eps"}),
        "adagrad": frozenset({"weight_decay", "eps"}),
        "ftrl": frozenset({"l1", "l2"}),
    }

    @property
    def options(self) -> dict[str, Any]:
        """Options that this optimizer was given, besides the name and the learning rate."""
        others = {"name", "learning_rate", "clip_norm", "schedule", "groups", "no_decay"}
        return self.model_dump(exclude=others, exclude_none=True)

    @property
    def has_own_rates(self) -> bool:
        """True if a group of parameters has its own learning rate."""
        return any(each.learning_rate is not None for each in self.groups)

    @property
    def scheduled(self) -> RateSchedule:
        """Schedule of the learning rate; by default constant."""
        return CONSTANT if self.schedule is None else self.schedule.core

    @model_validator(mode="after")
    def _fits(self) -> OptimizerSpec:
        for option in sorted(self.options.keys() - self._own[self.name]):
            takes = [name for name, own in self._own.items() if option in own]
            raise ValueError(
                f"{option}: is not an option of {self.name}, only of {', '.join(takes)}; remove it"
            )
        if "weight_decay" not in self._own[self.name]:
            decays = [each.weight_decay is not None for each in self.groups]
            if self.no_decay or any(decays):
                field = f"groups[{decays.index(True)}].weight_decay" if any(decays) else "no_decay"
                raise ValueError(f"{field}: {self.name} has no weight decay; remove it")
        if self.name == "momentum" and self.momentum == 0:
            raise ValueError("momentum: must be above 0, got 0; use sgd instead")
        if self.nesterov and self.name == "sgd" and not self.momentum:
            raise ValueError(
                "nesterov: requires a momentum with sgd; set momentum, for example to 0.9"
            )
        return self


class StopSpec(SpecPart):
    """Conditions that end the job, whichever is met first; without any, the job runs forever."""

    updates: Count | None = None
    """Number of updates of the model after which the job ends. An update with another number of
    batches than the job's `group_size` counts in proportion. Optional. If unset, no limit."""
    loss: Positive | None = None
    """Loss at which the job ends: it ends when the mean loss per record over the last 20 updates is
    at or below this value. Optional. If unset, no limit."""
    deadline_s: Positive | None = None
    """Deadline of the job, in seconds after its submission. At the deadline, the job ends.
    Optional. If unset, no deadline."""


class CheckpointSpec(SpecPart):
    """Interval of checkpoints (the job's state in object storage), and how many are kept."""

    every_updates: Count | None = None
    """Maximum number of updates between two checkpoints. Optional. If unset, 200; with
    `aggregation.layout: slices` 20, because the updates since the last checkpoint are lost if all
    workers that own a slice of the weights fail together."""
    every_s: Positive = 300.0
    """Maximum time between two checkpoints, in seconds. A checkpoint is written after this time or
    after `every_updates` updates, whichever comes first."""
    keep: Count = 3
    """Number of checkpoints to keep; older ones are deleted. Keep more than one, because a crash
    may leave the newest one incomplete, and a coordinator that takes over the job may continue from
    an earlier one."""


class HotSnapshotSpec(SpecPart):
    """Interval of full copies of the model in Redis, for a coordinator that takes over the job."""

    every_s: Positive = 1.0
    """Time between two full copies of the model in Redis (hot snapshots), in seconds. If the
    coordinator that leads the job fails, the next one continues from the last copy, and only later
    updates are lost. If Redis has lost the copy, the next coordinator continues from a
    checkpoint."""


class BidBrainSpec(SpecPart):
    """Time that a job loses when its machines change, as `policy: bidbrain` assumes."""

    lambda_s: float = Field(default=30.0, ge=0)
    """Time for which the policy assumes that all work stops after the provider evicts a machine, in
    seconds (lambda in the Proteus paper, Harlap et al. 2017)."""
    start_s: float | None = Field(default=None, ge=0)
    """Time for which the policy assumes that all work stops when machines are added or removed, in
    seconds (sigma in the Proteus paper, Harlap et al. 2017). Optional. If unset, the longest
    start-up time of the market's machines."""


class ProvisioningSpec(SpecPart):
    """Machines that DOLL rents for a job; without this block, workers are started by hand."""

    workers: Count
    """Number of workers, each on a machine of its own: the maximum number of machines that work at
    the same time."""
    policy: PolicyName | None = None
    """Policy that decides which machines to rent. `on-demand`: only on-demand machines; `static`:
    the cheapest mix of spot and on-demand machines that meets the deadline on average, chosen once;
    `adaptive`: this mix, chosen again when prices, availability or progress change; `chance`: a
    mix, chosen once, that meets the deadline with `probability`; `pools`: spot machines of several
    kinds, and on-demand machines when time gets short; `bidbrain`: bids for the spot machines that
    process a backlog at the lowest cost, without regard to the deadline (Proteus, Harlap et al.
    2017). Optional. If unset, `adaptive` with `on_preemption: hold`, and `pools` with
    `on_preemption: reassign`."""
    probability: float = Field(default=0.95, gt=0.5, lt=1)
    """Minimum probability, above 0.5, with which the rented machines must meet the deadline. For
    `policy: chance`."""
    review_s: Positive | None = None
    """Time between two checks whether to rent other machines, in seconds. Optional. If unset, 10
    for `policy: pools`, 30 for `adaptive` and 120 for `bidbrain`."""
    bidbrain: BidBrainSpec | None = None
    """Pauses that `policy: bidbrain` assumes when machines start or end. Optional. If unset, the
    defaults of the block's fields."""
    max_lag_s: Annotated[Positive | None, _Later] = None
    """Maximum time that a record may wait until the model is trained on it, in seconds; at least
    the start-up time of an on-demand machine. If spot machines are lost, on-demand machines are
    started early enough. For `policy: pools`. Optional. If unset, there is no such limit: with
    `on_preemption: hold`, a stream may wait as long as the deadline can still be met; with
    `on_preemption: reassign`, updates keep up with arrivals on average."""
    spot_up_to: float = Field(default=1.5, ge=1, le=10, exclude_if=lambda value: value == 1.5)
    """Maximum number of spot machines, as a multiple of `workers`. Above 1, there are spare
    machines: if a stream's machine is lost, a spare machine reads the stream. For `policy: pools`
    with `on_preemption: hold`."""
    reliable: int = Field(default=0, ge=0, le=MOST, exclude_if=lambda value: value == 0)
    """Number of machines that are always rented on demand, so that no provider preempts them. For
    `policy: pools`."""


class EvaluationSpec(SpecPart):
    """Evaluation of the model while it is trained; without this block, it is not evaluated."""

    every_updates: Count = 50
    """Interval of evaluations, as a number of updates: with 50, every 50th version of the model is
    evaluated."""
    stream: str = Field(default="", json_schema_extra={"pattern": "^[A-Za-z0-9._-]{0,245}$"})
    """Kafka topic of the test set, in the same format as the job's records. Optional. If unset,
    there is no test set, and the model is evaluated only on the job's own new records, before it is
    trained on them."""
    records: Count = 2000
    """Maximum number of records of the test set to use: the first ones of the topic `stream`."""


class TrackingSpec(SpecPart):
    """Report of a job's progress to the MLflow server that the setting DOLL_MLFLOW names."""

    model_config = ConfigDict(serialize_by_alias=True)

    experiment: str = Field(default="Default", min_length=1)
    """Name of the MLflow experiment to which the job is added as a run. The experiment must
    exist."""
    model: str | None = Field(
        default=None, alias="register", json_schema_extra={"pattern": f"^{_MODEL.pattern}$"}
    )
    """Name of the registered model in MLflow to which the job's checkpoints are added as versions.
    Optional. If unset, checkpoints are not registered."""

    @field_validator("model")
    @classmethod
    def _names_model(cls, value: str | None) -> str | None:
        if value is not None and not _MODEL.fullmatch(value):
            raise ValueError(f"must be a name without / and :, got {shown(value)}")
        return value


class Needed(NamedTuple):
    """Requirements of a built-in task for a field."""

    dtypes: tuple[str, ...]
    # The task's option that gets the size of each dimension of the shape.
    sizes: tuple[str, ...]
    words: str


_IMAGE = Needed(
    NUMBERS,
    ("channels", "height", "width"),
    "numbers of shape [channels, height, width]",
)
_FEATURES = Needed(NUMBERS, ("features",), "numbers of shape [features]")
_LABEL = Needed(LABELS, (), "a whole number (int64) without a shape")
_ID = Needed(INTEGERS, (), "a whole number (int64) without a shape")
_INDEX = Needed(INTEGERS, ("entries",), "whole numbers (int32) of shape [entries]")
_VALUE = Needed(NUMBERS, ("entries",), "numbers of shape [entries]")
_NUMBER = Needed(NUMBERS, (), "a number without a shape")

# Fields that each built-in task reads. Other tasks check their fields when they are loaded.
BUILT_IN_TASKS: dict[str, dict[str, Needed]] = {
    "image-classifier": {"image": _IMAGE, "label": _LABEL},
    "logistic-regression": {"features": _FEATURES, "label": _LABEL},
    "tabular-mlp": {"features": _FEATURES, "label": _LABEL},
    "linear-regression": {"features": _FEATURES, "target": _NUMBER},
    "sparse-logistic": {"index": _INDEX, "value": _VALUE, "label": _LABEL},
    "matrix-factorisation": {"user": _ID, "item": _ID, "rating": _NUMBER},
    "lda": {"index": _INDEX, "value": _VALUE},
}
# Tasks that accept any fields as features.
_JOINING = ("logistic-regression", "tabular-mlp", "linear-regression")


_Stream = Annotated[str, Field(json_schema_extra={"pattern": f"^{topics.STREAM.pattern}$"})]


class JobSpec(SpecPart):
    """A training job: the job file that a user submits."""

    name: str = Field(json_schema_extra={"pattern": "^[a-z0-9][a-z0-9._-]{0,99}$"})
    """Name of the job. The names of the job's Kafka topics, Redis keys and files contain it."""
    streams: tuple[_Stream, ...] = Field(min_length=1)
    """Kafka topics to read records from, one per data stream."""
    records: RecordsSpec
    """Format of the records in the job's streams, and their fields."""
    task: TaskSpec
    """Task to learn: the model, its loss and its metrics."""
    init: Annotated[InitSpec | None, _Later] = None
    """Pretrained weights to start from. Optional. If unset, the task's `build` sets all weights."""
    batch_size: Count
    """Number of records per batch (b). A worker computes one gradient per batch."""
    group_size: Count
    """Number of batches per update of the model (K)."""
    synchronisation: Annotated[SynchronisationSpec | None, _Later] = None
    """Synchronisation between workers: whether they wait for each other. Optional. If unset,
    `mode: synchronous`."""
    aggregation: Annotated[AggregationSpec | None, _Later] = None
    """Processes that sum gradients and hold the weights. Optional. If unset, `mode: board`: the
    coordinator that leads the job does both."""
    optimizer: OptimizerSpec
    """Optimizer that applies the gradient of each update to the model's weights."""
    compression: Annotated[CompressionSpec | None, _Later] = None
    """Limit on the changes of weights that are sent to workers, to save network traffic: only the
    largest changes are sent. Models of up to 64 KB are always sent in full. Optional. If unset, all
    changes are sent."""
    tuner: Annotated[TunerSpec | None, _Later] = None
    """Settings that DOLL tunes by itself while the job runs: `group_size` and the number of
    workers. Optional. If unset, no setting is tuned."""
    reduction: Literal["mean", "sum"] = "mean"
    """Combination of the gradients of an update's records: their `mean` or their `sum`."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the random initial weights."""
    stop: StopSpec = StopSpec()
    """Conditions that end the job, whichever is met first; without any, the job runs forever."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints (saved states of the job in object storage): how often they are written, and how
    many are kept."""
    hot_snapshot: HotSnapshotSpec = HotSnapshotSpec()
    """Interval at which the model is copied to Redis. If the coordinator that leads the job fails,
    the next one continues from the last copy."""
    on_preemption: Literal["reassign", "hold"] = "reassign"
    """Rule for the streams that a lost worker was reading: with `reassign`, other workers read them
    at once; with `hold`, the streams wait until the worker returns or another machine takes its
    place."""
    on_missing: Literal["redispatch", "proceed"] = "redispatch"
    """Rule for batches that a lost worker was computing for the current update: `redispatch`
    assigns them to other workers; `proceed` makes the update without these batches, which become
    part of a later update."""
    start_at: str = "earliest"
    """Position in the data streams at which the job starts: `earliest` for the first record,
    `latest` for records that arrive from now on, or a time with its zone, such as
    2026-01-31T12:00:00Z."""
    batch_linger_s: NotNegative | None = None
    """Time after its first record at which a batch is closed even if it has fewer than `batch_size`
    records, in seconds. If the model has batch normalization, a batch needs two records, so a
    single record waits longer. Optional. If unset, batches are always full."""
    group_linger_s: NotNegative | None = None
    """Time without a new batch after which an update is made with fewer than `group_size` batches,
    in seconds. Optional. If unset, every update waits for all `group_size` batches."""
    waiting_batches: Count | None = None
    """Maximum number of batches that one worker has read and that are in no update yet, at least
    `group_size` (K); at this number, the worker stops reading. Optional. If unset, 2K, or more if
    the synchronisation mode lets several updates be in progress at the same time."""
    max_failures: Count = 5
    """Number of failures that a batch may have; one more failure puts the batch into quarantine,
    where it is not trained. A failure is a death of the batch's worker, an error of the task, or a
    result that is not finite. A failure counts only if the worker was computing no other batch,
    which could be the cause. After its first failure, a batch is given to a worker that computes
    nothing else meanwhile."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Precision of gradients. With `tf32`, a GPU of compute capability 8.0 or higher rounds the
    inputs of matrix products and convolutions to a mantissa of 10 bits; other devices compute in
    float32. With `bfloat16`, the forward pass runs under `torch.autocast`, also on a CPU, and keeps
    float32 for operations that need it. Weights and updates are always float32."""
    pass_records: Count | None = None
    """Number of records up to which neighbouring batches share a pass (forward and backward), if
    one worker computes them for the same update. A batch with more records is a pass of its own. If
    the module has buffers or the task draws random numbers, each batch is a pass of its own.
    Optional. If unset, the number of records whose fields take 128 KiB, on every device. This is
    fastest on a CPU, and little for a GPU."""
    compile: bool = False
    """True to compile the module by `torch.compile` before a worker joins the job. It needs Triton
    and a C compiler on a GPU, and a C++ compiler on a CPU. If they are missing or torch cannot
    compile the module, the worker reports the reason and does not work for the job."""
    deterministic: bool | None = None
    """True if the same batches at the same weights must give a gradient of the same bits on the
    same kind of device. If PyTorch has no such implementation of an operation, the task fails with
    an error that names the operation. Optional. If unset, true on a CPU and false on a GPU, where
    it costs time."""
    oom: Annotated[Literal["chunk", "hold"] | None, _Later] = None
    """Rule for a batch for which the memory of a worker or its GPU does not suffice: with `chunk`,
    the worker sums the batch's gradient in smaller parts, down to single records; with `hold`, it
    computes no part. If every worker then lacks the memory, the job is held. Optional. If unset,
    `chunk`; for a model with batch normalization `hold`, because its statistics depend on the
    records that are computed together."""
    weight: Positive = 1.0
    """Weight of the job if all jobs together need more workers than there are: a job of weight 2
    gets twice as many workers as a job of weight 1 with the same backlog."""
    provisioning: ProvisioningSpec | None = None
    """Machines that DOLL's provisioner rents to run the job's workers. Optional. If unset, no
    machines are rented, and you start workers yourself."""
    evaluation: EvaluationSpec | None = None
    """Evaluation of the model while it is trained. Optional. If unset, the model is not
    evaluated."""
    tracking: Annotated[TrackingSpec | None, _Later] = None
    """Report of the job's loss and metrics to an MLflow server. Optional. If unset, nothing is
    reported."""

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:  # noqa: ANN401 -- as pydantic's
        """Validate plain data as at submission, with lists for fields that are tuples."""
        if isinstance(obj, Mapping):
            return cls.model_validate_json(to_json(obj), **options)
        return super().model_validate(obj, **options)

    @property
    def records_per_pass(self) -> int:
        """Maximum number of records of batches that share a pass. The same on all devices."""
        fields = self.records.described()
        record_bytes = sum(prod(each.shape) * each.numpy_dtype.itemsize for each in fields)
        return self.pass_records or records_per_pass(record_bytes)

    @property
    def waiting_bound(self) -> int:
        """Maximum number of unsettled batches per worker.

        It is at least K, so that a single survivor can fill a group. The default is 2K: a single
        survivor collects the next group while it computes this one; with K alone its stream would
        stop during every round. Each further round that may be in flight adds K. If rules name
        other modes, the mode with the highest number counts.
        """
        return self.waiting_batches or self.synchronised.batches_held(self._most_tuned)

    @property
    def mode(self) -> SynchronisationMode:
        """Synchronisation mode of the job itself, without its rules."""
        return self.synchronised.mode

    @property
    def most_rounds(self) -> int:
        """Maximum number of updates in flight, as far as it is known before workers run."""
        workers = self.provisioning.workers if self.provisioning is not None else None
        modes = [mode for mode, _ in self.synchronised.modes(self.group_size)]
        rounds = [1 + mode.fixed_staleness for mode in modes if not mode.staleness_per_worker]
        most = max(rounds, default=1)
        if len(rounds) < len(modes):
            return workers or max(most, UNKNOWN_WORKERS)
        return min(most, workers or most)

    @property
    def largest_group(self) -> int:
        """Largest K that an update may have: the job's, a rule's, or the tuner's upper bound."""
        return max(k for _, k in self.synchronised.modes(self._most_tuned))

    @property
    def group_sizes(self) -> tuple[int, int] | None:
        """Range that K is tuned within; None if it is not tuned."""
        return None if self.tuner is None else self.tuner.group_size

    @property
    def _most_tuned(self) -> int:
        return self.group_size if self.group_sizes is None else self.group_sizes[1]

    @property
    def rate_by_group(self) -> bool:
        """True if the learning rate is scaled with K.

        With `reduction: sum`, a sum over fewer samples is a smaller step anyway. The steps of adam,
        and of other optimizers that divide by the size of past gradients, do not depend on K.
        """
        return self.reduction == "mean" and self.optimizer.name in PROPORTIONAL

    @property
    def synchronised(self) -> SynchronisationSpec:
        """Block `synchronisation`, or its default."""
        return self.synchronisation or SYNCHRONOUS

    @property
    def policy(self) -> PolicyName | None:
        """Name of the policy that decides on the job's machines; None if none are rented."""
        if self.provisioning is None:
            return None
        fitting: PolicyName = "adaptive" if self.on_preemption == "hold" else "pools"
        return self.provisioning.policy or fitting

    @property
    def start_s(self) -> float | None:
        """Time of `start_at` in seconds since 1970; None if it is `earliest` or `latest`."""
        return None if self.start_at in _START_WORDS else _instant(self.start_at)

    @property
    def grouped(self) -> bool:
        """True if the workers hold the weights and sum gradients among themselves."""
        return self.aggregation is not None and self.aggregation.mode == "group"

    @property
    def among(self) -> AggregationSettings | None:
        """Settings of the sums among workers; None if the coordinator sums gradients."""
        return self.aggregation.core if self.aggregation and self.grouped else None

    @property
    def slices(self) -> SliceSettings | None:
        """Settings of the slices of the weights; None if there are no slices."""
        return None if self.among is None else self.among.slices

    @property
    def checkpoint_every_updates(self) -> int:
        """Number of versions between checkpoints, and between backups of a slice by its owners."""
        return self.checkpoint.every_updates or (200 if self.slices is None else 20)

    @property
    def task_name(self) -> str:
        """Name of the built-in task, or the user's class."""
        return self.task.name or self.task.own or ""

    @property
    def task_options(self) -> dict[str, Any]:
        """Options of the task. Sizes that are not given follow from the record's fields."""
        joined = {} if self._inputs == ("features",) else {"inputs": self._inputs}
        return self.record_sizes | joined | self.task.options

    @property
    def record_sizes(self) -> dict[str, int]:
        """Options of a built-in task that are sizes and follow from the records."""
        hashed = self.records.hashed if self.task.name == "sparse-logistic" else None
        sizes = {"features": hashed.buckets} if hashed else {}
        if self._inputs != ("features",):
            sizes["features"] = sum(prod(self.records.fields[name].sizes) for name in self._inputs)
        return sizes | {
            option: size
            for name, needed in self._needed_fields.items()
            for option, size in zip(needed.sizes, self.records.fields[name].sizes, strict=True)
        }

    @property
    def _needed_fields(self) -> dict[str, Needed]:
        needed = {
            self._target if name == "target" else name: what
            for name, what in BUILT_IN_TASKS.get(self.task.name or "", {}).items()
        }
        if self._inputs == ("features",):
            return needed
        return {name: what for name, what in needed.items() if name != "features"}

    @property
    def _target(self) -> str:
        """Field that a built-in task learns to predict from others."""
        regression = self.task.name == "linear-regression"
        return str(self.task.options.get("target", "target")) if regression else "label"

    @property
    def _inputs(self) -> tuple[str, ...]:
        """Fields that the task joins into its features.

        They are its `inputs`, or `features` alone, or all but the one that it learns to predict.
        """
        fields = self.records.fields
        if self.task.name not in _JOINING:
            return ("features",)
        given = self.task.options.get("inputs")
        if given and isinstance(given, list | tuple):
            return tuple(map(str, given))
        others = tuple(name for name in fields if name != self._target)
        return ("features",) if "features" in fields or not others else others

    @field_validator("name")
    @classmethod
    def _legal_name(cls, value: str) -> str:
        return check_name(value)

    @field_validator("streams")
    @classmethod
    def _legal_streams(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for stream in value:
            topics.check_stream(stream)
            if value.count(stream) > 1:
                raise ValueError(f"must be different topics, got {stream!r} twice")
        return value

    @field_validator("start_at")
    @classmethod
    def _legal_start(cls, value: str) -> str:
        if value not in _START_WORDS:
            _instant(value)
        return value

    @model_validator(mode="after")
    def _has_what_the_task_reads(self) -> JobSpec:
        # Sizes in the records, by option of the task.
        sizes = dict[str, int]()
        for name in self._inputs if self._inputs != ("features",) else ():
            if name not in self.records.fields:
                known = ", ".join(self.records.fields)
                raise ValueError(
                    f"task.inputs: must be fields of the records ({known}), got {name!r}"
                )
        for name, needed in self._needed_fields.items():
            found = self.records.fields.get(name)
            if found is None:
                raise ValueError(f"records.fields.{name}: is missing; {self.task.name} requires it")
            if found.dtype not in needed.dtypes or len(found.sizes) != len(needed.sizes):
                raise ValueError(
                    f"records.fields.{name}: must be {needed.words} for {self.task.name},"
                    f" got {found.dtype} {list(found.sizes)}"
                )
            for option, size in zip(needed.sizes, found.sizes, strict=True):
                if sizes.setdefault(option, size) != size:
                    raise ValueError(
                        f"records.fields.{name}: must be as long as the task's other fields"
                        f" ({sizes[option]}), got {size}"
                    )
        return self

    @model_validator(mode="after")
    def _can_step_locally(self) -> JobSpec:
        self.synchronised.check_local_steps(self.group_size, self.optimizer.name, "optimizer.name")
        if self.optimizer.has_own_rates and any(
            mode.local_rate for mode, _ in self.synchronised.modes(self.group_size)
        ):
            raise ValueError(
                "optimizer.groups: a learning_rate of a group cannot be combined with"
                " synchronisation.local_rate, because local steps have one rate; remove one of them"
            )
        for place, rule in enumerate(self.synchronised.rules):
            if rule.local_rate and rule.learning_rate and self.reduction == "mean":
                raise ValueError(
                    f"synchronisation.rules[{place}].learning_rate: cannot be combined with"
                    f" local_rate, got {rule.learning_rate:g}; remove one of them"
                )
        return self

    @model_validator(mode="after")
    def _can_be_grouped(self) -> JobSpec:
        among = self.aggregation
        if among is None or not self.grouped:
            return self
        modes = [mode.mode for mode, _ in self.synchronised.modes(self.group_size)]
        stale = next((mode for mode in modes if mode in {"stale", "asynchronous"}), None)
        if stale is not None:
            raise ValueError(
                "aggregation.mode: group requires synchronisation.mode synchronous or averaging,"
                f" because its workers hold the same version of the weights, got {stale}; change"
                " synchronisation.mode, or use aggregation.mode: board"
            )
        if self.compression is not None:
            raise ValueError(
                "aggregation.mode: group cannot be combined with compression, because its workers"
                " hold the weights themselves; remove compression, or use mode: board"
            )
        if self.init is not None:
            raise ValueError(
                "aggregation.mode: group cannot be combined with init, because its coordinator does"
                " not build the model; remove init, or use mode: board"
            )
        return self

    @model_validator(mode="after")
    def _can_be_tuned(self) -> JobSpec:
        least, most = self.group_sizes or (self.group_size, self.group_size)
        if not least <= self.group_size <= most:
            raise ValueError(
                f"tuner.group_size: must include group_size ({self.group_size}), got"
                f" [{least}, {most}]"
            )
        if self.group_sizes and self.mode == "asynchronous":
            raise ValueError(
                "tuner.group_size: cannot be combined with synchronisation.mode: asynchronous,"
                " because noise is measured between two gradients of an update; remove it, or use"
                " mode: stale"
            )
        if self.tuner is None or self.tuner.workers is None:
            return self
        if self.provisioning is None:
            raise ValueError("tuner.workers: requires `provisioning`, which rents workers; add it")
        if self.on_preemption == "hold":
            raise ValueError(
                "tuner.workers: requires `on_preemption: reassign`, got hold; otherwise the streams"
                " of a released worker would not be read"
            )
        if self.stop.deadline_s is not None:
            raise ValueError(
                "tuner.workers: cannot be combined with stop.deadline_s, because"
                " provisioning.policy chooses the machines that meet a deadline; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        largest = self.largest_group
        if self.waiting_batches is not None and self.waiting_batches < largest:
            raise ValueError(
                f"waiting_batches: must be at least group_size ({largest}), so that one worker can"
                f" fill an update, got {self.waiting_batches}"
            )
        test = self.evaluation.stream if self.evaluation is not None else ""
        if test and not topics.STREAM.fullmatch(test):
            raise ValueError(f"evaluation.stream: must be a valid topic name, got {test!r}")
        if test in self.streams:
            raise ValueError(
                f"evaluation.stream: must not be one of the job's own streams, got {test!r}; name a"
                " topic whose records the model never learns from"
            )
        self._counts_machines()
        self._bids_for_a_backlog()
        by = self.optimizer
        own = bool(by.momentum or by.weight_decay or by.groups)
        step = (by.name, own, self.reduction)
        whole = step == ("sgd", False, "mean") and self._most_learning_rate <= 1
        if self.task.name == "lda" and not whole:
            raise ValueError(
                "optimizer: lda requires `name: sgd` without weight_decay, momentum and groups,"
                " `reduction: mean`, and learning rates of at most 1, also for the group sizes of"
                " rules and of the tuner; otherwise topics become negative"
            )
        return self

    def _counts_machines(self) -> None:
        asked = self.provisioning
        if asked is None:
            return
        for name in ("max_lag_s", "spot_up_to", "reliable"):
            given = getattr(asked, name)
            if given == ProvisioningSpec.model_fields[name].default:
                continue
            if self.policy != "pools":
                raise ValueError(
                    f"provisioning.{name}: requires policy: pools, got {self.policy}; remove it"
                )
            if name == "spot_up_to" and self.on_preemption != "hold":
                raise ValueError(
                    "provisioning.spot_up_to: requires on_preemption: hold, got reassign; remove it"
                )
        if asked.reliable > asked.workers:
            raise ValueError(
                f"provisioning.reliable: must be at most provisioning.workers ({asked.workers}),"
                f" got {asked.reliable}"
            )

    def _bids_for_a_backlog(self) -> None:
        asked = self.provisioning
        if asked is not None and asked.bidbrain is not None and self.policy != "bidbrain":
            raise ValueError(
                f"provisioning.bidbrain: requires policy: bidbrain, got {self.policy}; remove it"
            )
        if self.policy == "bidbrain" and self.on_preemption == "hold":
            raise ValueError(
                "provisioning.policy: bidbrain requires `on_preemption: reassign`, got hold; with"
                " hold, more machines would not make a stream faster"
            )
        if self.policy == "bidbrain" and self.start_at == "latest":
            raise ValueError(
                "provisioning.policy: bidbrain requires a backlog, got start_at: latest, which has"
                " none; use policy: pools, or start_at: earliest"
            )

    @property
    def _most_learning_rate(self) -> float:
        own = self.optimizer.learning_rate
        by_group = [
            rule.learning_rate or own * (rule.group_size or self.group_size) / self.group_size
            for rule in self.synchronised.rules
        ]
        return max([own * self._most_tuned / self.group_size, *by_group])


_START_WORDS = ("earliest", "latest")


def _instant(value: str) -> float:
    try:
        instant = datetime.fromisoformat(value)
    except ValueError as error:
        raise ValueError(
            f"must be earliest, latest or a time such as 2026-01-31T12:00:00Z, got {value!r}"
        ) from error
    if instant.tzinfo is not None and instant.timestamp() < 0:
        raise ValueError(f"must be a time after 1970, got {value!r}")
    if instant.tzinfo is None:
        raise ValueError(f"must be a time with a zone, such as {value}Z, got {value!r}")
    return instant.timestamp()


def job_from_json(text: str | bytes) -> JobSpec:
    """Read a job from the jobs topic, where it was checked before it was written.

    Raises:
        UserError: If the job is invalid. The message is one line with the field's path, what was
            found and what is allowed.
    """
    try:
        return JobSpec.model_validate_json(text)
    except ValidationError as error:
        message = complaint(error, allowed=partial(field_names, JobSpec))
        raise UserError(f"job file: {message}") from error
