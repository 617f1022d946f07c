"""Producers of numbered records: each id is written once, by whichever thread takes it."""

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

_TICK_S = 0.05  # a producer writes so often
_FLUSH_S = 60.0  # that Kafka may be away


class Producers:
    """Threads that write the next ids as they are due until stopped, each with its own writer.

    Args:
        job: What they write for; they stop where its ids end.
        due: How many records all of them have to have written by now, given the seconds since they
            began; called in their threads.
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
        """Let one more thread write to a partition that was added.

        Args:
            log: Kafka, by a client that has not asked before which partitions there are.
            place: The partition.
        """
        self._threads.append(self._started(log, (place,), f"producer-of-{place}"))

    def take(self, count: int) -> list[bytes]:
        """Records of the next ids, for somebody who makes sure that each is written once."""
        with self._lock:
            first = self.produced
            self.produced = min(first + count, self._capacity)
            taken = np.arange(first, self.produced)
        return self._codec.encode({"id": taken})

    def again(self, count: int) -> list[bytes]:
        """Records of the first ids once more, which nobody must read."""
        return self._codec.encode({"id": np.arange(count)})

    def check(self) -> None:
        """Make sure that all still write.

        Raises:
            NotMeasuredError: If one failed.
        """
        for fault in self._faults:
            raise NotMeasuredError(f"a producer failed: {fault}") from fault

    def stop(self) -> None:
        """Write nothing more, and wait until Kafka has everything.

        Raises:
            NotMeasuredError: If it does not take it.
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
                    late = UnavailableError(f"Kafka did not take everything in {_FLUSH_S:g} s")
                    self._faults.append(late)
        except BaseException as fault:  # noqa: BLE001 -- raised again by `check`, in the main thread
            self._faults.append(fault)

    def _next_ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """(n,) the ids that are due by now and that nobody has taken."""
        due = int(self._due(time.monotonic() - self._began_s))
        with self._lock:
            first, self.produced = self.produced, min(max(due, self.produced), self._capacity)
            return np.arange(first, self.produced)


def _append(writer: Writer, place: Partition, value: bytes) -> None:
    """Append a record; a topic's first one is checked, which waits for Kafka where it is away.

    Raises:
        UnavailableError: If that is for too long.
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
