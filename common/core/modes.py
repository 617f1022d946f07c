"""How the next round is made: by the owner's first rule that holds, else by the job's own mode.

A round keeps the mode that it began with, so nothing is drained for a switch; `rounds.fits` says
when the next round may begin.

While no rule holds, a tuner may choose K by how noisy gradients are. It reads the gradient noise
scale off the messages of each round. The mean gradient of n records is the true one, G, and noise:
its squared norm is G² + S / n on average. Messages of one round are such means at the same weights,
and so is their sum, so that both numbers can be told apart (McCandlish et al., "An Empirical Model
of Large-Batch Training", 2018, appendix A.1). The noise scale S / G² is of how many records the
noise is as large as the gradient. An update of many more is hardly a better step; one of fewer goes
astray.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import ceil, inf, isfinite
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from common.core.messages import Synchrony
    from common.core.settings import CoordinatorSettings, Mode, Rule

# Of its workers left: what made a fleet too slow for a mode may be over. How busy they are in the
# mode of a rule says nothing of the mode before, and it would be left and taken up without end.
FEWER = 0.75
# Of K, below which it shrinks, or over which it grows by as much: estimates of 20 rounds of a few
# messages each are seldom better than that, and each move changes the size of a step.
SHRINK = 0.75
MOST_STEP = 2  # by which K is multiplied or divided at a move: one wrong estimate costs little


def rate_scale(group_size: int, own: int, noise_scale: float | None) -> float:
    """Of the learning rate, which belongs to the job's own K, for a mean of another K.

    The best rate by n records is proportional to 1 / (1 + noise scale / n) (McCandlish et al.,
    section 2.2): to K where noise is all there is, and the same for every K where there is none.

    Args:
        group_size: K.
        own: Of the job.
        noise_scale: In batches; None: unknown, and taken for all there is.
    """
    if noise_scale is None or noise_scale == inf:
        return group_size / own
    return (1 + noise_scale / own) / (1 + noise_scale / group_size)


class Scatter(NamedTuple):
    """What the gradient messages of a round say of noise."""

    messages: int
    batches: int
    samples: int
    squares: float  # sum over messages of |gradient summed over n samples|^2 / n


class GroupSizeTuner:
    """Says which K is in force.

    Attributes:
        group_size: K.

    Args:
        group_size: K, to begin with, if it is within the bounds.
        least: Below which it never is.
        most: Above which it never is.
        rounds: That the estimate goes back, and so those before a first move, and from one to the
            next: then most of what it knows is of the K in force.
    """

    def __init__(self, group_size: int, least: int, most: int, rounds: int) -> None:
        self.group_size = min(max(group_size, least), most)
        self._bounds = least, most
        self._rounds = rounds
        self._noise = self._signal = 0.0  # S and G^2, smoothed each by itself: a ratio is biased
        self._batch_samples = 0.0  # mean, likewise
        self._measured = self._moved = 0  # rounds, and how many at the last move

    @property
    def noise_scale(self) -> float | None:
        """S / G², in batches; None while too little was seen."""
        if self._measured < self._rounds:
            return None
        if self._signal <= 0:
            return inf
        return max(self._noise, 0.0) / self._signal / self._batch_samples

    def observe(self, scatter: Scatter, square: float) -> None:
        """Take in an applied round; one of a single message says nothing.

        Args:
            scatter: Of its messages.
            square: |gradient summed over all its samples|^2
        """
        samples = scatter.samples
        if scatter.messages < 2 or not isfinite(scatter.squares + square):
            return
        # How far messages are from each other, as in an analysis of variance: of sizes that differ.
        noise = (scatter.squares - square / samples) / (scatter.messages - 1)
        self._measured += 1
        weight = 1 / min(self._measured, self._rounds)
        self._noise += weight * (noise - self._noise)
        self._signal += weight * (square / samples**2 - noise / samples - self._signal)
        self._batch_samples += weight * (samples / scatter.batches - self._batch_samples)
        if self._measured - self._moved >= self._rounds:
            self._move()

    def _move(self) -> None:
        noise, now = self.noise_scale or 0.0, self.group_size
        least, most = self._bounds
        wanted = max(ceil(min(noise, most)), least)
        if SHRINK * now < wanted < now / SHRINK:
            return
        self._moved = self._measured
        self.group_size = min(max(wanted, ceil(now / MOST_STEP)), MOST_STEP * now)


class _Times(NamedTuple):
    """Sums over all workers, in seconds."""

    computed: float
    there: float  # alive, while a round was in flight


class ModeSelector:
    """A leader's choice of the mode for the next round.

    Attributes:
        last: Synchrony of the newest update; None if that was made by the job's own K with s = 0.

    Args:
        synchrony: Synchrony of the last update that this leader goes on from, as `last`.
    """

    def __init__(self, settings: CoordinatorSettings, synchrony: Synchrony | None = None) -> None:
        self._settings = settings
        self.last = synchrony
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
        self._tuner = _tuner(settings, synchrony)
        self._scatters = dict[int, Scatter]()  # of updates, until their sum is known

    def change(self, settings: CoordinatorSettings) -> None:
        """Use changed settings from the next round on."""
        if _tuned(settings) != _tuned(self._settings):
            self._tuner = _tuner(settings)
        self._settings = settings

    def mode(self, live: int) -> Mode:
        """Return the mode of a round that would begin now, while so many workers are alive."""
        rule, own, tuner = self._choose(live), self._settings.mode, self._tuner
        if rule is not None:
            return rule.mode
        if tuner is None or tuner.group_size == own.group_size:
            return own
        return replace(own, group_size=tuner.group_size, learning_rate=None)

    def _choose(self, live: int) -> Rule | None:
        settings, rule = self._settings, self._rule
        if not settings.rules:
            return None
        if self._kept and (rule is None or rule in settings.rules):
            busy_once = rule is not None and rule.busy_below is not None
            if self._kept < self._rounds or (busy_once and live > FEWER * self._live):
                return rule
        return next((each for each in settings.rules if each.holds(live, self.busy)), None)

    def begin(self, live: int) -> None:
        """A round begins."""
        rule = self._choose(live)
        if rule != self._rule or not self._kept:
            self._rule, self._kept, self._live = rule, 0, 0
            self._begun.clear()
        self._kept += 1
        self._live = self._live or live
        self._begun.append(_Times(self._computed_s, self._there_s))

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

    @property
    def noise_scale(self) -> float | None:
        """The tuner's estimate, in batches; None if there is no tuner, or it knows too little."""
        return None if self._tuner is None else self._tuner.noise_scale

    def measures(self, live: int) -> bool:
        """Return True if the sum of an update is to be measured for the tuner."""
        return self._tuner is not None and self._choose(live) is None

    def expect(self, version: int, scatter: Scatter) -> None:
        """Keep what the messages of an update say, until the size of its sum is known."""
        self._scatters[version] = scatter

    def observe(self, version: int, square: float) -> bool:
        """Take in the squared norm of an update's sum; False if the tuner learns nothing of it."""
        scatter = self._scatters.pop(version, None)
        if scatter is None or self._tuner is None:
            return False
        self._tuner.observe(scatter, square)
        return True


def _tuned(settings: CoordinatorSettings) -> tuple[object, ...]:
    """Return the settings that a tuner is made of."""
    return settings.group_sizes, settings.mode.group_size


def _tuner(
    settings: CoordinatorSettings, synchrony: Synchrony | None = None
) -> GroupSizeTuner | None:
    """Tune K if the job's owner wants that, from the last update's K on if no rule made it."""
    if settings.group_sizes is None:
        return None
    mode = settings.mode
    if synchrony is not None:
        last = replace(mode, group_size=synchrony.group_size)
        mode = last if last.makes(synchrony) else mode
    return GroupSizeTuner(mode.group_size, *settings.group_sizes, settings.rule_rounds)
