"""When updates came, and how long each fault kept the next one away."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

from common.core.history import History
from common.core.messages import Lead, UpdateApplied
from common.core.spans import Partition
from common.errors import TruncatedError, UnavailableError
from common.topics.names import updates_topic
from common.wire import messages as wire
from load.harness.stack import NotMeasuredError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.ports.servers import Log

_READ_RECORDS = 1000
_READ_S = 0.1


def next_after(times: Sequence[float], at: float) -> float | None:
    """The first of some ascending times after `at`."""
    index = bisect_right(times, at)
    return times[index] if index < len(times) else None


def longest_pause_s(
    times: Sequence[float], begin: float = -math.inf, end: float = math.inf
) -> float:
    """The longest time between two that follow each other, of which any part is in an interval."""
    pauses = (
        later - earlier for earlier, later in pairwise(times) if later > begin and earlier < end
    )
    return max(pauses, default=0.0)


class UpdatesWatch(threading.Thread):
    """Follows a job's updates topic and notes when an update came that counted at that moment.

    A broker that is away is waited for, so its absence is part of the pauses. A topic that lost
    records is read from its beginning again, and what was noted is not noted twice.
    """

    def __init__(self, log: Log, job: str) -> None:
        super().__init__(name="updates", daemon=True)
        self.times = list[float]()  # monotonic, ascending
        self.leads = 0
        self._fault: BaseException | None = None
        self._log = log
        self._place = Partition(updates_topic(job), 0)
        self._tail = log.tail(self._place, 0)
        self._stopped = threading.Event()

    def run(self) -> None:
        """Read until stopped."""
        history, noted = History(), 0  # up to which offset
        try:
            while not self._stopped.is_set():
                try:
                    records = self._tail.read(_READ_RECORDS, _READ_S)
                except UnavailableError:
                    continue
                except TruncatedError as lost:
                    self._tail.close()
                    self._tail = self._log.tail(self._place, 0)
                    history, noted = History(), min(noted, lost.divergent_offset or 0)
                    continue
                now = time.monotonic()
                for record in records:
                    said = wire.decode_audit(record.value or b"")
                    counts = history.feed(record.offset, said) and record.offset >= noted
                    if counts and isinstance(said, UpdateApplied):
                        self.times.append(now)
                    self.leads += counts and isinstance(said, Lead)
                    noted = max(noted, record.offset + 1)
        except BaseException as fault:  # noqa: BLE001 -- raised again by `check`, in the main thread
            self._fault = fault
        finally:
            self._tail.close()

    def check(self) -> None:
        """Make sure that it still reads.

        Raises:
            NotMeasuredError: If it failed.
        """
        if self._fault is not None:
            raise NotMeasuredError(f"the updates cannot be read: {self._fault}") from self._fault

    def stop(self) -> None:
        """End it."""
        self._stopped.set()
        self.join()
