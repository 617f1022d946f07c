"""Producers of numbered records. Each id is written once, by the thread that takes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from common.data.codecs import codec_of
from common.errors import UnavailableError
from load.harness.stack import NotMeasuredError

if TYPE_CHECKING:
    from common.core.spans import Partition
    from common.jobs.store import JobRecord
    from common.kafka.port import Log, Writer

# Interval between a producer's writes.
_TICK_S = 0.05
# Time that Kafka may be unavailable.
_FLUSH_S = 60.0


class Producers:
    """Threads that write ids as they become due, until stopped, each with its own writer.

    Args:
        job: Job whose records are written. Producers stop at its last id.
        due: Returns the number of records that all producers must have written, given the seconds
            since they began. Called in their threads.
    """

    def __init__(
        self, job: JobRecord, log: Log, threads: int, due: Callable[[float], float]
    ) -> None:
        self.produced = 0
        self._capacity = int(job.spec.task_options["records"])
        self._codec = codec_of(job.spec.records)
        self._due = due
        self._began_s = time.monotonic()
        self._lock = threading.Lock()  # guards `produced`
        self._stopped = threading.Event()
        self._faults = list[BaseException]()
        self._threads = [
            self._started(log, tuple(job.first), f"producer-{number}") for number in range(threads)
        ]

    def write_to(self, log: Log, place: Partition) -> None:
        """Start one more thread that writes to an added partition.

        Args:
            log: Kafka, with a client that has not cached the partitions yet.
            place: The partition.
        """
        self._threads.append(self._started(log, (place,), f"producer-of-{place}"))

    def take(self, count: int) -> list[bytes]:
        """Take records of the next ids. The caller must write each once."""
        with self._lock:
            first = self.produced
            self.produced = min(first + count, self._capacity)
            taken = np.arange(first, self.produced)
        return self._codec.encode({"id": taken})

    def again(self, count: int) -> list[bytes]:
        """Return records of the first ids again. No reader may see them."""
        return self._codec.encode({"id": np.arange(count)})

    def check(self) -> None:
        """Make sure that all threads still write.

        Raises:
            NotMeasuredError: If a thread failed.
        """
        for fault in self._faults:
            raise NotMeasuredError(f"a producer failed: {fault}") from fault

    def stop(self) -> None:
        """Stop writing, and wait until Kafka has acknowledged everything.

        Raises:
            NotMeasuredError: If Kafka does not acknowledge everything.
        """
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self.check()

    def _started(self, log: Log, places: Sequence[Partition], name: str) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(log, places), name=name, daemon=True)
        thread.start()
        return thread

    def _run(self, log: Log, places: Sequence[Partition]) -> None:
        try:
            with closing(log.writer()) as writer:
                while not self._stopped.wait(_TICK_S):
                    ids = self._next_ids()
                    for number, value in zip(
                        ids.tolist(), self._codec.encode({"id": ids}), strict=True
                    ):
                        _append(writer, places[number % len(places)], value)
                    writer.poll()
                if not writer.flush(_FLUSH_S):
                    late = UnavailableError(f"Kafka did not accept all records in {_FLUSH_S:g} s")
                    self._faults.append(late)
        except BaseException as fault:  # noqa: BLE001 -- raised again by `check`, in the main thread
            self._faults.append(fault)

    def _next_ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Take the ids that are due, of shape (n,)."""
        due = int(self._due(time.monotonic() - self._began_s))
        with self._lock:
            first, self.produced = self.produced, min(max(due, self.produced), self._capacity)
            return np.arange(first, self.produced)


def _append(writer: Writer, place: Partition, value: bytes) -> None:
    """Append a record. A topic's first record waits for Kafka while it is unavailable.

    Raises:
        UnavailableError: If Kafka is unavailable for too long.
    """
    until = time.monotonic() + _FLUSH_S
    while True:
        try:
            writer.append(place.topic, value, partition=place.index)
        except UnavailableError:
            if time.monotonic() > until:
                raise
            time.sleep(_TICK_S)
        else:
            return
