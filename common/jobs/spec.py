"""The specification of a job: what a person posts, checked whole before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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

UNKNOWN_WORKERS = 8  # counted where a job has no bound for them: some machines, started by hand

NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _one_of(value: object, offered: Sequence[str]) -> object:
    if value in offered:
        return value
    raise ValueError(f"must be one of {', '.join(offered)}, got {value!r}")


_Later = Field(exclude_if=lambda value: value is None)  # left out of the job's record
_Number = Annotated[float, Field(ge=-1e300, le=1e300)]
_Numbers = Annotated[_Number | tuple[_Number, ...] | None, _Later]
_Symbol = str | Annotated[int, Field(ge=-(2**53), le=2**53)] | _Number | bool


class FieldSpec(SpecPart):
    """One field of a record."""

    model_config = ConfigDict(serialize_by_alias=True)

    dtype: DtypeName
    """Of its numbers, little-endian."""
    shape: tuple[Count, ...] = Field(default=(), max_length=8)
    """Of one record's array; empty: one number. Left out where `from` or `one_hot` is a list."""
    source: Annotated[str | tuple[str, ...] | None, _Later] = Field(
        default=None, alias="from", min_length=1
    )
    """Path of the value, keys with dots between them (`\\.` is a dot in a key); of a list each is a
    column of the field; by default the key of the field's name."""
    default: _Numbers = None
    """Number that stands for null, for what is absent, and for what `map` or `one_hot` does not
    name (of `one_hot`: 0). Here and below: one number, or a list of one for each path."""
    scale: _Numbers = None
    """Of floats: what each number is multiplied by."""
    offset: _Numbers = None
    """Of floats: what is added then."""
    parse: Annotated[Literal["number", "time"] | None, _Later] = None
    """Of texts: `12.5` is a number, `2026-01-31T12:00:00Z` seconds since 1970 (UTC by default)."""
    hash: Annotated[Count | None, _Later] = None
    """Number of buckets of texts, numbers, true and false, by `crc32-1` of path and value."""
    map: Annotated[dict[str, _Number] | None, _Later] = Field(default=None, min_length=1)
    """What each text (`"1"` and `"true"` as well) stands for."""
    one_hot: Annotated[tuple[_Symbol, ...] | None, _Later] = Field(default=None, min_length=1)
    """Symbols: a 1 in the place of the value, 0 in all others."""

    @property
    def options(self) -> dict[str, Any]:
        """Everything that it says beside dtype and shape."""
        return self.model_dump(exclude={"dtype", "shape"})

    @property
    def paths(self) -> tuple[str, ...] | None:
        """Those of the field's columns; None where it is one value."""
        return self.source if isinstance(self.source, tuple) else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape, as given or as `from` and `one_hot` make it."""
        columns = self.one_hot if self.one_hot is not None else self.paths
        return self.shape if columns is None else (len(columns),)

    @property
    def reading(self) -> Parsed | Hashed | Mapped | OneHot | None:
        """How a value becomes a number where it is none."""
        if self.parse is not None:
            return Parsed(self.parse)
        if self.hash is not None:
            return Hashed(self.hash)
        if self.map is not None:
            return Mapped(self.map)
        return None if self.one_hot is None else OneHot(tuple(map(text_of, self.one_hot)))

    def described(self, name: str) -> RecordField:
        """As a codec wants it."""
        if not self.options:
            return RecordField(name, self.dtype, self.shape)
        paths: tuple[Keys, ...] = ((name,),)
        if self.source is not None:
            paths = tuple(map(_keys_of, self.paths or (str(self.source),)))
        default = self._by_path("default")
        if default is not None and self.one_hot is not None:
            default = (-1.0,)  # in no place
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
            raise ValueError(f"shape: what it says is read as {list(self.sizes)}: leave it out")
        if self.one_hot is not None and self.paths is not None:
            raise ValueError("one_hot: takes one path in `from`: write a field for each")
        for option in ("default", "scale", "offset"):
            if len(self._by_path(option) or self.paths or "1") != len(self.paths or "1"):
                raise ValueError(f"{option}: must be a number, or one for each path of `from`")
        return self

    @model_validator(mode="after")
    def _becomes_numbers(self) -> FieldSpec:
        several = [name for name in _READINGS if getattr(self, name) is not None]
        if len(several) > 1:
            raise ValueError(f"{' and '.join(several)} exclude each other: keep one")
        if self.shape and several and not self.sizes == (len(self.one_hot or ()),):
            raise ValueError(f"shape: {several[0]} reads one value; name several in `from`")
        scaled = self.scale is not None or self.offset is not None
        if scaled and (not self.dtype.startswith("float") or several not in ([], ["parse"])):
            raise ValueError("scale and offset are for numbers of float32 or float64")
        symbols = list(map(text_of, self.one_hot or ()))
        if len(set(symbols)) < len(symbols):
            raise ValueError("one_hot: names a symbol twice")
        if symbols and self.default not in (None, 0):
            raise ValueError(f"default: must be 0 with one_hot, got {shown(self.default)}")
        written = [("map", number) for number in (self.map or {}).values()]
        written += [("hash", self.hash - 1)] if self.hash else []
        written += [("default", number) for number in self._by_path("default") or ()]
        for option, number in written:
            if not fits(number, self.dtype):
                raise ValueError(f"{option}: {number:g} does not fit {self.dtype}")
        return self


_READINGS = ("parse", "hash", "map", "one_hot")


def _keys_of(path: str) -> Keys:
    """The keys of a path.

    Raises:
        ValueError: If it is none.
    """
    try:
        return keys_of(path)
    except ValueError as error:
        raise ValueError(f"from: {error}, got {shown(path)}") from error


_HASHED = (("int32", "float32"), ("int64", "float32"))  # what index and value may be


class HashedSpec(SpecPart):
    """How features that no field names become the fields `index` and `value`."""

    buckets: Count
    """How many the features are hashed into, by `crc32-1`."""


_CODECS = ("tensor", "json", "avro", "protobuf")


class RecordsSpec(SpecPart):
    """How a record's bytes become fields."""

    codec: str = Field(default="tensor", json_schema_extra={"enum": list(_CODECS)})
    """`tensor`: the fields' bytes one after the other, in the order given; `json`: an object, also
    one that JSON Schema describes; `avro`, `protobuf`: with schemas in the registry that
    DOLL_SCHEMA_REGISTRY_URL names."""
    fields: dict[str, FieldSpec] = Field(min_length=1)
    """Name to what it is and where it stands."""
    hashed: Annotated[HashedSpec | None, _Later] = None
    """Of `json`: every other key of the object is a feature; it is hashed, not ignored."""

    @property
    def buckets(self) -> int:
        """Number of buckets into which keys are hashed; 0 if none are."""
        return self.hashed.buckets if self.hashed else 0

    def described(self) -> tuple[RecordField, ...]:
        """The fields as a codec wants them."""
        return tuple(field.described(name) for name, field in self.fields.items())

    @field_validator("codec")
    @classmethod
    def _offered(cls, value: str) -> object:
        if value == "json-schema":
            raise ValueError("JSON Schema is read by json, which passes over the schema's id")
        return _one_of(value, _CODECS)

    @model_validator(mode="after")
    def _has_names(self) -> RecordsSpec:
        for name, field in self.fields.items() if self.codec == "tensor" else ():
            for option in field.options:
                raise ValueError(
                    f"fields.{name}.{option}: is for records that have names, such as those of"
                    " `codec: json`; of `tensor` they are their numbers alone"
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
                "hashed: needs `codec: json` and the fields index, int32 or int64, and value,"
                " float32, both of shape [most features of a record]"
            )
        return self


