"""Blocks `synchronisation` and `aggregation` of a job file.

Experiments use `synchronisation`, too, to compare modes.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from common.config.validation import descriptions_of
from common.core.messages import SynchronisationMode  # noqa: TC001 -- pydantic reads it when run
from common.core.settings import AggregationSettings, Mode, Rule, SliceSettings

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

# Upper bound of all counts: the product of two of them still fits into 64 bits.
MOST = 2**31 - 1

# Optimizers whose step is proportional to the gradient.
PROPORTIONAL = ("sgd", "momentum")

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=MOST)]
_Several = Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MOST})]
# Words and numbers are separate alternatives because client generators for OpenAPI cannot handle
# an enum that mixes them.
_STAGES = WithJsonSchema({"anyOf": [{"const": "auto"}, {"enum": [1, 2, 3]}]})
# More slices than owners, so that each owner has about the same number. Still few, because each
# slice is a step of its own.
SLICES = 32
_OF_SLICES = ("stage", "servers", "owners")


class SpecPart(BaseModel):
    """Base of all parts of a job file: unknown fields and silent conversions are refused; frozen.

    If a validator of ours explains better than pydantic what is allowed, the field's JSON schema is
    given separately. The docstrings of fields are their descriptions in the API's document and in
    docs/reference/job-file.md.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, description in descriptions_of(cls).items():
            shown = cls.model_fields[name].alias or name
            # Excluded fields are not in the schema.
            if shown in properties:
                properties[shown]["description"] = description
        return schema


class ModeSpec(SpecPart):
    """Synchronisation mode and its options: of the job, or of one of its rules."""

    mode: SynchronisationMode
    """Synchronisation mode while the rule applies: `synchronous` (gradients of an update use the
    same weights), `stale` (their weights may be a few updates old), `asynchronous` (no worker waits
    for another) or `averaging` (workers train copies of the weights, which are averaged)."""
    staleness: Annotated[int, Field(ge=1, le=MOST)] | None = None
    """Maximum age of the weights that a gradient is computed with, as a number of updates: those
    that may be made between these weights and the update that contains the gradient. For `mode:
    stale` and `mode: asynchronous`. Optional. If unset, 1 for `stale`, and 4 per live worker for
    `asynchronous`."""
    local_rate: Positive | None = None
    """Learning rate of local steps: a worker that computes several batches for an update takes a
    step on its own copy of the weights after each batch. Required for `mode: averaging`. Optional
    for `mode: asynchronous`; if unset there, workers take no local steps. Not for other modes."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.staleness is not None and self.mode not in _STALE_MODES:
            raise ValueError(
                f"staleness: requires mode stale or asynchronous, got mode {self.mode}; remove"
                " staleness, or use mode: stale"
            )
        if self.local_rate is None and self.mode == "averaging":
            raise ValueError("local_rate: is missing; mode averaging requires it, for example 0.1")
        if self.local_rate is not None and self.mode not in _LOCAL_STEP_MODES:
            raise ValueError(
                f"local_rate: requires mode averaging or asynchronous, got mode {self.mode}; remove"
                " local_rate, or use mode: averaging"
            )
        return self

    @property
    def fixed_staleness(self) -> int:
        """Staleness s; 0 if the mode is never stale, or if s depends on the number of workers."""
        return self.staleness or int(self.mode == "stale")

    @property
    def staleness_per_worker(self) -> int:
        """Increase of s per live worker."""
        return 4 if self.mode == "asynchronous" and not self.staleness else 0

    @property
    def groups_held(self) -> int:
        """Number of groups that a worker may hold batches for: in flight, and one to come."""
        return 2 if self.mode == "asynchronous" else 2 + self.fixed_staleness

    def core_mode(self, group_size: int, learning_rate: float | None = None) -> Mode:
        """Return the mode as the core takes it.

        Args:
            group_size: K.
            learning_rate: Learning rate of updates in this mode; None for the job's.
        """
        return Mode(
            group_size,
            learning_rate,
            self.fixed_staleness,
            self.staleness_per_worker,
            single_worker=self.mode == "asynchronous",
            local_rate=self.local_rate or 0.0,
        )


_STALE_MODES = ("stale", "asynchronous")
_LOCAL_STEP_MODES = ("averaging", "asynchronous")


class WhenSpec(SpecPart):
    """Condition under which a rule of `synchronisation` applies: exactly one of the fields."""

    busy_below: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of time, from 0 to 1. The rule applies if workers spent less than this share of their
    time on gradients during the last 20 updates. Required unless `workers_from` is set."""
    workers_from: Count | None = None
    """Minimum number of workers: the rule applies while at least this number is alive. Required
    unless `busy_below` is set."""

    @model_validator(mode="after")
    def _one_way(self) -> WhenSpec:
        if (self.busy_below is None) == (self.workers_from is None):
            raise ValueError("must have either busy_below or workers_from")
        return self

    def implies(self, other: WhenSpec) -> bool:
        """True if the other condition holds whenever this one does."""
        if self.busy_below is not None:
            return other.busy_below is not None and self.busy_below <= other.busy_below
        if self.workers_from is None or other.workers_from is None:
            return False
        return self.workers_from >= other.workers_from


