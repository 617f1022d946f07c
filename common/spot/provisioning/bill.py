"""What machines cost: the bill of a job, from what was told of its machines and their prices."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from common.spot.machines import Offer
from common.spot.theory.billing import BY_THE_SECOND, HOUR_S, Billing

if TYPE_CHECKING:
    from common.spot.provisioning.records import EndedBecause


class PriceCurve:
    """The price of one offer: what it was told to be holds until it is told another.

    Prices may be told in any order; of two for the same time the one told last holds. Before the
    first, the first is taken.
    """

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._usd_per_hour: list[float] = []
        self._usd: list[float] = []  # of a machine from the first time until each

    @property
    def begins_s(self) -> float:
        """The first time that a price is known for; infinite while there is none."""
        return self._times_s[0] if self._times_s else float("inf")

    def add(self, at_s: float, usd_per_hour: float) -> None:
        """Take in a price."""
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
        """The price; 0 while none is known."""
        return self._usd_per_hour[self._index(at_s)] if self._times_s else 0.0

    def cost_usd(self, since_s: float, until_s: float) -> float:
        """What one machine costs between two times; 0 where they are the other way round."""
        if until_s <= since_s or not self._times_s:
            return 0.0
        return self._until(until_s) - self._until(since_s)

    def _until(self, at_s: float) -> float:
        """The integral of the price from the first time on; below 0 before it."""
        index = self._index(at_s)
        since_s = at_s - self._times_s[index]
        return self._usd[index] + since_s * self._usd_per_hour[index] / HOUR_S

    def _index(self, at_s: float) -> int:
        return max(bisect_right(self._times_s, at_s, hi=len(self._usd)) - 1, 0)


class _Gone(NamedTuple):
    """A machine that has ended; sorted by when."""

    ended_s: float
    paid_until_s: float
    started_s: float
    offer: Offer


class Bill:
    """Sums what machines cost. Those that are gone are summed once, unless a price comes late.

    Args:
        billing: By pool; a pool that is not named bills by the second.
    """

    def __init__(self, billing: Mapping[str, Billing]) -> None:
        self._billing = dict(billing)
        rules = self._billing.values()
        # How long after its end a machine may have to be paid at most.
        self._longest_s = max(
            (rule.minimum_s + rule.hour_s * (rule.per == "hour") for rule in rules), default=0.0
        )
        self._curves: dict[Offer, PriceCurve] = {}
        self._running: dict[int, tuple[Offer, float]] = {}  # by launch: of what, started
        self._gone: list[_Gone] = []
        self._gone_usd = 0.0
        self._settled_s = float("-inf")  # prices told from then on do not change that sum

    def price(self, offer: Offer, at_s: float, usd_per_hour: float) -> None:
        """Take in what machines of an offer cost from then on."""
        begins_s = self._curves[offer].begins_s if offer in self._curves else float("inf")
        late = at_s <= max(self._settled_s, begins_s)
        # What was paid up before it stays as it was, unless the first price holds there, too.
        since_s = at_s - self._longest_s if at_s > begins_s else float("-inf")
        changed = self._gone[bisect_left(self._gone, (since_s,)) :] if late else []
        before_usd = sum(map(self._gone_cost_usd, changed))
        self._curves.setdefault(offer, PriceCurve()).add(at_s, usd_per_hour)
        self._gone_usd += sum(map(self._gone_cost_usd, changed)) - before_usd

    def started(self, launch: int, offer: Offer, at_s: float) -> None:
        """A machine runs, and is paid for since then."""
        self._running[launch] = (offer, at_s)

    def ended(self, launch: int, at_s: float, cause: EndedBecause) -> None:
        """A machine is gone; nothing where it never ran."""
        if launch not in self._running:
            return
        offer, started_s = self._running.pop(launch)
        rule = self._billing.get(offer.pool, BY_THE_SECOND)
        ended_s = max(at_s, started_s)
        paid_s = float(rule.paid_s(ended_s - started_s, preempted=cause == "preempted"))
        gone = _Gone(ended_s, started_s + paid_s, started_s, offer)
        insort(self._gone, gone, key=lambda each: each[:3])  # offers have no order
        self._gone_usd += self._gone_cost_usd(gone)
        self._settled_s = max(self._settled_s, gone.paid_until_s, ended_s)

    def spent_usd(self, now_s: float) -> float:
        """Sum up to a time: what ran then as far as it ran, what was gone with all it owes."""
        still_s = bisect_right(self._gone, (now_s, float("inf")))
        total = self._gone_usd
        for gone in self._gone[still_s:]:  # that ended later than asked about
            total += self._cost_usd(gone.offer, gone.started_s, now_s) - self._gone_cost_usd(gone)
        for offer, started_s in self._running.values():
            total += self._cost_usd(offer, started_s, now_s)
        return total

    def usd_per_hour(self, offer: Offer, now_s: float) -> float:
        """What a machine costs now: its own offer's price, or else the nearest that is known."""
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
        """Of the offer itself, of its type anywhere, or of its pool."""
        for known in (offer, offer._replace(zone=""), Offer(offer.pool)):
            if known in self._curves:
                return self._curves[known]
        return PriceCurve()