class TaskSpec(SpecPart):
    """What to learn: a built-in task by name or one's own by entrypoint; the rest are options."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None
    """A built-in task."""
    entrypoint: str | None = None
    """`package.module:Class`, one of DOLL_TASKS where the job runs."""

    @property
    def options(self) -> dict[str, Any]:
        """What stands beside the name, as it was given."""
        return dict(self.model_extra or {})

    @field_validator("name")
    @classmethod
    def _built_in(cls, value: str | None) -> object:
        return None if value is None else _one_of(value, tuple(BUILT_IN_TASKS))

    @field_validator("entrypoint")
    @classmethod
    def _importable(cls, value: str | None) -> str | None:
        if value is not None and not _ENTRYPOINT.fullmatch(value):
            raise ValueError(f"must be package.module:Class, got {value!r}")
        return value

    @model_validator(mode="after")
    def _one_way(self) -> TaskSpec:
        if (self.name is None) == (self.entrypoint is None):
            raise ValueError("needs a name or an entrypoint, one of them")
        return self


class CompressionSpec(SpecPart):
    """Which changes of the model workers are told; without it, all of them.

    Updates have every gradient in any case; what is inexact is where gradients are taken.
    """

    significance: float | None = Field(default=None, gt=0)
    """v: changes above v / sqrt(J) of a weight, where J is the version; 1.5 is recommended."""
    changes: float | None = Field(default=None, gt=0, le=1)
    """Instead: at most so much of the model per version, the largest changes."""

    @model_validator(mode="after")
    def _one_way(self) -> CompressionSpec:
        if (self.significance is None) == (self.changes is None):
            raise ValueError("needs significance or changes, one of them")
        return self


class TunerSpec(SpecPart):
    """What is chosen by what is measured while the job runs; without it, nothing is."""

    group_size: tuple[Count, Count] | None = None
    """[least, most]: K by how noisy gradients are, while no rule of `synchronisation` holds, first
    after 20 updates; the learning rate is that of `group_size`, and goes with K."""
    workers: Literal["balanced"] | None = None
    """`balanced`: of `provisioning.workers` as many as make time times cost least, by how long
    updates take while records wait."""

    @field_validator("workers", mode="before")
    @classmethod
    def _offered(cls, value: object) -> object:
        if value == "cost":
            raise ValueError(
                "cost alone is least with one worker, whatever is measured: take balanced, or"
                " provisioning.policy: pools, which rents as few as keep up with arrivals"
            )
        return value

    @model_validator(mode="after")
    def _fits(self) -> TunerSpec:
        if self.group_size is None and self.workers is None:
            raise ValueError("needs group_size or workers, or both")
        least, most = self.group_size or (2, 2)
        if not 2 <= least <= most:
            raise ValueError(
                "group_size: must be [least, most] and least 2 or more, as noise shows in the"
                f" difference of two gradients, got [{least}, {most}]"
            )
        return self


class ScheduleSpec(SpecPart):
    """How the learning rate rises and falls with the updates that were made."""

    kind: ScheduleKind
    """After `warmup_updates`, of which t more were made: `constant`: all of it; `step`: times
    `factor` after each n of `updates`; `cosine`: half a wave down to `final` at n; `inverse_sqrt`:
    1 / sqrt(1 + t / n)."""
    warmup_updates: Annotated[int, Field(ge=0, le=MOST)] = 0
    """The rate rises to all of it in so many, in a line."""
    updates: Count | None = None
    """n, of the job's own `group_size`: what `stop.updates` counts, too."""
    factor: Share | None = None
    """Of `step`; 0.1 where it is not given."""
    final: Share | None = None
    """Of `step` and `cosine`: share of the rate below which it does not fall; 0.01 where it is not
    given."""

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
            raise ValueError(f"{option}: a schedule that is {self.kind} has none: leave it out")
        if self.updates is None and self.kind != "constant":
            raise ValueError(f"updates: is missing; {self.kind} needs it, such as 1000")
        return self

    @property
    def core(self) -> RateSchedule:
        """As the protocol has it."""
        return RateSchedule(self.kind, self.warmup_updates, **self._given)


