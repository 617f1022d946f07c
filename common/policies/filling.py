"""Which outages to fill: the cheapest way to a number of records that would be missing otherwise.

A slot can be left alone in outages, filled by stand-ins, or pinned to on-demand throughout. What
such a step gives is in proportion to the rate of the slot's stream, what it costs is not. So the
steps of all slots are taken in the order of their price per record, until they give enough:

    records   ┌── pinned: the highest rates, only where stand-ins start up too slowly
    missing ──┼── filled: high rates
              └── left alone: low rates
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from common.policies.outages import Outages
    from common.policies.policy import Flags
    from common.theory.work import Rates

Array: TypeAlias = npt.NDArray[np.float64]


def expected_up_s(now_up: Flags, t_s: float, market: Outages) -> Array:
    """Give (N_tot,) the expected seconds, of the next t, in which each spot machine delivers.

    With a the availability and x = tau (1 - exp(-t / tau)): a t + (1 - a) x for one that is up now,
    a t - a x for one that is not. Exact for the two-state chain; a start-up is taken for a part of
    the outage, as if it were memoryless, too.
    """
    a, tau_s = market.availability, market.relaxation_s
    remembered_s = -tau_s * math.expm1(-t_s / tau_s) if tau_s else 0.0
    down_s = max(a * (t_s - remembered_s), 0.0)
    return np.where(now_up, a * t_s + (1 - a) * remembered_s, down_s)


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The steps that can be taken, in the order of their price per record."""

    workers: int
    slots: npt.NDArray[np.intp]  # (S,)
    pins: Flags | None  # (S,) which pin a slot instead of filling its outages; None: none does
    records: Array  # (S,) what they give until the deadline
    usd: Array  # (S,) what they cost

    def until(self, missing: Array) -> list[int]:
        """Count the steps that give so many records; all of them if even they do not.

        Args:
            missing: (m,) any number of amounts; where nothing is missing no step is needed.
        """
        counts = self.records.cumsum().searchsorted(missing) + 1
        counts[missing <= 0] = 0
        return [min(count, len(self.slots)) for count in counts.tolist()]

    def cost_usd(self, missing: float) -> float:
        """Give the price of that many records, with a part of the last step."""
        records, usd = (np.append(0.0, some.cumsum()) for some in (self.records, self.usd))
        return float(np.interp(missing, records, usd))

    def fills(self, count: int) -> Flags:
        """Tell (N_tot,) whose outages the first `count` steps fill."""
        filled = np.zeros(self.workers, np.bool_)
        slots = self.slots[:count]
        filled[slots if self.pins is None else slots[~self.pins[:count]]] = True
        return filled

    def pinned_records(self, count: int) -> Array:
        """Give (N_tot,) what the pins among the first `count` steps give."""
        gained = np.zeros(self.workers)
        if self.pins is not None:
            pins = self.pins[:count]
            gained[self.slots[:count][pins]] = self.records[:count][pins]
        return gained


def steps(rates_per_s: Rates, lost_s: Array, market: Outages) -> Steps:
    """Order all steps; of equal ones the lower slot comes first, whether it is up or not.

    Nothing keeps one from letting nobody stand in until all slack is used up. Where stand-ins start
    at once that costs the same. Where they do not, it leaves every later stroke of bad luck to
    pins, the dearest steps: simulated at alpha = 0.9, theta = 1.1 theta_0 and start-ups of 69 and
    87 s, it costs 1 % of the on-demand cost more.

    Args:
        rates_per_s: Of the slots.
        lost_s: (N_tot,) what outages take from each slot until the deadline, if left alone.
        market: What the steps give and cost.
    """
    workers = len(rates_per_s)
    first = np.argsort(-rates_per_s, kind="stable")
    lost_s, missed = lost_s[first], (rates_per_s * lost_s)[first]
    if not market.standing_in_pays:
        pins = np.ones(workers, np.bool_)
        return Steps(workers, first, pins, missed, lost_s * market.direct_usd_per_s)
    if market.recovered >= 1:
        return Steps(workers, first, None, missed, lost_s * market.fill_usd_per_s)
    rest, ratio = 1 - market.recovered, market.fill_usd_per_s / market.pin_usd_per_s
    fills_usd = market.recovered * market.fill_usd_per_s * lost_s
    pins_usd = rest * market.pin_usd_per_s * lost_s
    sorted_rates = rates_per_s[first]
    order = np.argsort(-np.concatenate((sorted_rates, ratio * sorted_rates)), kind="stable")
    return Steps(
        workers,
        np.concatenate((first, first))[order],
        order >= workers,
        np.concatenate((market.recovered * missed, rest * missed))[order],
        np.concatenate((fills_usd, pins_usd))[order],
    )