class RuleSpec(ModeSpec):
    """Rule of `synchronisation`: another mode for updates that begin while a condition holds."""

    when: WhenSpec
    """Condition under which the rule applies. Once a rule applies, it does so for at least 20
    updates. A rule with `busy_below` then applies until the number of workers is a quarter below
    the number at its start."""
    group_size: Count | None = None
    """Number of batches per update of the model (K) while the rule applies. Optional. If unset, the
    job's `group_size`."""
    learning_rate: Positive | None = None
    """Learning rate while the rule applies. Optional. If unset, the job's learning rate; with `sgd`
    or `momentum` and `reduction: mean`, the job's rate times the rule's `group_size` divided by the
    job's `group_size`."""


class SynchronisationSpec(ModeSpec):
    """Synchronisation between workers, and the maximum age of the weights that they use."""

    mode: SynchronisationMode = "synchronous"
    """Synchronisation mode. `synchronous` (the mode of the DOLL paper, Jiang, Zhang and Joe-Wong):
    an update has K gradients (`group_size`), all computed with the weights of the previous version;
    `stale`: the weights may be up to `staleness` versions older; `asynchronous`: an update has K
    gradients of a single worker, and no worker waits for another; `averaging`: each worker takes
    steps on its own copy of the weights, and an update averages the copies."""
    damped: bool = False
    """True to reduce the learning rate of updates with old gradients: the rate is divided by 1 + n,
    with n the number of updates between the weights of the oldest gradient and the update itself.
    For `mode: stale` and `mode: asynchronous`."""
    rules: tuple[RuleSpec, ...] = Field(default=(), exclude_if=operator.not_)
    """Rules that choose another synchronisation mode while a condition holds. An update uses the
    first rule whose condition holds when the update begins. If no rule's condition holds, the job's
    own `mode` applies."""

    @model_validator(mode="after")
    def _each_counts(self) -> Self:
        if self.damped and self.mode not in _STALE_MODES:
            raise ValueError(
                f"damped: requires mode stale or asynchronous, got mode {self.mode}; remove damped,"
                " or use mode: stale"
            )
        for place, rule in enumerate(self.rules):
            for other, earlier in enumerate(self.rules[:place]):
                if rule.when.implies(earlier.when):
                    raise ValueError(
                        f"rules[{place}].when: is never used, because rules[{other}] always holds,"
                        " too, and comes first; remove one, or put the narrower one first"
                    )
        return self

    def modes(self, group_size: int) -> list[tuple[ModeSpec, int]]:
        """Return the job's mode and those of its rules, each with its K."""
        own: list[tuple[ModeSpec, int]] = [(self, group_size)]
        return own + [(rule, rule.group_size or group_size) for rule in self.rules]

    def batches_held(self, group_size: int) -> int:
        """Maximum number of batches a worker may hold, over the job's mode and its rules."""
        return max(k * mode.groups_held for mode, k in self.modes(group_size))

    def check_local_steps(self, group_size: int, optimizer: str, field: str) -> None:
        """Refuse local steps if a worker takes none, or if they cannot be averaged.

        Args:
            group_size: K of the job.
            optimizer: Name of the optimizer.
            field: Path of the field that names the optimizer.

        Raises:
            ValueError: If local steps are refused. The message says what to write instead.
        """
        for place, (mode, k) in enumerate(self.modes(group_size), start=-1):
            at = "synchronisation" + (f".rules[{place}]" if place >= 0 else "")
            if mode.local_rate and k == 1:
                raise ValueError(
                    f"{at}.local_rate: requires a group_size above 1, got 1; remove local_rate, or"
                    " raise group_size"
                )
            if mode.local_rate and optimizer not in PROPORTIONAL:
                raise ValueError(
                    f"{field}: must be sgd or momentum with {at}.local_rate, got {optimizer};"
                    " change it, or remove local_rate"
                )

    def core_mode(self, group_size: int, learning_rate: float | None = None) -> Mode:
        """Return the job's mode as the core takes it."""
        return replace(super().core_mode(group_size, learning_rate), damped=self.damped)

    def core_rules(self, group_size: int) -> tuple[Rule, ...]:
        """Return the rules as the core takes them."""
        return tuple(
            Rule(
                rule.core_mode(rule.group_size or group_size, rule.learning_rate),
                rule.when.busy_below,
                rule.when.workers_from,
            )
            for rule in self.rules
        )