class OptimizerSpec(SpecPart):
    """The rule that turns a gradient into a step (Algorithm 4, line 10)."""

    name: Literal["sgd", "momentum", "adam", "adamw", "adagrad", "ftrl"] = "sgd"
    """Torch's, and `ftrl`, FTRL-Proximal (McMahan et al. 2013); `momentum` is `sgd` with one."""
    learning_rate: Positive
    """eta; alpha of `ftrl`."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Of `sgd`, 0 where it is not given, and of `momentum`, 0.9."""
    nesterov: bool | None = None
    """Of `sgd` with a momentum and of `momentum`."""
    weight_decay: NotNegative | None = None
    """L2 penalty; of `adamw` apart from the gradient, 0.01 where it is not given."""
    betas: tuple[Beta, Beta] | None = None
    """Of `adam` and `adamw`."""
    eps: Positive | None = None
    """Of `adam`, `adamw` and `adagrad`."""
    l1: Annotated[NotNegative | None, _Later] = None
    """Of `ftrl`: weights that gradients do not hold away from zero are zero."""
    l2: Annotated[NotNegative | None, _Later] = None
    """Of `ftrl`."""
    clip_norm: Annotated[Positive | None, _Later] = None
    """Longest gradient of an update, after `reduction`: a longer one is shortened to it, once."""
    schedule: Annotated[ScheduleSpec | None, _Later] = None
    """Of the learning rate; without one it stays."""

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
        """What was said beside the name and the learning rate, of this optimizer alone."""
        others = {"name", "learning_rate", "clip_norm", "schedule"}
        return self.model_dump(exclude=others, exclude_none=True)

    @property
    def scheduled(self) -> RateSchedule:
        """The schedule, or what is meant without one."""
        return CONSTANT if self.schedule is None else self.schedule.core

    @model_validator(mode="after")
    def _fits(self) -> OptimizerSpec:
        for option in sorted(self.options.keys() - self._own[self.name]):
            takes = [name for name, own in self._own.items() if option in own]
            raise ValueError(f"{self.name} has no option {option!r}: {', '.join(takes)} have it")
        if self.name == "momentum" and self.momentum == 0:
            raise ValueError("momentum: must be above 0, got 0: take sgd")
        if self.nesterov and self.name == "sgd" and not self.momentum:
            raise ValueError("nesterov: sgd needs a momentum for it, such as 0.9")
        return self


