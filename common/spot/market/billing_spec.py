"""A user's billing rules for a pool: a known name, or the rules."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from common.spot.theory.billing import BY_NAME, HOUR_S, Billing, Preempted
from common.spot.traces.spec import WrittenPart


class PreemptedSpec(WrittenPart):
    """Time that is free if the provider takes a machine back."""

    free_within_s: float = Field(
        default=0.0,
        ge=0,
        description="A preempted machine is free if it ran for less than this, in seconds.",
    )
    hour_refunded: bool = Field(
        default=False, description="True if the last, started hour of a preempted machine is free."
    )


class BillingRules(WrittenPart):
    """Billing of a pool's machines."""

    per: Literal["second", "hour"] = Field(
        default="second",
        description="Unit of billing. With `hour`, a started hour is paid in full.",
    )
    minimum_s: float = Field(
        default=0.0,
        ge=0,
        description="Minimum time that is paid, in seconds, unless the machine is preempted.",
    )
    price: Literal["now", "hour_start"] = Field(
        default="now",
        description="Price of a second: `now`, or that at the start of its hour (`hour_start`).",
    )
    preempted: PreemptedSpec = PreemptedSpec()
    hour_s: float = Field(
        default=HOUR_S,
        gt=0,
        description="Length of a billed hour, in seconds; shorter if prices are replayed faster.",
    )

    def rules(self) -> Billing:
        """Convert to the theory's rules."""
        fields = self.model_dump() | {"preempted": Preempted(**self.preempted.model_dump())}
        return Billing(**fields)


def _named(said: object) -> object:
    """Look up rules by their name."""
    if not isinstance(said, str):
        return said
    if said not in BY_NAME:
        raise ValueError(f"must be a block of rules or one of {', '.join(BY_NAME)}, got {said!r}")
    return asdict(BY_NAME[said])


BillingSpec: TypeAlias = Annotated[BillingRules, BeforeValidator(_named)]
