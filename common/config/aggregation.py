"""The block `aggregation` of a job's file: who adds gradients up and holds the weights."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from common.config.synchronisation import MOST, SpecPart
from common.core.settings import AggregationSettings, SliceSettings

_Several = Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MOST})]
# Apart by type: what makes clients of the API's document knows no words and numbers in one list.
_STAGES = WithJsonSchema({"anyOf": [{"const": "auto"}, {"enum": [1, 2, 3]}]})
# More than owners, so that each has about as many, and few: each is a step of its own.
SLICES = 32
_OF_SLICES = ("stage", "servers", "owners")


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
    servers: (
        Literal["auto"] | Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MOST})]
    ) = "auto"
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
