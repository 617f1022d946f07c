"""Cost of machines: the bill of a job, from records of its machines and their prices."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from common.spot.machines import Offer
from common.spot.theory.billing import BY_THE_SECOND, HOUR_S, Billing

if TYPE_CHECKING:
    from common.spot.provisioning.records import EndedBecause


class PriceCurve:
    """Prices of one offer over time: each holds until the next.

    Prices may be added in any order; of two for the same time, the one added last counts. Before
    the first time, the first price holds.
    """

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._usd_per_hour: list[float] = []
        # Cost of a machine from the first of `_times_s` until each of them.
        self._usd: list[float] = []

    @property
    def begins_s(self) -> float:
        """First time with a known price; infinite without a price."""
        return self._times_s[0] if self._times_s else float("inf")

    def add(self, at_s: float, usd_per_hour: float) -> None:
        """Add a price."""
        index = bisect_left(self._times_s, at_s)
        if index < len(self._times_s) and self._times_s[index] == at_s:
            self._usd_per_hour[index] = usd_per_hour
        else:
            self._times_s.insert(index, at_s)
            self._usd_per_hour.insert(index, usd_per_hour)
        del self._usd[index:]
        for later in range(index, len(self._times_s)):
            self._usd.append(self._until(self._times_s[later]) if later else 0.0)

    def usd_per_hour(self, at_s: float) -> float:
        """Return the price; 0 if none is known."""
        return self._usd_per_hour[self._index(at_s)] if self._times_s else 0.0

    def cost_usd(self, since_s: float, until_s: float) -> float:
        """Return the cost of one machine between two times; 0 if they are reversed."""
        if until_s <= since_s or not self._times_s:
            return 0.0
        return self._until(until_s) - self._until(since_s)

    def _until(self, at_s: float) -> float:
        """Return the integral of the price since the first time; negative before it."""
        index = self._index(at_s)
        since_s = at_s - self._times_s[index]
        return self._usd[index] + since_s * self._usd_per_hour[index] / HOUR_S

    def _index(self, at_s: float) -> int:
        return max(bisect_right(self._times_s, at_s, hi=len(self._usd)) - 1, 0)


class _Gone(NamedTuple):
    """A machine that has ended; sorted by its end."""

    ended_s: float
    paid_until_s: float
    started_s: float
    offer: Offer


class Bill:
    """Sums the cost of machines. Ended ones are summed once, unless a price comes late.

    Args:
        billing: Billing by pool. A pool without an entry bills by the second.
    """

    def __init__(self, billing: Mapping[str, Billing]) -> None:
        self._billing = dict(billing)
        rules = self._billing.values()
        # Longest time after its end that a machine may still be charged.
        self._longest_s = max(
            (rule.minimum_s + rule.hour_s * (rule.per == "hour") for rule in rules), default=0.0
        )
        self._curves: dict[Offer, PriceCurve] = {}
        # Offer and start by launch.
        self._running: dict[int, tuple[Offer, float]] = {}
        self._gone: list[_Gone] = []
        self._gone_usd = 0.0
        # Time after which a new price does not change `_gone_usd`.
        self._settled_s = float("-inf")

    def price(self, offer: Offer, at_s: float, usd_per_hour: float) -> None:
        """Set the price of an offer from a time on."""
        begins_s = self._curves[offer].begins_s if offer in self._curves else float("inf")
        late = at_s <= max(self._settled_s, begins_s)
        # Only machines that may be charged after `at_s` change their cost, unless this becomes the
        # first price.
        since_s = at_s - self._longest_s if at_s > begins_s else float("-inf")
        changed = self._gone[bisect_left(self._gone, (since_s,)) :] if late else []
        before_usd = sum(map(self._gone_cost_usd, changed))
        self._curves.setdefault(offer, PriceCurve()).add(at_s, usd_per_hour)
        self._gone_usd += sum(map(self._gone_cost_usd, changed)) - before_usd

    def started(self, launch: int, offer: Offer, at_s: float) -> None:
        """Record that a machine has run, and has been charged, since a time."""
        self._running[launch] = (offer, at_s)

    def ended(self, launch: int, at_s: float, cause: EndedBecause) -> None:
        """Record the end of a machine, if it ever ran."""
        if launch not in self._running:
            return
        offer, started_s = self._running.pop(launch)
        rule = self._billing.get(offer.pool, BY_THE_SECOND)
        ended_s = max(at_s, started_s)
        paid_s = float(rule.paid_s(ended_s - started_s, preempted=cause == "preempted"))
        gone = _Gone(ended_s, started_s + paid_s, started_s, offer)
        # Offers have no order.
        insort(self._gone, gone, key=lambda each: each[:3])
        self._gone_usd += self._gone_cost_usd(gone)
        self._settled_s = max(self._settled_s, gone.paid_until_s, ended_s)

    def spent_usd(self, now_s: float) -> float:
        """Return the cost until a time: of running machines so far, of ended ones in full."""
        still_s = bisect_right(self._gone, (now_s, float("inf")))
        total = self._gone_usd
        # Machines that ended later than `now_s`.
        for gone in self._gone[still_s:]:
            total += self._cost_usd(gone.offer, gone.started_s, now_s) - self._gone_cost_usd(gone)
        for offer, started_s in self._running.values():
            total += self._cost_usd(offer, started_s, now_s)
        return total

    def usd_per_hour(self, offer: Offer, now_s: float) -> float:
        """Return a machine's price now: that of its offer, of its type, or of its pool."""
        return self._curve(offer).usd_per_hour(now_s)

    def _gone_cost_usd(self, gone: _Gone) -> float:
        return self._cost_usd(gone.offer, gone.started_s, gone.paid_until_s)

    def _cost_usd(self, offer: Offer, since_s: float, until_s: float) -> float:
        curve = self._curve(offer)
        rule = self._billing.get(offer.pool, BY_THE_SECOND)
        if rule.price == "now":
            return curve.cost_usd(since_s, until_s)
        total = 0.0
        while since_s < until_s:
            end_s = min(since_s + rule.hour_s, until_s)
            total += (end_s - since_s) * curve.usd_per_hour(since_s) / HOUR_S
            since_s = end_s
        return total

    def _curve(self, offer: Offer) -> PriceCurve:
        """Return the prices of the offer itself, of its type anywhere, or of its pool."""
        for known in (offer, offer._replace(zone=""), Offer(offer.pool)):
            if known in self._curves:
                return self._curves[known]
        return PriceCurve()
