"""The age of a stream's oldest unread record, from the times when the stream had a machine.

Without a machine, the lag grows with time. A machine reduces it as far as it is faster than
arrivals; if it is lost before the lag is gone, the rest remains.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]


class StreamLags:
    """Lags of a job's streams.

    Args:
        streams: N.
        begun_s: Time at which all lags are 0.
    """

    def __init__(self, streams: int, begun_s: float) -> None:
        self._lag_s = np.zeros(streams)
        self._served = np.ones(streams, np.bool_)
        self._at_s = begun_s

    def at(self, now_s: float, since_s: Array, loads: Array) -> Array:
        """Return (N,) lags of the streams, in seconds.

        Args:
            now_s: Not earlier than in the last call.
            since_s: (N,) times since which streams have had no machine; `now_s` for those that have
                one.
            loads: (N,) rate of arrivals over the rate at which the stream's machine processes
                records. From 1 on, a machine never reduces the lag.
        """
        served = since_s >= now_s
        lost_s = np.clip(since_s, self._at_s, now_s)
        # A stream that got its machine since the last call counts as if it got it just now.
        worked_s = np.where(self._served, lost_s - self._at_s, 0.0)
        gains = np.maximum(1 / np.maximum(loads, 1e-9) - 1, 0.0)
        grown_s = now_s - self._at_s - worked_s
        self._lag_s = np.maximum(self._lag_s - worked_s * gains, 0.0) + grown_s
        self._served, self._at_s = served, now_s
        return self._lag_s.copy()
