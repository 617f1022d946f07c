"""How gradients meet: the blocks `synchronisation` and `aggregation` of a job's file.

An experiment has the first, too, to ask what it brings.
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

MOST = 2**31 - 1  # of whatever is counted: products of two of them still fit into 64 bits

PROPORTIONAL = ("sgd", "momentum")  # optimizers whose step is twice as long by twice the gradient

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=MOST)]
_Several = Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MOST})]
# Apart by type: what makes clients of the API's document knows no words and numbers in one list.
_STAGES = WithJsonSchema({"anyOf": [{"const": "auto"}, {"enum": [1, 2, 3]}]})
# More than owners, so that each has about as many, and few: each is a step of its own.
SLICES = 32
_OF_SLICES = ("stage", "servers", "owners")


class SpecPart(BaseModel):
    """What all parts share: nothing unknown, nothing converted silently, nothing changed later.

    Where a validator of ours says in better words what is allowed, the schema is told beside it.
    The docstrings of fields are their descriptions: in the API's document, and in
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
            if shown in properties:  # one that is excluded is not there
                properties[shown]["description"] = description
        return schema


class ModeSpec(SpecPart):
    """What the block and each of its rules say."""

    mode: SynchronisationMode
    """One of those of the job itself."""
    staleness: Annotated[int, Field(ge=1, le=MOST)] | None = None
    """s, of `stale` (1 unless said) and of `asynchronous` (4 for each worker that lives)."""
    local_rate: Positive | None = None
    """Learning rate of a worker's own steps: of `averaging`, and perhaps of `asynchronous`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.staleness is not None and self.mode not in _STALE_MODES:
            raise ValueError(
                f"staleness: nothing is stale where the mode is {self.mode}, got {self.staleness}:"
                " leave it out, or take mode: stale"
            )
        if self.local_rate is None and self.mode == "averaging":
            raise ValueError("local_rate: averaging needs one, such as 0.1")
        if self.local_rate is not None and self.mode not in _LOCAL_STEP_MODES:
            raise ValueError(
                f"local_rate: workers take no steps of their own where the mode is {self.mode},"
                f" got {self.local_rate:g}: leave it out, or take mode: averaging"
            )
        return self

    @property
    def fixed_staleness(self) -> int:
        """s; 0 where nothing is stale, and where it grows with the workers that live."""
        return self.staleness or int(self.mode == "stale")

    @property
    def staleness_per_worker(self) -> int:
        """By how much s grows with each worker that lives."""
        return 4 if self.mode == "asynchronous" and not self.staleness else 0

    @property
    def groups_held(self) -> int:
        """How many groups a worker may have to hold batches for: that in flight, and the next."""
        return 2 if self.mode == "asynchronous" else 2 + self.fixed_staleness

    def core_mode(self, group_size: int, learning_rate: float | None = None) -> Mode:
        """The mode as the protocol has it.

        Args:
            group_size: K.
            learning_rate: Of its updates; None: that of the job.
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
    """What a rule waits for, one of these."""

    busy_below: Annotated[float, Field(gt=0, le=1)] | None = None
    """Workers compute for less than this share of their time, over the last 20 updates begun."""
    workers_from: Count | None = None
    """So many workers live, or more."""

    @model_validator(mode="after")
    def _one_way(self) -> WhenSpec:
        if (self.busy_below is None) == (self.workers_from is None):
            raise ValueError("needs busy_below or workers_from, one of them")
        return self

    def implies(self, other: WhenSpec) -> bool:
        """Whether the other holds whenever this does."""
        if self.busy_below is not None:
            return other.busy_below is not None and self.busy_below <= other.busy_below
        if self.workers_from is None or other.workers_from is None:
            return False
        return self.workers_from >= other.workers_from


class RuleSpec(ModeSpec):
    """A mode for the updates that begin while something holds."""

    when: WhenSpec
    """Kept for 20 updates at least; `busy_below`, then, until a quarter of the workers is gone."""
    group_size: Count | None = None
    """K; by default the job's."""
    learning_rate: Positive | None = None
    """By default the job's, times K / the job's K with `sgd` and `momentum` of the mean."""


