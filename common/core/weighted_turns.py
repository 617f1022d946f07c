"""Smooth weighted round robin: turns of several parties that share something by weight.

Leaders mix streams in a group by this rule, and workers read their partitions by it. Each party
earns its share of every turn, and the party that is served pays one turn. The party with the
largest credit is next. Turns then follow the weights, and those of light parties are spread among
those of heavy ones:

    weights   a 2, b 1      a b a | a b a | a b a
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

# Exact, so that the result does not depend on the order of the numbers.
from math import fsum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.core.spans import Partition

if TYPE_CHECKING:
    _Counts = np.ndarray[tuple[int], np.dtype[np.int64]]
    _Present = np.ndarray[tuple[int], np.dtype[np.bool_]]
    _Shares = np.ndarray[tuple[int], np.dtype[np.float64]]

# Limit of credit and debt in turns. A party served out of turn, as the oldest batch always is, does
# not pay for ever, and a party that could not be served does not take all later turns.
MOST_TURNS = 4.0
# Minimum share of a party, relative to an even share. By backlog alone, a trickling stream beside
# 20,000 records waits for more than a thousand updates; with this minimum for one or two.
FLOOR = 0.2
# Lag in time above which a partition that is behind the others is reported.
FAR_BEHIND_S = 600.0


class Turns:
    """Credit of each party.

    Weights are those of all present parties, and none is negative. A party with weight 0 is absent
    and earns nothing. The results depend only on the calls, not on the order of any mapping: among
    equals, the first by name wins.
    """

    def __init__(self) -> None:
        self._owed = dict[str, float]()

    def choose(self, weights: Mapping[str, float], among: Iterable[str]) -> str | None:
        """Return the party whose turn it is. Call `pay` when it has been served.

        Args:
            weights: Weights of all present parties.
            among: Parties that can be served now.

        Returns:
            None if none of them has weight.
        """
        total = fsum(weights.values())
        chosen, most = None, 0.0
        for key in among:
            weight = weights.get(key, 0.0)
            if weight <= 0:
                continue
            owed = self._owed.get(key, 0.0) + weight / total
            if chosen is None or owed > most or (owed == most and str(key) < str(chosen)):
                chosen, most = key, owed
        return chosen

    def pay(self, shares: Mapping[str, float], weights: Mapping[str, float]) -> None:
        """Charge the parties that were served, in turn or not.

        Args:
            shares: Share of the turn that each one had. The sum is 1.
            weights: The weights passed to `choose`.
        """
        total = fsum(weights.values())
        if total <= 0:
            return
        owed = {
            key: self._owed.get(key, 0.0) + weight / total - shares.get(key, 0.0)
            for key, weight in weights.items()
            if weight > 0
        }
        self._owed = {key: min(max(turns, -MOST_TURNS), MOST_TURNS) for key, turns in owed.items()}


def level(backlogs: Mapping[str, float]) -> dict[str, float]:
    """Return weights that follow the backlogs, but give each party a fifth of an even share.

    Args:
        backlogs: Backlogs of all present parties, in any unit. A backlog may be 0.
    """
    if not backlogs:
        return {}
    even = fsum(backlogs.values()) / len(backlogs) or 1.0
    floor = even * FLOOR / (1 - FLOOR)
    return {key: backlog + floor for key, backlog in backlogs.items()}


class PartitionRecords(NamedTuple):
    """A number of consecutive records of a partition."""

    partition: Partition
    records: int


class RunsInTurn:
    """Reading order of a worker's partitions: in turn by their lag, in short runs.

    If a worker read one partition after the other, the model would learn the backlogs of two
    streams one after the other and forget the first: on NSL-KDD in two streams the held-out
    accuracy was 0.52 instead of 0.95. Turns with runs of b records give the result of one shuffled
    topic. Runs of 1,000 and more do not (0.79-0.93), and runs shorter than b bring nothing. No
    replay depends on this order, because claims name their addresses.

    The order never depends on timestamps: streams that were filled one after the other would be
    read one after the other.

    This is the rule of `Turns` in arrays. A run costs microseconds even with a thousand partitions.
    """

    def __init__(self) -> None:
        # Credits of the partitions present at the last payment.
        self._owed = dict[Partition, float]()
        # The rest of a run that exceeded the last request.
        self._begun: PartitionRecords | None = None

    def plan(
        self, here: Mapping[Partition, int], lags: Mapping[Partition, int], room: int, run: int
    ) -> list[PartitionRecords]:
        """Return the next records to read, in order, and count them as read.

        The plan ends when a partition runs out of local records but has more in Kafka. Otherwise
        the other partitions would take its turns and fill the room with long runs. The caller
        decides how long to wait for more.

        Args:
            here: Records of each partition that are available locally.
            lags: Known lags in records, including those that are available.
            room: Maximum number of records to read.
            run: Maximum length of a run of one partition while another has records, too; >= 1.
        """
        order = sorted(partition for partition, count in here.items() if count > 0)
        left = np.array([here[partition] for partition in order])
        behind = np.array([lags.get(partition, 0) for partition in order])
        owed = np.array([self._owed.get(partition, 0.0) for partition in order])
        begun = self._begun
        # Shares of each turn, valid while the same partitions have records.
        shares: _Shares | None = None
        pieces, there, paid = list[PartitionRecords](), len(order), False
        while there and room > 0:
            # No other partition has records, so there are no turns.
            if there == 1:
                chosen = int(left.argmax())
                length = int(left[chosen])
            elif begun is not None and here.get(begun.partition, 0):
                chosen = order.index(begun.partition)
                length = min(begun.records, int(left[chosen]), run)
            else:
                shares = _shares(np.maximum(behind, left), left > 0) if shares is None else shares
                chosen = int(np.where(left > 0, owed + shares, -np.inf).argmax())
                length = min(run, int(left[chosen]))
                cost = length / run
                owed += cost * shares
                owed[chosen] -= cost
                owed = np.where(left > 0, owed.clip(-MOST_TURNS, MOST_TURNS), 0.0)
                paid = True
            begun, count = None, min(length, room)
            left_over = count < length and there > 1
            self._begun = PartitionRecords(order[chosen], length - count) if left_over else None
            pieces.append(PartitionRecords(order[chosen], count))
            room -= count
            left[chosen] -= count
            if not left[chosen]:
                there, shares = there - 1, None
                if behind[chosen] > here[order[chosen]]:
                    # More records will arrive, and no other partition takes its turns meanwhile.
                    break
        if paid:
            self._owed = dict(zip(order, owed.tolist(), strict=True))
        return pieces


def _shares(backlogs: _Counts, present: _Present) -> _Shares:
    """Return (n,) shares of a turn: by backlog, and at least a fifth of an even share."""
    weights = np.where(present, backlogs, 0)
    floor = weights.sum() / np.count_nonzero(present) * FLOOR / (1 - FLOOR)
    weights = np.where(present, weights + floor, 0.0)
    shares: _Shares = weights / weights.sum()
    return shares


def behind_s(
    newest_s: Mapping[Partition, float], backlog: Mapping[Partition, int]
) -> dict[Partition, float]:
    """Return how far each partition with a backlog is behind the others in time.

    Args:
        newest_s: Kafka's timestamp of the newest record read from each partition.
        backlog: Lag of each partition in records.

    Returns:
        Seconds from its timestamp to the median of the others, or 0 if it is not older.
    """
    behind, ordered, others = dict[Partition, float](), sorted(newest_s.values()), len(newest_s) - 1
    for partition, own_s in newest_s.items():
        if others and backlog.get(partition, 0) > 0:
            # Without this value, those above it are one place lower.
            own = bisect_left(ordered, own_s)
            middle = ((others - 1) // 2, others // 2)
            median_s = sum(ordered[at + (at >= own)] for at in middle) / 2
            behind[partition] = max(median_s - own_s, 0.0)
    return behind
