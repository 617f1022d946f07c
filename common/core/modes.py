"""Mode of the next round: the owner's first rule that applies, or else the job's own mode.

A round keeps its mode to the end, so a switch waits for nothing. `rounds.fits` decides when the
next round may begin.

If no rule applies, a tuner may choose K by the noise of the gradients. It estimates the gradient
noise scale from the messages of each round. The mean gradient of n records is the true one, G, plus
noise: its squared norm is G² + S / n on average. The messages of a round are such means at the same
weights, and so is their sum, so both numbers can be estimated (McCandlish et al., "An Empirical
Model of Large-Batch Training", 2018, appendix A.1). At S / G² records, the noise scale, the noise
is as large as the gradient. An update of many more records is hardly a better step. An update of
far fewer mostly follows the noise.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import ceil, inf, isfinite
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from common.core.messages import Synchrony
    from common.core.settings import CoordinatorSettings, Mode, Rule

# Share of the workers below which a rule by `busy_below` is given up, because the reason for it may
# be gone. How busy workers are under the rule says nothing about the mode before, so a rule that
# ended by that measure would be dropped and chosen again without end.
FEWER = 0.75
# Factor by which the wanted K must differ from K before it moves. Estimates of 20 rounds with few
# messages are rarely more precise, and each move changes the step size.
SHRINK = 0.75
# Maximum factor of a move. A wrong estimate then costs little.
MOST_STEP = 2


def rate_scale(group_size: int, own: int, noise_scale: float | None) -> float:
    """Return the factor that adapts the learning rate of the job's own K to another K.

    The best rate for n records is proportional to 1 / (1 + noise scale / n) (McCandlish et al.,
    section 2.2): proportional to K if there is only noise, and independent of K without noise.

    Args:
        group_size: K.
        own: K of the job.
        noise_scale: Noise scale in batches. None if unknown, which counts as only noise.
    """
    if noise_scale is None or noise_scale == inf:
        return group_size / own
    return (1 + noise_scale / own) / (1 + noise_scale / group_size)


class Scatter(NamedTuple):
    """Statistics of a round's gradient messages, used to estimate the noise."""

    messages: int
    batches: int
    samples: int
    squares: float  # sum over messages of |gradient summed over n samples|^2 / n


class GroupSizeTuner:
    """Tuner of K.

    Attributes:
        group_size: K.

    Args:
        group_size: Initial K, clipped to the bounds.
        least: Lower bound.
        most: Upper bound.
        rounds: Memory of the estimate, and minimum number of rounds between moves, so that most of
            the estimate is from the current K.
    """

    def __init__(self, group_size: int, least: int, most: int, rounds: int) -> None:
        self.group_size = min(max(group_size, least), most)
        self._bounds = least, most
        self._rounds = rounds
        # S and G², smoothed separately, because a smoothed ratio would be biased.
        self._noise = self._signal = 0.0
        # Smoothed mean number of samples in a batch.
        self._batch_samples = 0.0
        # Number of rounds so far, and at the last move.
        self._measured = self._moved = 0

    @property
    def noise_scale(self) -> float | None:
        """S / G² in batches, or None until enough rounds were observed."""
        if self._measured < self._rounds:
            return None
        if self._signal <= 0:
            return inf
        return max(self._noise, 0.0) / self._signal / self._batch_samples

    def observe(self, scatter: Scatter, square: float) -> None:
        """Add an applied round. A round with a single message is ignored.

        Args:
            scatter: Statistics of its messages.
            square: |gradient summed over all its samples|^2
        """
        samples = scatter.samples
        if scatter.messages < 2 or not isfinite(scatter.squares + square):
            return
        # Distance between messages of different sizes, as in an analysis of variance.
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
    # Time alive while a round was in flight.
    there: float


