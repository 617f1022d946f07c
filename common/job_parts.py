"""The parts of a job's specification: each checks itself.

Defaults carry the argument for their value. The paper's letters stand beside the fields.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from common.learning.fields import DtypeName
from common.learning.fields import Field as RecordField
from common.theory.policy import PolicyName  # noqa: TC001 -- pydantic reads it when run

if TYPE_CHECKING:
    from collections.abc import Sequence

_ENTRYPOINT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

MOST = 2**31 - 1  # of whatever is counted: products of two of them still fit into 64 bits

Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Share = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Part(BaseModel):
    """What all parts share: nothing unknown, nothing converted silently, nothing changed later.

    Where a validator of ours says in better words what is allowed, the schema is told beside it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _one_of(value: object, offered: Sequence[str], planned: Sequence[str] = ()) -> object:
    """Refuse what is planned in other words than what is nonsense."""
    if value in offered:
        return value
    if value in planned:
        raise ValueError(f'"{value}" is not offered yet; offered: {", ".join(offered)}')
    raise ValueError(f"must be one of {', '.join(offered)}, got {value!r}")


class FieldSpec(Part):
    """One field of a record."""

    dtype: DtypeName
    shape: tuple[Count, ...] = Field(default=(), max_length=8)


class RecordsSpec(Part):
    """How a record's bytes become fields."""

    # Fixed-size little-endian fields, in the order given; or JSON.
    codec: str = Field(default="tensor", json_schema_extra={"enum": ["tensor", "json"]})
    fields: dict[str, FieldSpec] = Field(min_length=1)

    def described(self) -> tuple[RecordField, ...]:
        """The fields as a codec wants them."""
        return tuple(RecordField(name, it.dtype, it.shape) for name, it in self.fields.items())

    @field_validator("codec")
    @classmethod
    def _offered(cls, value: str) -> object:
        return _one_of(value, ("tensor", "json"), ("avro", "protobuf"))


class TaskSpec(Part):
    """What to learn: a built-in task by name or one's own by entrypoint; the rest are options."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None
    entrypoint: str | None = None  # package.module:Class, on the allow-list of whoever runs it

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


class SyncSpec(Part):
    """When gradients become an update."""

    # K batches, no staleness: the paper's.
    mode: str = Field(default="k-sync", json_schema_extra={"enum": ["k-sync"]})

    @field_validator("mode")
    @classmethod
    def _offered(cls, value: str) -> object:
        return _one_of(value, ("k-sync",), ("bsp", "ssp", "async"))


class OptimizerSpec(Part):
    """The rule that turns a gradient into a step (Algorithm 4, line 10)."""

    name: Literal["sgd", "momentum", "adam"] = "sgd"
    learning_rate: Positive
    momentum: float | None = Field(default=None, gt=0, lt=1)
    nesterov: bool | None = None
    weight_decay: float | None = Field(default=None, ge=0)
    betas: tuple[Beta, Beta] | None = None
    eps: Positive | None = None

    _own: ClassVar[dict[str, frozenset[str]]] = {
        "sgd": frozenset({"weight_decay"}),
        "momentum": frozenset({"weight_decay", "momentum", "nesterov"}),
        "adam": frozenset({"weight_decay", "betas", "eps"}),
    }

    @property
    def options(self) -> dict[str, Any]:
        """What was said beside the name and the learning rate."""
        return self.model_dump(exclude={"name", "learning_rate"}, exclude_none=True)

    @model_validator(mode="after")
    def _fits(self) -> OptimizerSpec:
        for option in sorted(self.options.keys() - self._own[self.name]):
            raise ValueError(f"{self.name} has no option {option!r}")
        return self


class StopSpec(Part):
    """When the job is done: whatever comes first; without any, never."""

    updates: Count | None = None  # J
    loss: Positive | None = None  # epsilon: mean per sample, smoothed
    deadline_s: Positive | None = None  # theta


class CheckpointSpec(Part):
    """How often the model goes to object storage, and how many stay there."""

    every_updates: Count | None = 200
    every_s: Positive | None = 300.0
    keep: Count = 3  # one may be torn by a crash, one taken back by a takeover

    @model_validator(mode="after")
    def _ever(self) -> CheckpointSpec:
        if self.every_updates is None and self.every_s is None:
            raise ValueError("needs every_updates or every_s")
        return self


class HotSnapshotSpec(Part):
    """How often the model goes to Redis whole: what a takeover rolls back at most."""

    every_s: Positive | None = 1.0
    every_updates: Count | None = None


class ProvisioningSpec(Part):
    """What fleet to rent, for the provisioner; without one, workers are started by hand."""

    workers: Count  # N_tot
    instance_type: str = ""  # of the market's, for all pools; empty: what each pool says
    # None: adaptive, the paper's, where a preempted worker's streams wait for its return; reassign
    # where they move to others, for which the paper's formulas are too careful.
    policy: PolicyName | None = None
    probability: float = Field(default=0.95, gt=0.5, lt=1)  # of the deadline; chance and reassign
    review_s: Positive | None = None  # how often the policy is asked; None: as it likes


class EvaluationSpec(Part):
    """What an evaluator looks at; without one it leaves the job alone."""

    every_updates: Count = 50  # each n-th version
    # Kafka topic of the test set, in the job's format; empty: there is none.
    stream: str = Field(default="", json_schema_extra={"pattern": "^[A-Za-z0-9._-]{0,245}$"})
    records: Count = 2000  # of the test set: its first ones
    sample: Count = 256  # records of each stream that a version predicts before it learns of them


class Needed(NamedTuple):
    """What a built-in task asks of a field."""

    dtypes: tuple[str, ...]
    sizes: tuple[str, ...]  # the task's option that each dimension of the shape gives
    words: str


_NUMBERS = ("uint8", "float32")
_IMAGE = Needed(
    _NUMBERS,
    ("channels", "height", "width"),
    "uint8 or float32 of shape [channels, height, width]",
)
_FEATURES = Needed(_NUMBERS, ("features",), "uint8 or float32 of shape [features]")
_LABEL = Needed(
    ("uint8", "int8", "int16", "int32", "int64"), (), "a whole number (int64) without a shape"
)

# Built-in tasks and the fields that each reads; others check theirs when they are loaded.
BUILT_IN_TASKS: dict[str, dict[str, Needed]] = {
    "image-classifier": {"image": _IMAGE, "label": _LABEL},
    "logistic-regression": {"features": _FEATURES, "label": _LABEL},
    "tabular-mlp": {"features": _FEATURES, "label": _LABEL},
}
