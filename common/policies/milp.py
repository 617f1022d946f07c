"""The mixed-integer program of several pools: which class of workers gets machines of which pool.

The expected cost is a ratio, dollars a second over records a second, both linear in the numbers of
machines. Dinkelbach's iteration makes a few linear programs of it: for a guess q of the least
ratio, the x that minimises dollars - q records has a ratio below q, unless q is the least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from common.theory.work import Rates

Array: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

MOST_CLASSES = 32  # of rates: twice as many take three times as long and save 0.4 % at most
GAP = 1e-4  # relative, at which a program counts as solved: prices are not known that well
LIMIT_S = 10.0  # for one program; the best that it has found is taken then
ROUNDS = 20  # of Dinkelbach's iteration, which converges faster than linearly: 5 are many


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """Workers of equal rates, or nearly so, the lowest first."""

    members: tuple[Counts, ...]  # C arrays of workers, each sorted by rate
    mean_per_s: Array  # (C,)
    highest_per_s: Array  # (C,)

    @property
    def sizes(self) -> Counts:
        """(C,) how many workers each has."""
        return np.array([len(members) for members in self.members], np.int64)


def classes_of(rates_per_s: Rates, most: int = MOST_CLASSES, tolerance: float = 0.0) -> Classes:
    """Group workers by rate: equal ones, or where there are more rates than `most`, by quantiles.

    A class counts with its mean rate. Its slowest workers are given to its least available pools,
    so that they lose no more than the mean says: it errs towards the deadline.

    Args:
        rates_per_s: Of the workers.
        most: Classes.
        tolerance: Relative; rates closer than that may count as equal. Estimates of equal rates
            would otherwise change places with each other whenever they are looked at.
    """
    order = np.argsort(rates_per_s, kind="stable")
    ordered = rates_per_s[order]
    starts = [0]
    for worker in range(1, len(ordered)):
        if ordered[worker] > ordered[starts[-1]] * (1 + tolerance):
            starts.append(worker)
    if len(starts) > most:
        starts = np.linspace(0, len(ordered), most, endpoint=False).round().astype(int).tolist()
    members = tuple(np.split(order, starts[1:]))
    mean = np.array([rates_per_s[some].mean() for some in members])
    return Classes(members, mean, np.array([rates_per_s[some].max() for some in members]))


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Find integers x[pool, class], (P, C), of least cost per record.

    The workers of a class on all pools are its size; the machines of a pool are no more than it
    has; and the records of a second are enough (equation 23 for pools).
    """

    usd_per_s: Array  # (P,) pi alpha of a machine
    records_per_s: Array  # (P, C) alpha lambda of a worker
    sizes: Counts  # (C,)
    most: Array  # (P,) machines; infinite: as many as wanted
    allowed: npt.NDArray[np.bool_]  # (P, C) whether a machine keeps up with its stream
    needed_per_s: float  # J K b / theta

    def solve(self) -> tuple[Counts | None, tuple[float, ...]]:
        """Give x, or None where there is none, and the ratio after each round.

        The first guess is the least ratio of real numbers, a lower bound found in milliseconds. So
        usually one program of integers finds x, and a second one proves it.
        """
        ratio, found, ratios = 0.0, None, list[float]()
        for integers in (False, True):
            for _ in range(ROUNDS):
                x = self._minimise(ratio, integers=integers)
                if x is None:
                    return (None if not integers else found), tuple(ratios)
                last, ratio = ratio, self.ratio(x)
                if integers:
                    found = x.round().astype(np.int64)
                    ratios.append(ratio)
                if abs(ratio - last) <= GAP * ratio:
                    break
        return found, tuple(ratios)

    def ratio(self, x: Array) -> float:
        """Give dollars per record."""
        return float(self.usd_per_s @ x.sum(axis=1)) / float((self.records_per_s * x).sum())

    def _minimise(self, ratio: float, *, integers: bool) -> Array | None:
        from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 -- slow to load
        from scipy.sparse import eye_array, hstack, kron, vstack  # noqa: PLC0415 -- slow to load

        pools, classes = self.allowed.shape
        count = pools * classes
        rows = [
            kron(np.ones((1, pools)), eye_array(classes)),
            kron(eye_array(pools), np.ones((1, classes))),
            self.records_per_s.reshape(1, -1),
        ]
        # At the least ratio the objective is 0, of which no relative gap can be asked. A column
        # that is always 1 lifts it to the size of the bill.
        matrix = hstack([vstack(rows), np.zeros((classes + pools + 1, 1))], format="csr")
        scale = self.usd_per_s.max() or 1.0  # HiGHS takes differences below 1e-7 for rounding
        prices = (self.usd_per_s[:, None] - ratio * self.records_per_s).ravel() / scale
        result = milp(
            np.append(prices, self.sizes.sum()),
            integrality=np.full(count + 1, int(integers)),
            constraints=LinearConstraint(
                matrix,
                np.concatenate((self.sizes, np.zeros(pools), [self.needed_per_s])),
                np.concatenate((self.sizes, self.most, [np.inf])),
            ),
            bounds=Bounds(
                np.append(np.zeros(count), 1),
                np.append(np.where(self.allowed, self.sizes, 0), 1),
            ),
            options={"mip_rel_gap": GAP, "time_limit": LIMIT_S},
        )
        if result.x is None:
            return None
        return np.asarray(result.x[:-1], np.float64).reshape(pools, classes)
