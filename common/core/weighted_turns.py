"""Whose turn it is, where several share one thing by weight: smooth weighted round robin.

Leaders mix streams in a group by this rule, and workers read their partitions by it. Everybody
present earns its share of each unit that is spent; whoever is served pays the unit. The next turn
is of who is owed most. So shares follow the weights, and turns of the light lie between those of
the heavy:

    weights   a 2, b 1      a b a | a b a | a b a
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from math import fsum  # exact, so that the order of its numbers does not matter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.core.spans import Partition

if TYPE_CHECKING:
    _Counts = np.ndarray[tuple[int], np.dtype[np.int64]]
    _Present = np.ndarray[tuple[int], np.dtype[np.bool_]]
    _Shares = np.ndarray[tuple[int], np.dtype[np.float64]]

# Turns that anybody may be owed, or owe. Somebody served out of turn (the oldest batch always is)
# does not pay for it for ever, and somebody who could not be served does not then take all.
MOST_TURNS = 4.0
# Of an even share, what everybody gets however light: by backlog alone, a stream that trickles
# beside 20,000 records waits for more than a thousand updates; with this for one or two.
FLOOR = 0.2
FAR_BEHIND_S = 600.0  # from here on that a partition lags behind the others in time is reported


class Turns:
    """What each one is owed.

    Weights are those of everybody present, none negative; who has weight 0 is absent, and nobody
    saves up while absent. What comes out depends on the calls alone, not on any mapping's order:
    among equals the one whose name sorts first leads.
    """

    def __init__(self) -> None:
        self._owed = dict[str, float]()

    def choose(self, weights: Mapping[str, float], among: Iterable[str]) -> str | None:
        """Say whose turn it is; nobody has been served yet: `pay` says that.

        Args:
            weights: Of everybody present.
            among: Who can be served now.

        Returns:
            None if nobody of them has weight.
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
        """Somebody was served, in turn or not.

        Args:
            shares: Share of the turn that each one had, 1 together.
            weights: As they were when `choose` was asked.
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
    """Make weights of backlogs: by backlog, but nobody gets less than a fifth of an even share.

    Args:
        backlogs: Of everybody present, in any one unit; 0 is a backlog, too.
    """
    if not backlogs:
        return {}
    even = fsum(backlogs.values()) / len(backlogs) or 1.0
    floor = even * FLOOR / (1 - FLOOR)
    return {key: backlog + floor for key, backlog in backlogs.items()}


class PartitionRecords(NamedTuple):
    """The next so many records of a partition."""

    partition: Partition
    records: int


class RunsInTurn:
    """Whose records a member reads next, by what each partition lags: in turn, in short runs.

    One partition after the other, a backlog of two streams is learned as two data sets, the second
    over the first: on NSL-KDD in two streams the held-out accuracy was 0.52 instead of 0.95. Taken
    in turn in runs of b, it is what one shuffled topic gives; runs of 1,000 and more do not
    (0.79-0.93), and shorter ones than b bring nothing. No replay depends on this order: claims name
    their addresses.

    It is never by timestamps: streams that were filled one after the other would be read so.

    The rule is that of `Turns`, in arrays: a run costs microseconds among a thousand partitions
    too.
    """

    def __init__(self) -> None:
        self._owed = dict[Partition, float]()  # turns, of who was there when one was paid last
        # The rest of a run that did not fit into the last request.
        self._begun: PartitionRecords | None = None

    def plan(
        self, here: Mapping[Partition, int], lags: Mapping[Partition, int], room: int, run: int
    ) -> list[PartitionRecords]:
        """Say which records to give out now, in order; they are taken to be given out.

        Where a partition runs dry that has more, this ends: its turns are not for the others, who
        would fill the room with long runs. How long to wait for it is the caller's to decide.

        Args:
            here: Records of each partition that can be given out.
            lags: Records that each is behind, those that are here included, where that is known.
            room: Records to give out, at most.
            run: Records of one partition in a row, at most, while another has some, too; >= 1.
        """
        order = sorted(partition for partition, count in here.items() if count > 0)
        left = np.array([here[partition] for partition in order])
        behind = np.array([lags.get(partition, 0) for partition in order])
        owed = np.array([self._owed.get(partition, 0.0) for partition in order])
        begun = self._begun
        shares: _Shares | None = None  # of each turn, as long as the same ones have records
        pieces, there, paid = list[PartitionRecords](), len(order), False
        while there and room > 0:
            if there == 1:  # nobody to take turns with
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
                    break  # more of it is on its way: nobody takes its turns meanwhile
        if paid:
            self._owed = dict(zip(order, owed.tolist(), strict=True))
        return pieces


def _shares(backlogs: _Counts, present: _Present) -> _Shares:
    """(n,) what each one earns of a turn: by backlog, and at least a fifth of an even share."""
    weights = np.where(present, backlogs, 0)
    floor = weights.sum() / np.count_nonzero(present) * FLOOR / (1 - FLOOR)
    weights = np.where(present, weights + floor, 0.0)
    shares: _Shares = weights / weights.sum()
    return shares


def behind_s(
    newest_s: Mapping[Partition, float], backlog: Mapping[Partition, int]
) -> dict[Partition, float]:
    """How far each partition that has a backlog lags behind the others in time, in seconds.

    Args:
        newest_s: Kafka's timestamp of the newest record that was read of each.
        backlog: Records that each is behind.

    Returns:
        Seconds from there to the median of the others'; 0 where it is not older.
    """
    behind, ordered, others = dict[Partition, float](), sorted(newest_s.values()), len(newest_s) - 1
    for partition, own_s in newest_s.items():
        if others and backlog.get(partition, 0) > 0:
            own = bisect_left(ordered, own_s)  # without which those above it are one place lower
            middle = ((others - 1) // 2, others // 2)
            median_s = sum(ordered[at + (at >= own)] for at in middle) / 2
            behind[partition] = max(median_s - own_s, 0.0)
    return behind
