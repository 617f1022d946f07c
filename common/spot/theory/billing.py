"""Billing of machines: by second or hour, at which price, and the refund of an interruption.

The bill, the simulator's machines and the plans use these rules. Costs of volumes, addresses and
traffic are not included.
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
    """Time that is free if the provider takes a machine back."""

    # A machine that the provider takes back before this time costs nothing.
    free_within_s: float = 0.0
    # True if the hour in which the provider takes the machine back is free.
    hour_refunded: bool = False


@dataclass(frozen=True, slots=True)
class Billing:
    """The billing rules of one pool.

    The cost of a running machine is that of its time so far. Surcharges and refunds are added when
    the machine ends.
    """

    # With `hour`, a started hour is paid in full.
    per: Literal["second", "hour"] = "second"
    # Minimum time that is paid, unless the provider takes the machine back.
    minimum_s: float = 0.0
    # Price of each second: the price at that time, or the price at which the machine's current hour
    # began. Hours are counted from the machine's launch.
    price: Literal["now", "hour_start"] = "now"
    preempted: Preempted = Preempted()
    # Length of a billed hour; less than an hour if recorded prices are replayed faster.
    hour_s: float = HOUR_S

    @property
    def least_s(self) -> float:
        """Minimum time that is paid for a machine that we stop."""
        return max(self.minimum_s, self.hour_s) if self.per == "hour" else self.minimum_s

    @property
    def by_the_second(self) -> bool:
        """True if each second costs its price, regardless of later events."""
        plain = self.per == "second" and self.price == "now"
        return plain and not self.preempted.free_within_s and not self.preempted.hour_refunded

    def paid_s(self, ran_s: float | Array, *, preempted: bool) -> Array:
        """Return the paid time of an ended machine, which may differ from its run time."""
        paid_s = np.asarray(ran_s if preempted else np.maximum(ran_s, self.minimum_s))
        free = preempted & (paid_s < self.preempted.free_within_s)
        if preempted and self.preempted.hour_refunded:
            paid_s = np.floor(paid_s / self.hour_s) * self.hour_s
        elif self.per == "hour":
            paid_s = np.ceil(paid_s / self.hour_s) * self.hour_s
        return np.where(free, 0.0, paid_s)

    def paid_share(self, mean_s: float) -> float:
        """Return the paid share of the run time of preempted machines.

        Args:
            mean_s: Mean of the exponential times after which they are preempted; infinite for
                never.
        """
        if math.isinf(mean_s) or not mean_s:
            return 1.0
        free_s = self.preempted.free_within_s
        past = math.exp(-free_s / mean_s)
        if self.per == "second" and not self.preempted.hour_refunded:
            return (1 + free_s / mean_s) * past  # E[L; L > free] / E[L]
        # Only machines that outlast the free time are paid: for the hours that are full by then,
        # for the expected number of later full hours, and for the last, unless it is refunded.
        hour_s = self.hour_s
        before = math.floor(free_s / hour_s)
        after = math.exp(-(before + 1) * hour_s / mean_s) / -math.expm1(-hour_s / mean_s)
        begun = 0 if self.preempted.hour_refunded else 1
        return hour_s / mean_s * ((before + begun) * past + after)


BY_THE_SECOND = Billing()
BY_NAME = {
    # Linux except SUSE: nothing if interrupted in the first hour, then the seconds used.
    "ec2": Billing(minimum_s=60.0, preempted=Preempted(free_within_s=HOUR_S)),
    # The rules until 2017: whole hours, each at its first price; an interrupted one is free.
    "ec2-2017": Billing("hour", price="hour_start", preempted=Preempted(hour_refunded=True)),
    # At least a minute; nothing if preempted in the first minute.
    "gce": Billing(minimum_s=60.0, preempted=Preempted(free_within_s=60.0)),
}
