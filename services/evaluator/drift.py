"""Detection of a lasting rise of a stream's errors: ADWIN (Bifet and Gavalda, 2007), by river.

ADWIN keeps a window of errors as long as nothing changes. It drops the older part as soon as the
means of the two parts differ by more than chance explains, in either direction:

    errors    high, then low: it learns            low, then high: drift
    ADWIN     drops the high ones                  drops the low ones
    reported  nothing                              a rise
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# Probability that a window without a change is cut; river's default. The bound is loose: in 200
# streams of 20,000 records with error rates from 0.02 to 0.5, nothing was reported. After 4,000
# records, a rise from 0.05 to 0.3 is reported within 150 more (20 of 20 times), one from 0.05 to
# 0.1 after 575 in the median and 2,000 at most, one from 0.3 to 0.35 within 5,000 in 15 of 20.
DELTA = 0.002


class Rise(NamedTuple):
    """Rise of a stream's errors."""

    # Mean error of the dropped part of the window.
    before: float
    # Mean error of the rest.
    after: float


class ErrorWatch:
    """Errors of one stream. The memory grows with the logarithm of their number."""

    def __init__(self) -> None:
        # river imports scipy, which takes seconds, so it waits until a stream must be watched.
        from river.drift import ADWIN  # noqa: PLC0415 -- see above

        self._window = ADWIN(delta=DELTA)  # type: ignore[no-untyped-call]  # river has no types

    def feed(self, errors: Iterable[float]) -> Rise | None:
        """Add the errors of some records in their order, each from 0 to 1.

        Returns:
            The rise, if one was detected. ADWIN drops the older part in steps as the evidence
            grows.
        """
        rise: Rise | None = None
        for error in errors:
            forgotten = self._forgotten(error)
            if forgotten is not None and forgotten < self._window.estimation:
                rise = rise or Rise(forgotten, self._window.estimation)
        if rise is None:
            return None
        # At the cut, the window still held some older errors; by now it holds fewer.
        return rise._replace(after=max(rise.after, self._window.estimation))

    def _forgotten(self, error: float) -> float | None:
        """Add one error; return the mean of the dropped part if ADWIN dropped one."""
        window = self._window
        total, width = window.total + error, window.width + 1
        window.update(error)  # type: ignore[no-untyped-call]  # river has no types
        count = width - window.width
        return (total - window.total) / count if window.drift_detected and count > 0 else None


def errors_of(columns: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the error of each record, from 0 to 1.

    If the task has the metric accuracy, the error is 1 - accuracy; a record whose accuracy is NaN
    has no error. Otherwise it is 1 - exp(-loss). It rises with the loss; for a cross-entropy, it is
    the probability that the model gave to all wrong answers.

    Args:
        columns: Values per record: `loss`, and the task's metrics.
    """
    if "accuracy" in columns:
        return [_bounded(1.0 - value) for value in columns["accuracy"] if not math.isnan(value)]
    return [_bounded(1.0 - math.exp(-value) if value > 0 else value) for value in columns["loss"]]


def _bounded(error: float) -> float:
    return 1.0 if math.isnan(error) else min(1.0, max(0.0, error))