class StopSpec(SpecPart):
    """When the job is done: whatever comes first; without any, never."""

    updates: Count | None = None
    """J: after so many."""
    loss: Positive | None = None
    """epsilon: when the mean loss of a sample, smoothed, is below."""
    deadline_s: Positive | None = None
    """theta: so long after the submission."""


class CheckpointSpec(SpecPart):
    """How often the model goes to object storage, and how many stay there."""

    every_updates: Count | None = None
    """After so many updates; by default 200, or 20 with `aggregation.layout: slices`, where the
    owners of a slice that die together take along what came after it."""
    every_s: Positive = 300.0
    """After so long, whichever comes first."""
    keep: Count = 3
    """How many: one may be torn by a crash, one taken back by a takeover."""


class HotSnapshotSpec(SpecPart):
    """How often the model goes to Redis whole: what a takeover rolls back at most."""

    every_s: Positive = 1.0
    """After so long."""


class BidBrainSpec(SpecPart):
    """What changes of its machines cost a job, as `bidbrain` takes it."""

    lambda_s: float = Field(default=30.0, ge=0)
    """lambda: for which all work stands still after an eviction."""
    start_s: float | None = Field(default=None, ge=0)
    """sigma: for which it does when machines come or go; by default the longest start-up of the
    market's pools."""


class ProvisioningSpec(SpecPart):
    """What fleet to rent, for the provisioner; without one, workers are started by hand."""

    workers: Count
    """N_tot: how many, one for each stream."""
    policy: PolicyName | None = None
    """Who decides what to rent; by default `adaptive`, the paper's, where streams wait for a worker
    to return (`on_preemption: hold`), and `pools` where they move to others."""
    probability: float = Field(default=0.95, gt=0.5, lt=1)
    """Of meeting the deadline; for `chance`."""
    review_s: Positive | None = None
    """How often the policy is asked; by default as often as it likes."""
    bidbrain: BidBrainSpec | None = None
    """Of `policy: bidbrain`, which bids for machines that work off a backlog."""
    max_lag_s: Annotated[Positive | None, _Later] = None
    """Of `policy: pools`: how long records may wait, at least the start-up of a machine on demand.
    Where spot machines are lost, one on demand is started in time. By default streams are served as
    steadily as the deadline asks (`on_preemption: hold`), or updates keep up with arrivals on
    average (`reassign`)."""
    spot_up_to: float = Field(default=1.5, ge=1, le=10, exclude_if=lambda value: value == 1.5)
    """Of `policy: pools` with `on_preemption: hold`: spot machines at most, times `workers`. More
    than 1: a stream passes to a spare when its machine is lost."""
    reliable: int = Field(default=0, ge=0, le=MOST, exclude_if=lambda value: value == 0)
    """Of `policy: pools`: machines that are always on demand."""