# The default if a job file has no such block.
SYNCHRONOUS = SynchronisationSpec(mode="synchronous")


class AggregationSpec(SpecPart):
    """Component that sums gradients, applies the optimizer and holds the weights."""

    mode: Literal["board", "group"] = "board"
    """Processes that sum gradients and hold the weights. `board`: the coordinator that leads the
    job, and gradients pass through Redis; `group`: the workers themselves, which connect to each
    other and therefore need a private network. See docs/howto/choosing.md."""
    layout: Literal["replicas", "slices"] = "replicas"
    """Distribution of the weights over the workers. `replicas`: every worker holds all weights and
    the complete optimizer state; `slices`: the weights are divided into 32 slices, and only the
    workers that own a slice hold its optimizer state and update it. For `mode: group`."""
    stage: Annotated[Literal["auto", 1, 2, 3], _STAGES] = "auto"
    """Machines whose workers own slices of the weights. `1`: the reliable (not spot) machines; `2`:
    half of the spot machines; `3`: half of the spot machines, while reliable machines compute no
    gradients; `auto`: stage 1 with at most one spot machine per reliable one, 2 with at most 15,
    otherwise 3. For `layout: slices`."""
    servers: Literal["auto"] | _Several = "auto"
    """Number of workers that own slices of the weights, at least `owners`. `auto`: with `stage` 1
    all reliable (not spot) machines, otherwise half of the spot machines. For `layout: slices`."""
    owners: Annotated[int, Field(ge=1, le=3)] = 2
    """Number of workers that own each slice of the weights; all of them but one may fail without
    loss of updates. For `layout: slices`."""
    transport: Literal["gloo", "nccl"] = "gloo"
    """Transport of gradients between workers: `gloo` sends them over TCP from main memory; `nccl`
    uses NVIDIA's NCCL between GPUs, with one GPU per worker. To switch, change the
    job to `mode: board`, and then back. For `mode: group`."""
    wire: Literal["float32", "bfloat16"] = "float32"
    """Number format of gradients between workers. `bfloat16` halves their bytes: each worker's part
    is rounded, the parts are added up in float32, and the sum is rounded again. Weights always
    travel as float32. To switch, change the job to `mode: board`, and then back. For `mode:
    group`."""

    @property
    def core(self) -> AggregationSettings:
        """Return the settings as a leader takes them."""
        slices = SliceSettings(
            SLICES,
            self.owners,
            None if self.servers == "auto" else self.servers,
            None if self.stage == "auto" else self.stage,
        )
        sliced = self.layout == "slices"
        return AggregationSettings(slices=slices if sliced else None)

    @model_validator(mode="after")
    def _each_counts(self) -> Self:
        fields = type(self).model_fields.items()
        given = [name for name, field in fields if getattr(self, name) != field.default]
        if self.mode == "board" and given:
            raise ValueError(f"{given[0]}: requires mode: group, got board; remove it")
        # Checked here, or pydantic would report one error for each type of the union.
        if self.servers != "auto" and not 1 <= self.servers <= MOST:
            raise ValueError(f"servers: must be auto or at least 1, got {self.servers}")
        sliced = [name for name in _OF_SLICES if name in given]
        if self.layout == "replicas" and sliced:
            raise ValueError(
                f"{sliced[0]}: requires layout: slices, got replicas; remove it, or use slices"
            )
        return self
