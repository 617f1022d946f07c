"""How old the oldest unread record of a stream is, from when its stream had a machine.

While it has none the lag grows with the time. A machine works it off faster than records arrive;
one that is lost again before that is done leaves the rest of it.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]


class StreamLags:
    """Follows the streams of a job.

    Args:
        streams: N.
        begun_s: When records began to wait.
    """

    def __init__(self, streams: int, begun_s: float) -> None:
        self._lag_s = np.zeros(streams)
        self._served = np.ones(streams, np.bool_)
        self._at_s = begun_s

    def at(self, now_s: float, since_s: Array, loads: Array) -> Array:
        """Give (N,) the lag of each stream, in seconds.

        Args:
            now_s: Not before that of the last call.
            since_s: (N,) since when each has had no machine; now: it has one.
            loads: (N,) arrivals over what its machine works off; from 1 on it never catches up.
        """
        served = since_s >= now_s
        lost_s = np.clip(since_s, self._at_s, now_s)
        # One that got its machine since the last call did so just now: nothing was worked off.
        worked_s = np.where(self._served, lost_s - self._at_s, 0.0)
        gains = np.maximum(1 / np.maximum(loads, 1e-9) - 1, 0.0)
        grown_s = now_s - self._at_s - worked_s
        self._lag_s = np.maximum(self._lag_s - worked_s * gains, 0.0) + grown_s
        self._served, self._at_s = served, now_s
        return self._lag_s.copy()