class EvaluationSpec(SpecPart):
    """What an evaluator looks at; without one it leaves the job alone."""

    every_updates: Count = 50
    """Each n-th version is evaluated."""
    stream: str = Field(default="", json_schema_extra={"pattern": "^[A-Za-z0-9._-]{0,245}$"})
    """Kafka topic of the test set, in the job's format; empty: there is none."""
    records: Count = 2000
    """Of the test set: its first ones."""


class TrackingSpec(SpecPart):
    """How an evaluator reports the job to its MLflow server, the one that DOLL_MLFLOW names."""

    model_config = ConfigDict(serialize_by_alias=True)

    experiment: str = Field(default="Default", min_length=1)
    """Name of the experiment that the job's run is in; it must be there."""
    model: str | None = Field(
        default=None, alias="register", json_schema_extra={"pattern": f"^{_MODEL.pattern}$"}
    )
    """Name of the registered model whose versions its checkpoints are; by default, none is."""

    @field_validator("model")
    @classmethod
    def _names_model(cls, value: str | None) -> str | None:
        if value is not None and not _MODEL.fullmatch(value):
            raise ValueError(f"must be a name without / and :, got {shown(value)}")
        return value


class Needed(NamedTuple):
    """What a built-in task asks of a field."""

    dtypes: tuple[str, ...]
    sizes: tuple[str, ...]  # the task's option that each dimension of the shape gives
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
_RATING = Needed(NUMBERS, (), "a number without a shape")

# Built-in tasks and the fields that each reads; others check theirs when they are loaded.
BUILT_IN_TASKS: dict[str, dict[str, Needed]] = {
    "image-classifier": {"image": _IMAGE, "label": _LABEL},
    "logistic-regression": {"features": _FEATURES, "label": _LABEL},
    "tabular-mlp": {"features": _FEATURES, "label": _LABEL},
    "sparse-logistic": {"index": _INDEX, "value": _VALUE, "label": _LABEL},
    "matrix-factorisation": {"user": _ID, "item": _ID, "rating": _RATING},
    "lda": {"index": _INDEX, "value": _VALUE},
}
_JOINING = ("logistic-regression", "tabular-mlp")  # take any fields as their features


_Stream = Annotated[str, Field(json_schema_extra={"pattern": f"^{topics.STREAM.pattern}$"})]


