"""What a machine is paid for: by second or hour, at which price, and what an interruption saves.

One set of rules for the bill, the simulator's machines and the plans. Costs of volumes, addresses
and traffic are no part of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

HOUR_S = 3600.0

Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Preempted:
    """What is not paid where the provider takes a machine back."""

    free_within_s: float = 0.0  # of a machine that ran for less, nothing is
    hour_refunded: bool = False  # the hour that was begun is not


@dataclass(frozen=True, slots=True)
class Billing:
    """The rules of one pool.

    What runs is taken to cost as much as it has run for; what is owed beyond that, or given back,
    is known when it ends.
    """

    per: Literal["second", "hour"] = "second"  # hour: one that was begun is paid whole
    minimum_s: float = 0.0  # paid at least, unless the provider takes it back
    # Of each second: that of the time, or that at the beginning of the machine's own hour.
    price: Literal["now", "hour_start"] = "now"
    preempted: Preempted = Preempted()
    hour_s: float = HOUR_S  # of those hours: shorter where recorded prices are replayed faster

    @property
    def least_s(self) -> float:
        """For how long a machine that we stop is paid at least."""
        return max(self.minimum_s, self.hour_s) if self.per == "hour" else self.minimum_s

    @property
    def by_the_second(self) -> bool:
        """Whether each second costs its price, whatever comes after it."""
        plain = self.per == "second" and self.price == "now"
        return plain and not self.preempted.free_within_s and not self.preempted.hour_refunded

    def paid_s(self, ran_s: float | Array, *, preempted: bool) -> Array:
        """Say for how long a machine that ended is paid from its start: less or more than it ran.

        Args:
            ran_s: From its start to its end; any shape, which the answer has too.
            preempted: Whether the provider took it back.
        """
        paid_s = np.asarray(ran_s if preempted else np.maximum(ran_s, self.minimum_s))
        free = preempted & (paid_s < self.preempted.free_within_s)
        if preempted and self.preempted.hour_refunded:
            paid_s = np.floor(paid_s / self.hour_s) * self.hour_s
        elif self.per == "hour":
            paid_s = np.ceil(paid_s / self.hour_s) * self.hour_s
        return np.where(free, 0.0, paid_s)

    def paid_share(self, mean_s: float) -> float:
        """Say which share of their time machines are paid that are preempted.

        Args:
            mean_s: Of the exponential times after which they are; infinite: never.
        """
        if math.isinf(mean_s) or not mean_s:
            return 1.0
        free_s = self.preempted.free_within_s
        past = math.exp(-free_s / mean_s)
        if self.per == "second" and not self.preempted.hour_refunded:
            return (1 + free_s / mean_s) * past  # E[L; L > free] / E[L]
        # Whole hours, of those that outlast the free time: as many as there were by then, and the
        # expected number of full ones after it.
        hour_s = self.hour_s
        before = math.floor(free_s / hour_s)
        after = math.exp(-(before + 1) * hour_s / mean_s) / -math.expm1(-hour_s / mean_s)
        begun = 0 if self.preempted.hour_refunded else 1
        return hour_s / mean_s * ((before + begun) * past + after)


BY_THE_SECOND = Billing()
BY_NAME = {
    # Linux but SUSE: nothing if interrupted in its first hour, after it the seconds used.
    "ec2": Billing(minimum_s=60.0, preempted=Preempted(free_within_s=HOUR_S)),
    # Until 2017: whole hours, each at the price at its beginning; an interrupted one for nothing.
    "ec2-2017": Billing("hour", price="hour_start", preempted=Preempted(hour_refunded=True)),
    # A minute at least; nothing if preempted in its first minute.
    "gce": Billing(minimum_s=60.0, preempted=Preempted(free_within_s=60.0)),
}
