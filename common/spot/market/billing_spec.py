"""A user's billing rules for a pool: a known name, or the rules."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from common.spot.theory.billing import BY_NAME, HOUR_S, Billing, Preempted
from common.spot.traces.spec import WrittenPart


class PreemptedSpec(WrittenPart):
    """Time of a machine that is not billed if the provider takes the machine away."""

    free_within_s: float = Field(
        default=0.0,
        ge=0,
        description="A machine that the provider takes away is free if it ran for less than this"
        " time, in seconds.",
    )
    hour_refunded: bool = Field(
        default=False,
        description="True if the last, started hour of a machine is free when the provider takes"
        " the machine away.",
    )


class BillingRules(WrittenPart):
    """Billing rules of the machines of a pool (one kind at one price)."""

    per: Literal["second", "hour"] = Field(
        default="second",
        description="Unit of billing. With `hour`, each started hour of a machine is paid in full.",
    )
    minimum_s: float = Field(
        default=0.0,
        ge=0,
        description="Minimum time of a machine that is billed, in seconds, unless the provider"
        " takes the machine away.",
    )
    price: Literal["now", "hour_start"] = Field(
        default="now",
        description="Price that a machine is billed at: `now`, the current price in each second,"
        " or `hour_start`, the price at the start of each billed hour.",
    )
    preempted: PreemptedSpec = PreemptedSpec()
    hour_s: float = Field(
        default=HOUR_S,
        gt=0,
        description="Length of a billed hour, in seconds; less than 3600 if recorded prices are"
        " replayed faster than real time.",
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