class JobSpec(SpecPart):
    """One training job."""

    name: str = Field(json_schema_extra={"pattern": "^[a-z0-9][a-z0-9._-]{0,99}$"})
    """Its topics, keys and files are named by it."""
    streams: tuple[_Stream, ...] = Field(min_length=1)
    """Kafka topics, one per datastream."""
    records: RecordsSpec
    """How a record's bytes become fields."""
    task: TaskSpec
    """What to learn."""
    batch_size: Count
    """b: records of a batch."""
    group_size: Count
    """K: batches of an update."""
    synchronisation: Annotated[SynchronisationSpec | None, _Later] = None
    """When workers wait for each other; by default `synchronous`."""
    aggregation: Annotated[AggregationSpec | None, _Later] = None
    """Who adds gradients up and holds the weights; by default the coordinator."""
    optimizer: OptimizerSpec
    """The rule that turns a gradient into a step."""
    compression: Annotated[CompressionSpec | None, _Later] = None
    """Which changes of the model workers are told; models up to 64 KB always travel whole."""
    tuner: Annotated[TunerSpec | None, _Later] = None
    """What is chosen by what is measured while it runs."""
    reduction: Literal["mean", "sum"] = "mean"
    """Of the samples of an update, before the step."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the first weights."""
    stop: StopSpec = StopSpec()
    """When the job is done: whatever comes first; without any, never."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """How often the model goes to object storage."""
    hot_snapshot: HotSnapshotSpec = HotSnapshotSpec()
    """How often it goes to Redis: what a takeover rolls back at most."""
    on_preemption: Literal["reassign", "hold"] = "reassign"
    """Whether the streams of a worker that went move to others or wait for its return."""
    on_missing: Literal["redispatch", "proceed"] = "redispatch"
    """Whether its batches of the update under way are given to others or left out of it."""
    start_at: str = "earliest"
    """`earliest`, `latest`, or a time with its zone, such as 2026-01-31T12:00:00Z."""
    batch_linger_s: NotNegative | None = None
    """Close a partial batch after so long; by default never. If the network has batch
    normalization, a single record waits for another one and counts as lag."""
    group_linger_s: NotNegative | None = None
    """Apply a partial update after so long; by default never."""
    waiting_batches: Count | None = None
    """Unsettled batches that a worker may own, at least K; by default 2K."""
    max_failures: Count = 5
    """Deaths, errors or non-finite results of a batch alone, until it is quarantined."""
    autocast: bool = False
    """Run the forward pass in bfloat16 where torch thinks it safe."""
    weight: Positive = 1.0
    """Its share of the workers where jobs need more of them than there are."""
    provisioning: ProvisioningSpec | None = None
    """What machines to rent; without one, workers are started by hand."""
    evaluation: EvaluationSpec | None = None
    """What an evaluator looks at; without one it leaves the job alone."""
    tracking: Annotated[TrackingSpec | None, _Later] = None
    """Where an evaluator tells how the job learns."""

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:  # noqa: ANN401 -- as pydantic's
        """Validate plain data as at submission: with lists, which the fields have as tuples."""
        if isinstance(obj, Mapping):
            return cls.model_validate_json(to_json(obj), **options)
        return super().model_validate(obj, **options)

    @property
    def waiting_bound(self) -> int:
        """Unsettled batches that a worker may own: at least K, so that one survivor fills a group.

        2K unless said: a lone survivor gathers the next group while it computes this one; with K
        alone its stream would stand still during every round. And K for each further round that may
        be in flight for all workers together. Where rules name other modes, the most of any.
        """
        return self.waiting_batches or self.synchronised.batches_held(self._most_tuned)

    @property
    def mode(self) -> SynchronisationMode:
        """How its workers are synchronised."""
        return self.synchronised.mode

    @property
    def most_rounds(self) -> int:
        """Updates that may be in flight at once, as far as that can be told before workers live."""
        workers = self.provisioning.workers if self.provisioning is not None else None
        modes = [mode for mode, _ in self.synchronised.modes(self.group_size)]
        rounds = [1 + mode.fixed_staleness for mode in modes if not mode.staleness_per_worker]
        most = max(rounds, default=1)
        if len(rounds) < len(modes):
            return workers or max(most, UNKNOWN_WORKERS)
        return min(most, workers or most)

    @property
    def largest_group(self) -> int:
        """K, or that of a rule that has a larger one, or the most that it is tuned to."""
        return max(k for _, k in self.synchronised.modes(self._most_tuned))

    @property
    def group_sizes(self) -> tuple[int, int] | None:
        """Within which K is tuned; None where it is not."""
        return None if self.tuner is None else self.tuner.group_size

    @property
    def _most_tuned(self) -> int:
        return self.group_size if self.group_sizes is None else self.group_sizes[1]

    @property
    def rate_by_group(self) -> bool:
        """Whether the learning rate goes with K.

        The sum of fewer samples is a smaller step by itself; adam's, and that of others which
        divide by how large gradients were, does not depend on them.
        """
        return self.reduction == "mean" and self.optimizer.name in PROPORTIONAL

    @property
    def synchronised(self) -> SynchronisationSpec:
        """`synchronisation`, or what is meant without it."""
        return self.synchronisation or SYNCHRONOUS

    @property
    def policy(self) -> PolicyName | None:
        """Who decides on its machines; None where they are not rented."""
        if self.provisioning is None:
            return None
        fitting: PolicyName = "adaptive" if self.on_preemption == "hold" else "pools"
        return self.provisioning.policy or fitting

    @property
    def start_s(self) -> float | None:
        """The time of `start_at` in seconds since 1970, or None where it is a word."""
        return None if self.start_at in _START_WORDS else _instant(self.start_at)

    @property
    def grouped(self) -> bool:
        """Whether its workers hold the weights, and add gradients up among themselves."""
        return self.aggregation is not None and self.aggregation.mode == "group"

    @property
    def among(self) -> AggregationSettings | None:
        """How its workers add gradients up among themselves; None: they do not."""
        return self.aggregation.core if self.aggregation and self.grouped else None

    @property
    def slices(self) -> SliceSettings | None:
        """How its weights are cut into slices with owners; None: they are not."""
        return None if self.among is None else self.among.slices

    @property
    def checkpoint_every_updates(self) -> int:
        """One of so many versions is a checkpoint; owners of slices back up what they hold so."""
        return self.checkpoint.every_updates or (200 if self.slices is None else 20)

    @property
    def task_name(self) -> str:
        """Name of a built-in task, or an entrypoint."""
        return self.task.name or self.task.entrypoint or ""

    @property
    def task_options(self) -> dict[str, Any]:
        """The task's options; sizes that are not given are those of the record's fields."""
        joined = {} if self._inputs == ("features",) else {"inputs": self._inputs}
        return self.record_sizes | joined | self.task.options

    @property
    def record_sizes(self) -> dict[str, int]:
        """Options of a built-in task that are sizes, as the records have them."""
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
        needed = BUILT_IN_TASKS.get(self.task.name or "", {})
        if self._inputs == ("features",):
            return needed
        return {name: what for name, what in needed.items() if name != "features"}

    @property
    def _inputs(self) -> tuple[str, ...]:
        """Fields that a task of features joins to them: its `inputs`, or all there are."""
        fields = self.records.fields
        if self.task.name not in _JOINING:
            return ("features",)
        given = self.task.options.get("inputs")
        if given and isinstance(given, list | tuple):
            return tuple(map(str, given))
        others = tuple(name for name in fields if name != "label")
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
                raise ValueError(f"{stream!r} is named twice")
        return value

    @field_validator("start_at")
    @classmethod
    def _legal_start(cls, value: str) -> str:
        if value not in _START_WORDS:
            _instant(value)
        return value

    @model_validator(mode="after")
    def _has_what_the_task_reads(self) -> JobSpec:
        sizes = dict[str, int]()  # of the records, by option of the task
        for name in self._inputs if self._inputs != ("features",) else ():
            if name not in self.records.fields:
                known = ", ".join(self.records.fields)
                raise ValueError(
                    f"task.inputs: there is no field {name!r}; the records have {known}"
                )
        for name, needed in self._needed_fields.items():
            found = self.records.fields.get(name)
            if found is None:
                raise ValueError(f"records.fields.{name}: is missing; {self.task.name} needs it")
            if found.dtype not in needed.dtypes or len(found.sizes) != len(needed.sizes):
                raise ValueError(
                    f"records.fields.{name}: {self.task.name} needs {needed.words},"
                    f" got {found.dtype} {list(found.sizes)}"
                )
            for option, size in zip(needed.sizes, found.sizes, strict=True):
                if sizes.setdefault(option, size) != size:
                    raise ValueError(
                        f"records.fields.{name}: must be of one length with the others, which have"
                        f" {sizes[option]}, got {size}"
                    )
        return self

    @model_validator(mode="after")
    def _can_step_locally(self) -> JobSpec:
        self.synchronised.check_local_steps(self.group_size, self.optimizer.name, "optimizer.name")
        for place, rule in enumerate(self.synchronised.rules):
            if rule.local_rate and rule.learning_rate and self.reduction == "mean":
                raise ValueError(
                    f"synchronisation.rules[{place}].learning_rate: what workers came to by"
                    f" local_rate is averaged, got {rule.learning_rate:g}: leave one of both out"
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
                "aggregation.mode: a group holds one version of the weights, all enter an update"
                f" together, got synchronisation.mode: {stale}: take synchronous or averaging, or"
                " mode: board"
            )
        if self.compression is not None:
            raise ValueError(
                "aggregation.mode: workers of a group are told no changes, they make them: leave"
                " compression out, or take mode: board"
            )
        return self

    @model_validator(mode="after")
    def _can_be_tuned(self) -> JobSpec:
        least, most = self.group_sizes or (self.group_size, self.group_size)
        if not least <= self.group_size <= most:
            raise ValueError(
                f"tuner.group_size: must be around group_size ({self.group_size}), with which the"
                f" job begins, got [{least}, {most}]"
            )
        if self.group_sizes and self.mode == "asynchronous":
            raise ValueError(
                "tuner.group_size: noise shows in the difference of two gradients of an update, and"
                " an asynchronous one has one: leave it out, or take synchronisation.mode: stale"
            )
        if self.tuner is None or self.tuner.workers is None:
            return self
        if self.provisioning is None:
            raise ValueError("tuner.workers: nobody rents them without `provisioning`: add that")
        if self.on_preemption == "hold":
            raise ValueError(
                "tuner.workers: nobody would read the streams of a worker that is given back: add"
                " `on_preemption: reassign`"
            )
        if self.stop.deadline_s is not None:
            raise ValueError(
                "tuner.workers: which machines a deadline needs is for provisioning.policy to say:"
                " leave this out, or stop.deadline_s"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        largest = self.largest_group
        if self.waiting_batches is not None and self.waiting_batches < largest:
            raise ValueError(
                f"waiting_batches: must be at least group_size ({largest}), so that one worker can"
                f" fill a group, got {self.waiting_batches}"
            )
        test = self.evaluation.stream if self.evaluation is not None else ""
        if test and not topics.STREAM.fullmatch(test):
            raise ValueError(f"evaluation.stream: {test!r} cannot be a Kafka topic")
        if test in self.streams:
            raise ValueError(
                f"evaluation.stream: the job learns from {test!r} itself: name a topic of records"
                " that it never sees"
            )
        self._counts_machines()
        self._bids_for_a_backlog()
        by, own = self.optimizer, bool(self.optimizer.momentum or self.optimizer.weight_decay)
        step = (by.name, own, self.reduction)
        whole = step == ("sgd", False, "mean") and self._most_learning_rate <= 1
        if self.task.name == "lda" and not whole:
            raise ValueError(
                "optimizer: lda needs `name: sgd` with a learning_rate of at most 1 (a rule's, too:"
                " times its group_size over the job's, where it names none), without weight_decay"
                " or momentum, and `reduction: mean`: other steps leave topics below zero"
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
                    f"provisioning.{name}: is for policy: pools, and this is {self.policy}"
                )
            if name == "spot_up_to" and self.on_preemption != "hold":
                raise ValueError(
                    "provisioning.spot_up_to: is for on_preemption: hold; where streams move to the"
                    " survivors, machines are as few as keep up"
                )
        if asked.reliable > asked.workers:
            raise ValueError(
                f"provisioning.reliable: {asked.reliable} machines are always on demand, and there"
                f" are {asked.workers} workers: at most so many"
            )

    def _bids_for_a_backlog(self) -> None:
        asked = self.provisioning
        if asked is not None and asked.bidbrain is not None and self.policy != "bidbrain":
            raise ValueError(
                f"provisioning.bidbrain: is for policy: bidbrain, and this is {self.policy}"
            )
        if self.policy == "bidbrain" and self.on_preemption == "hold":
            raise ValueError(
                "provisioning.policy: bidbrain takes and gives back machines as bids win, and a"
                " held stream is never faster than its one worker: add `on_preemption: reassign`"
            )
        if self.policy == "bidbrain" and self.start_at == "latest":
            raise ValueError(
                "provisioning.policy: bidbrain works off a backlog, and a stream that is read from"
                " its latest record has none: it cannot go faster than it arrives. Take pools, or"
                " start_at: earliest"
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
        raise ValueError(f"the time {value!r} is before 1970")
    if instant.tzinfo is None:
        raise ValueError(f"the time {value!r} needs its zone, such as {value}Z")
    return instant.timestamp()


def job_from_json(text: str | bytes) -> JobSpec:
    """Read a job that was checked elsewhere, as the jobs topic holds it.

    Raises:
        UserError: In one line, with the field's path, what was found and what is allowed.
    """
    try:
        return JobSpec.model_validate_json(text)
    except ValidationError as error:
        message = complaint(error, allowed=partial(field_names, JobSpec))
        raise UserError(f"job file: {message}") from error
