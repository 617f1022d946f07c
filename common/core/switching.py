"""How the next round is made: as the first of the owner's rules says that holds when it begins.

Nothing is drained for a switch. A round keeps what it began with, and `rounds.fits` says when the
next one may begin.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from common.core.messages import Synchrony
    from common.core.settings import CoordinatorSettings, Rule

# Of its workers left: what made a fleet too slow for a mode may be over. How busy they are in the
# mode of a rule says nothing of the mode before, and it would be left and taken up without end.
FEWER = 0.75


class _Times(NamedTuple):
    """Sums over all workers, in seconds."""

    computed: float
    there: float  # alive, while a round was in flight


class Switch:
    """A leader's choice.

    Args:
        synchrony: Of the last update that this leader goes on from; None: the job's own.
    """

    def __init__(self, settings: CoordinatorSettings, synchrony: Synchrony | None = None) -> None:
        self._rule: Rule | None = None
        self._kept = 0  # rounds begun since it was chosen
        self._live = 0  # workers when it was
        self._computed_s = self._there_s = 0.0  # as of `_Times`, until now
        self._rounds = settings.rule_rounds
        self._begun = deque[_Times](maxlen=self._rounds)  # at the beginning of the last ones
        self._as_of: float | None = None
        if synchrony is not None and not settings.mode.makes(synchrony):
            self._rule = next((r for r in settings.rules if r.mode.makes(synchrony)), None)
            self._kept = int(self._rule is not None)

    @property
    def busy(self) -> float:
        """Share of their time that workers computed in the last rounds; 1 while that is not known.

        Their time counts while a round is in flight: that there is nothing to learn from is no
        fault of the mode.
        """
        if len(self._begun) < self._rounds:
            return 1.0
        first = self._begun[0]
        there_s = self._there_s - first.there
        return (self._computed_s - first.computed) / there_s if there_s else 1.0

    def computed(self, seconds: float) -> None:
        """A gradient counted that took so long."""
        self._computed_s += seconds

    def pass_time(self, now: float, workers: int) -> None:
        """Until now so many workers were there, with a round in flight."""
        if self._as_of is not None:
            self._there_s += workers * (now - self._as_of)
        self._as_of = now

    def choose(self, settings: CoordinatorSettings, live: int) -> Rule | None:
        """The rule that a round goes by which begins now; None: the job's own mode."""
        if not settings.rules:
            return None
        rule = self._rule
        if self._kept and (rule is None or rule in settings.rules):
            busy_once = rule is not None and rule.busy_below is not None
            if self._kept < self._rounds or (busy_once and live > FEWER * self._live):
                return rule
        return next((each for each in settings.rules if each.holds(live, self.busy)), None)

    def begin(self, rule: Rule | None, live: int) -> None:
        """A round begins that goes by this rule."""
        if rule != self._rule or not self._kept:
            self._rule, self._kept, self._live = rule, 0, 0
            self._begun.clear()
        self._kept += 1
        self._live = self._live or live
        self._begun.append(_Times(self._computed_s, self._there_s))