class SynchronisationSpec(ModeSpec):
    """When workers wait for each other, and at which weights they compute."""

    mode: SynchronisationMode = "synchronous"
    """`synchronous`: K gradients at exactly the version before, the paper's; `stale`: each at most
    `staleness` versions older; `asynchronous`: K of one worker, nobody waits for anybody;
    `averaging`: between the batches that it is asked for together a worker takes steps of its own,
    and an update averages what the workers came to."""
    damped: bool = False
    """Divide the learning rate by 1 + how many versions older the oldest gradient is."""
    rules: tuple[RuleSpec, ...] = Field(default=(), exclude_if=operator.not_)
    """Other modes while something holds: the first rule that does, when an update begins."""

    @model_validator(mode="after")
    def _each_counts(self) -> Self:
        if self.damped and self.mode not in _STALE_MODES:
            raise ValueError(
                f"damped: nothing is stale where the mode is {self.mode}: leave it out, or take"
                " mode: stale"
            )
        for place, rule in enumerate(self.rules):
            for other, earlier in enumerate(self.rules[:place]):
                if rule.when.implies(earlier.when):
                    raise ValueError(
                        f"rules[{place}].when: can never count, since rules[{other}] holds whenever"
                        " this does: leave one out, or put the narrower one first"
                    )
        return self

    def modes(self, group_size: int) -> list[tuple[ModeSpec, int]]:
        """Its own mode and those of its rules, each with its K."""
        own: list[tuple[ModeSpec, int]] = [(self, group_size)]
        return own + [(rule, rule.group_size or group_size) for rule in self.rules]

    def batches_held(self, group_size: int) -> int:
        """How many batches a worker may have to hold, in the mode that asks for most."""
        return max(k * mode.groups_held for mode, k in self.modes(group_size))

    def check_local_steps(self, group_size: int, optimizer: str, field: str) -> None:
        """Refuse steps of a worker's own where there are none, or they cannot be averaged.

        Args:
            group_size: K of the job.
            optimizer: Its name.
            field: Which says so.

        Raises:
            ValueError: With what to write.
        """
        for place, (mode, k) in enumerate(self.modes(group_size), start=-1):
            at = "synchronisation" + (f".rules[{place}]" if place >= 0 else "")
            if mode.local_rate and k == 1:
                raise ValueError(
                    f"{at}.local_rate: with group_size 1 a worker is never asked for several"
                    f" batches together, got {mode.local_rate:g}: leave it out, or raise group_size"
                )
            if mode.local_rate and optimizer not in PROPORTIONAL:
                raise ValueError(
                    f"{field}: what workers came to is averaged with sgd or momentum, got"
                    f" {optimizer}: take one of these, or leave {at}.local_rate out"
                )

    def core_mode(self, group_size: int, learning_rate: float | None = None) -> Mode:
        """Its own mode, as the protocol has it."""
        return replace(super().core_mode(group_size, learning_rate), damped=self.damped)

    def core_rules(self, group_size: int) -> tuple[Rule, ...]:
        """Its rules, as the protocol has them."""
        return tuple(
            Rule(
                rule.core_mode(rule.group_size or group_size, rule.learning_rate),
                rule.when.busy_below,
                rule.when.workers_from,
            )
            for rule in self.rules
        )


SYNCHRONOUS = SynchronisationSpec(mode="synchronous")  # without the block


class AggregationSpec(SpecPart):
    """Who adds gradients up, takes the step and holds the weights."""

    mode: Literal["board", "group"] = "board"
    """`board`: the coordinator, from gradients that pass through Redis; `group`: workers among
    themselves, who must reach each other on a private network: see docs/howto/choosing.md."""
    layout: Literal["replicas", "slices"] = "replicas"
    """Of `group`: every worker holds all weights and optimizer state, or slices of them have
    owners, who alone hold its optimizer state and take its steps."""
    stage: Annotated[Literal["auto", 1, 2, 3], _STAGES] = "auto"
    """Of `slices`: owners are reliable machines (1), half of the spot machines (2), likewise while
    reliable ones only keep backups (3); `auto`: by the ratio of spot to reliable ones."""
    servers: Literal["auto"] | _Several = "auto"
    """Of `slices`: how many own some; `auto`: half of the spot machines, at least one."""
    owners: Annotated[int, Field(ge=1, le=3)] = 2
    """Of `slices`: how many own each."""
    transport: Literal["gloo", "nccl"] = "gloo"
    """Of `group`: what carries the numbers: TCP between machines' memory, or NCCL between GPUs, one
    for each worker. From one to the other a job changes by way of `board`."""

    @property
    def core(self) -> AggregationSettings:
        """As a leader goes by it."""
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
            raise ValueError(f"{given[0]}: is of mode: group, got mode: board: leave it out")
        # Said once, and not as both of its types.
        if self.servers != "auto" and not 1 <= self.servers <= MOST:
            raise ValueError(f"servers: must be auto or at least 1, got {self.servers}")
        sliced = [name for name in _OF_SLICES if name in given]
        if self.layout == "replicas" and sliced:
            raise ValueError(
                f"{sliced[0]}: every replica holds everything: leave it out, or take layout: slices"
            )
        return self
