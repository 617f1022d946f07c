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
        default=0.0, ge=0, description="Of a machine that ran for less, nothing is paid."
    )
    hour_refunded: bool = Field(
        default=False, description="Whether the hour that was begun is not paid."
    )


class BillingRules(WrittenPart):
    """Billing of a pool's machines."""

    per: Literal["second", "hour"] = Field(
        default="second", description="hour: one that was begun is paid whole."
    )
    minimum_s: float = Field(
        default=0.0, ge=0, description="Paid at least, unless the provider takes it back."
    )
    price: Literal["now", "hour_start"] = Field(
        default="now", description="Of each second: of the time, or of its hour's beginning."
    )
    preempted: PreemptedSpec = PreemptedSpec()
    hour_s: float = Field(
        default=HOUR_S,
        gt=0,
        description="Length of those hours: shorter where recorded prices are replayed faster.",
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
        raise ValueError(f"must be {', '.join(BY_NAME)}, or the rules, got {said!r}")
    return asdict(BY_NAME[said])


BillingSpec: TypeAlias = Annotated[BillingRules, BeforeValidator(_named)]
