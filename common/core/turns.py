"""Whose turn it is, where several share one thing by weight: smooth weighted round robin.

Leaders mix streams in a group by this rule. Everybody present earns its share of each unit that is
spent; whoever is served pays the unit. The next turn is of who is owed most. So shares follow the
weights, and turns of the light lie between those of the heavy:

    weights   a 2, b 1      a b a | a b a | a b a
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import fsum  # exact, so that the order of its numbers does not matter

# Turns that anybody may be owed, or owe. Somebody served out of turn (the oldest batch always is)
# does not pay for it for ever, and somebody who could not be served does not then take all.
MOST_TURNS = 4.0
# Of an even share, what everybody gets however light: by backlog alone, a stream that trickles
# beside 20,000 records waits for more than a thousand updates; with this for one or two.
FLOOR = 0.2


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
