"""What machines cost: paid by the second, each second at the price of the time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

from common.theory.work import HOUR_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.provisioning.records import EndedBecause


class PriceCurve:
    """The price of one pool: what it was told to be holds until it is told another.

    Prices may be told in any order; of two for the same time the one told last holds. Before the
    first, the first is taken.
    """

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._usd_per_s: list[float] = []
        self._usd: list[float] = []  # of a machine from the first time until each

    @property
    def begins_s(self) -> float:
        """The first time that a price is known for; infinite while there is none."""
        return self._times_s[0] if self._times_s else float("inf")

    def tell(self, at_s: float, usd_per_hour: float) -> None:
        """Take in a price."""
        usd_per_s = usd_per_hour / HOUR_S
        index = bisect_left(self._times_s, at_s)
        if index < len(self._times_s) and self._times_s[index] == at_s:
            self._usd_per_s[index] = usd_per_s
        else:
            self._times_s.insert(index, at_s)
            self._usd_per_s.insert(index, usd_per_s)
        del self._usd[index:]
        for later in range(index, len(self._times_s)):
            self._usd.append(self._at(self._times_s[later]) if later else 0.0)

    def cost_usd(self, since_s: float, until_s: float) -> float:
        """What one machine costs between two times; 0 where they are the other way round."""
        if until_s <= since_s or not self._times_s:
            return 0.0
        return self._at(until_s) - self._at(since_s)

    def _at(self, at_s: float) -> float:
        """The integral of the price from the first time on; below 0 before it."""
        index = max(bisect_right(self._times_s, at_s, hi=len(self._usd)) - 1, 0)
        return self._usd[index] + (at_s - self._times_s[index]) * self._usd_per_s[index]


class Bill:
    """Sums what machines cost. Those that are gone are summed once, unless a price comes late.

    Args:
        minimum_billing_s: By pool; a pool that is not named bills by the second.
    """

    def __init__(self, minimum_billing_s: Mapping[str, float]) -> None:
        self._minimum_s = dict(minimum_billing_s)
        self._longest_s = max(self._minimum_s.values(), default=0.0)
        self._curves: dict[str, PriceCurve] = {}
        self._running: dict[int, tuple[str, float]] = {}  # by launch: pool, started
        self._gone: list[tuple[float, float, float, str]] = []  # ended, paid until, started, pool
        self._gone_usd = 0.0
        self._settled_s = float("-inf")  # prices told from then on do not change that sum

    def price(self, pool: str, at_s: float, usd_per_hour: float) -> None:
        """Take in what a pool costs from then on."""
        curve = self._curves.setdefault(pool, PriceCurve())
        late = at_s <= max(self._settled_s, curve.begins_s)
        # What was paid up before it stays as it was, unless the first price holds there, too.
        since_s = at_s - self._longest_s if at_s > curve.begins_s else float("-inf")
        changed = self._gone[bisect_left(self._gone, (since_s,)) :] if late else []
        before_usd = sum(self._cost_usd(entry) for entry in changed)
        curve.tell(at_s, usd_per_hour)
        self._gone_usd += sum(self._cost_usd(entry) for entry in changed) - before_usd

    def started(self, launch: int, pool: str, at_s: float) -> None:
        """A machine runs, and is paid for since then."""
        self._running[launch] = (pool, at_s)

    def ended(self, launch: int, at_s: float, cause: EndedBecause) -> None:
        """A machine is gone; nothing where it never ran."""
        if launch not in self._running:
            return
        pool, started_s = self._running.pop(launch)
        # Whatever the provider did not take back is paid for the pool's shortest time at least.
        minimum_s = 0.0 if cause == "preempted" else self._minimum_s.get(pool, 0.0)
        until_s = max(at_s, started_s + minimum_s)
        entry = (max(at_s, started_s), until_s, started_s, pool)
        insort(self._gone, entry)
        self._gone_usd += self._cost_usd(entry)
        self._settled_s = max(self._settled_s, until_s)

    def spent_usd(self, now_s: float) -> float:
        """Sum up to a time: what ran then as far as it ran, what was gone with all it owes."""
        still_s = bisect_right(self._gone, (now_s, float("inf"), float("inf"), ""))
        total = self._gone_usd
        for entry in self._gone[still_s:]:  # that ended later than asked about
            total += self._curve_cost_usd(entry[3], entry[2], now_s) - self._cost_usd(entry)
        for pool, started_s in self._running.values():
            total += self._curve_cost_usd(pool, started_s, now_s)
        return total

    def _cost_usd(self, entry: tuple[float, float, float, str]) -> float:
        _, until_s, started_s, pool = entry
        return self._curve_cost_usd(pool, started_s, until_s)

    def _curve_cost_usd(self, pool: str, since_s: float, until_s: float) -> float:
        curve = self._curves.get(pool)
        return 0.0 if curve is None else curve.cost_usd(since_s, until_s)
