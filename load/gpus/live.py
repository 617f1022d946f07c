"""Producers that write while a job reads, and a view of the job from outside.

The embedded broker keeps less than 5 MB of a partition. So producers stay a bounded distance ahead
of the positions that are read, and both topics of a job are read as they grow.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from contextlib import closing
from multiprocessing import get_context, parent_process
from operator import itemgetter
from typing import TYPE_CHECKING

from common.core.messages import BatchReady, UpdateApplied
from common.core.spans import Partition
from common.kafka.names import control_topic, updates_topic
from common.kafka.opening import open_log
from common.wire import messages as wire
from load.harness.stack import NotMeasuredError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from ctypes import Array, c_longlong

    from common.config.settings import Settings
    from common.core.messages import AuditRecord, ControlRecord
    from common.jobs.store import JobRecord
    from common.kafka.port import Log

# Bytes of records ahead of the position that is read. Rounding up to whole updates adds to it.
_AHEAD_BYTES = 2 << 20
# Updates ahead, so that a slow job drains soon.
_AHEAD_UPDATES = 2
# Records of a partition that a producer writes before it turns to the next one.
_RUN = 256
_IDLE_S = 0.001
_READ_RECORDS = 1000
_READ_S = 0.005


class LiveProducers:
    """Processes that write records to empty partitions, a bounded distance ahead of their reader.

    They write nothing before `resume`.

    Args:
        settings: Settings of the servers.
        places: The partitions.
        values: Records, which are repeated in turn.
        unit: Number of records of an update. When producers hold, they have written whole updates.
        processes: Number of processes.
    """

    def __init__(
        self,
        settings: Settings,
        places: Sequence[Partition],
        values: Sequence[bytes],
        unit: int,
        processes: int,
    ) -> None:
        self._index = {place: index for index, place in enumerate(places)}
        self._unit = unit
        by_bytes, by_updates = _AHEAD_BYTES // len(values[0]), _AHEAD_UPDATES * unit // len(places)
        self._ahead = max(min(by_bytes, by_updates), 1)
        self._lock = threading.Lock()  # guards the positions and whether producers hold
        self._positions = [0] * len(places)
        self._holds = True
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._limits, self._ends = (context.Array("q", len(places), lock=False) for _ in range(2))
        self._processes = [
            context.Process(
                target=_produce,
                args=(settings, places, values, self._limits, self._ends, number, processes),
                daemon=True,
            )
            for number in range(processes)
        ]
        for process in self._processes:
            process.start()

    def follow(self, positions: Mapping[Partition, int]) -> None:
        """Note positions of the reader. Safe to call from any thread."""
        with self._lock:
            for place, position in positions.items():
                self._positions[self._index[place]] = position
            self._permit()

    def resume(self) -> None:
        """Write until `hold`."""
        with self._lock:
            self._holds = False
            self._permit()

    def hold(self) -> int:
        """Complete the last update, and then write nothing. Returns the records of all updates."""
        with self._lock:
            self._holds = True
            count = len(self._limits)
            missing = -sum(self._limits) % self._unit
            for index in range(count):
                self._limits[index] += missing // count + (index < missing % count)
            return int(sum(self._limits))

    def waiting(self) -> int:
        """Return how many records are written and unread.

        Raises:
            NotMeasuredError: If a process has ended.
        """
        if any(process.exitcode is not None for process in self._processes):
            raise NotMeasuredError("a producer has ended")
        with self._lock:
            return int(sum(self._ends)) - sum(self._positions)

    def close(self) -> None:
        """Stop the processes."""
        for process in self._processes:
            process.terminate()
            process.join()

    def _permit(self) -> None:
        if not self._holds:
            for index, position in enumerate(self._positions):
                self._limits[index] = max(self._limits[index], position + self._ahead)


def _produce(
    settings: Settings,
    places: Sequence[Partition],
    values: Sequence[bytes],
    limits: Array[c_longlong],
    ends: Array[c_longlong],
    number: int,
    processes: int,
) -> None:
    """Write to every `processes`-th partition up to its limit, until the parent ends."""
    parent = parent_process()
    log = open_log(settings, "producer")
    with closing(log), closing(log.writer()) as writer:
        while parent is not None and parent.is_alive():
            written = 0
            for index in range(number, len(places), processes):
                start = ends[index]
                end = min(limits[index], start + _RUN)
                topic, partition = places[index]
                for at in range(start, end):
                    writer.append(topic, values[at % len(values)], partition=partition)
                ends[index] = end
                written += end - start
            writer.poll()
            if not written:
                time.sleep(_IDLE_S)


class JobFollower(threading.Thread):
    """Reads a job's topics as they grow, and passes the claimed positions to its producers.

    Attributes:
        control: Records of the control topic by offset, None for records that do not parse.
        updates: The same of the updates topic.
        applied: Time (monotonic) and number of records of all updates so far, for each update.
    """

    def __init__(self, log: Log, job: JobRecord, producers: LiveProducers) -> None:
        super().__init__(name=f"follower of {job.id}", daemon=True)
        self.control = list[tuple[int, "ControlRecord | None"]]()
        self.updates = list[tuple[int, "AuditRecord | None"]]()
        self.applied = [(time.monotonic(), 0)]
        self._producers = producers
        self._claims = log.tail(Partition(control_topic(job.id), 0), 0)
        self._audit = log.tail(Partition(updates_topic(job.id), 0), 0)
        self._stopped = threading.Event()
        self._fault: BaseException | None = None

    def run(self) -> None:
        """Read until stopped."""
        try:
            while not self._stopped.is_set():
                for record in self._claims.read(_READ_RECORDS, _READ_S):
                    claim = wire.decode_claim(record.value or b"")
                    self.control.append((record.offset, claim))
                    if isinstance(claim, BatchReady):
                        self._producers.follow({span.place: span.end for span in claim.address})
                for record in self._audit.read(_READ_RECORDS, _READ_S):
                    audit = wire.decode_audit(record.value or b"")
                    self.updates.append((record.offset, audit))
                    if isinstance(audit, UpdateApplied):
                        samples = self.applied[-1][1] + audit.samples
                        self.applied.append((time.monotonic(), samples))
        except BaseException as fault:  # noqa: BLE001 -- raised again by `samples`, in the main thread
            self._fault = fault
        finally:
            self._claims.close()
            self._audit.close()

    def samples(self) -> int:
        """Return the number of records of all updates so far.

        Raises:
            NotMeasuredError: If the topics cannot be read.
        """
        if self._fault is not None:
            raise NotMeasuredError(f"the job cannot be followed: {self._fault}") from self._fault
        return self.applied[-1][1]

    def rate(self, since: float) -> float:
        """Return records/s from the last update before a time (monotonic) to the last of all.

        Raises:
            NotMeasuredError: If there is no update since that time.
        """
        count = bisect_left(self.applied, since, key=itemgetter(0))
        began, before = self.applied[count - 1]
        ended, after = self.applied[-1]
        if count == len(self.applied):
            raise NotMeasuredError(
                f"{self.name}: no update within {time.monotonic() - since:.1f} s"
            )
        return (after - before) / (ended - began)

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self.join()