class ModeSelector:
    """A leader's choice of the mode for the next round.

    Attributes:
        last: Synchrony of the newest update. None for the job's own K with s = 0.

    Args:
        synchrony: `last` of the previous leader.
    """

    def __init__(self, settings: CoordinatorSettings, synchrony: Synchrony | None = None) -> None:
        self._settings = settings
        self.last = synchrony
        self._rule: Rule | None = None
        # Number of rounds begun under the current choice.
        self._kept = 0
        # Number of workers when the choice was made.
        self._live = 0
        # Totals so far, as in `_Times`.
        self._computed_s = self._there_s = 0.0
        self._rounds = settings.rule_rounds
        # Totals at the beginning of recent rounds.
        self._begun = deque[_Times](maxlen=self._rounds)
        self._as_of: float | None = None
        if synchrony is not None and not settings.mode.makes(synchrony):
            self._rule = next((r for r in settings.rules if r.mode.makes(synchrony)), None)
            self._kept = int(self._rule is not None)
        self._tuner = _tuner(settings, synchrony)
        # Statistics of updates whose sum is not known yet.
        self._scatters = dict[int, Scatter]()

    def change(self, settings: CoordinatorSettings) -> None:
        """Use changed settings from the next round on."""
        if _tuned(settings) != _tuned(self._settings):
            self._tuner = _tuner(settings)
        self._settings = settings

    def mode(self, live: int) -> Mode:
        """Return the mode of a round that would begin now with `live` workers."""
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
        """Record that a round begins."""
        rule = self._choose(live)
        if rule != self._rule or not self._kept:
            self._rule, self._kept, self._live = rule, 0, 0
            self._begun.clear()
        self._kept += 1
        self._live = self._live or live
        self._begun.append(_Times(self._computed_s, self._there_s))

    @property
    def busy(self) -> float:
        """Share of time that workers spent computing in the last rounds. 1 until known.

        Only time with a round in flight counts: a lack of records is not the mode's fault.
        """
        if len(self._begun) < self._rounds:
            return 1.0
        first = self._begun[0]
        there_s = self._there_s - first.there
        return (self._computed_s - first.computed) / there_s if there_s else 1.0

    def computed(self, seconds: float) -> None:
        """Add the compute time of a counted gradient."""
        self._computed_s += seconds

    def pass_time(self, now: float, workers: int) -> None:
        """Add the time since the last call, with `workers` alive and a round in flight."""
        if self._as_of is not None:
            self._there_s += workers * (now - self._as_of)
        self._as_of = now

    @property
    def noise_scale(self) -> float | None:
        """The tuner's estimate in batches. None without a tuner or without enough rounds."""
        return None if self._tuner is None else self._tuner.noise_scale

    def measures(self, live: int) -> bool:
        """Return True if the tuner needs the squared norm of an update's sum."""
        return self._tuner is not None and self._choose(live) is None

    def expect(self, version: int, scatter: Scatter) -> None:
        """Keep the statistics of an update until the squared norm of its sum is known."""
        self._scatters[version] = scatter

    def observe(self, version: int, square: float) -> bool:
        """Process the squared norm of an update's sum. Return False if the tuner ignores it."""
        scatter = self._scatters.pop(version, None)
        if scatter is None or self._tuner is None:
            return False
        self._tuner.observe(scatter, square)
        return True


def _tuned(settings: CoordinatorSettings) -> tuple[object, ...]:
    """Return the settings that define the tuner."""
    return settings.group_sizes, settings.mode.group_size


def _tuner(
    settings: CoordinatorSettings, synchrony: Synchrony | None = None
) -> GroupSizeTuner | None:
    """Return a tuner if the settings request one.

    It starts from the K of the last update, unless a rule chose that K.
    """
    if settings.group_sizes is None:
        return None
    mode = settings.mode
    if synchrony is not None:
        last = replace(mode, group_size=synchrony.group_size)
        mode = last if last.makes(synchrony) else mode
    return GroupSizeTuner(mode.group_size, *settings.group_sizes, settings.rule_rounds)
