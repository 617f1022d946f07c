"""References for the pipeline's speed. Each runs on request and otherwise stands still."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from common.core.spans import Assigned
from common.kafka.port import Bounds, Fetched, StreamLog, StreamReader
from load.harness.processor import Block, Processor
from load.harness.stack import NotMeasuredError

if TYPE_CHECKING:
    from common.core.spans import Partition
    from common.data.codecs import Codec

BASELINE = Path(__file__).with_name("baseline.py")
_POLL_RECORDS = 2000  # like the workers
_POLL_S = 0.05  # like the workers
_JOIN_S = 30.0


class Reference(Protocol):
    """A reference for the pipeline's speed."""

    name: str

    def run(self, seconds: float) -> Block:
        """Run for this time."""


class PlainLoops:
    """Single-threaded processes that train side by side on records in memory.

    Args:
        script: Program that calls `load.throughput.baseline.serve`.
        words: Its arguments.
        processes: Number of processes.
    """

    def __init__(self, script: Path, words: Sequence[str], processes: int) -> None:
        self.name = f"{processes} plain PyTorch loops"
        self._processes = [
            subprocess.Popen(  # noqa: S603 -- our own command line, no shell
                [sys.executable, str(script), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for _ in range(processes)
        ]
        self._pids = {f"loop-{n}": process.pid for n, process in enumerate(self._processes)}
        # Returns once all have loaded their libraries and records.
        self.run(0.1)

    def run(self, seconds: float) -> Block:
        """Train in all processes at once."""
        processor = Processor(self._pids)
        for process in self._processes:
            assert process.stdin is not None  # noqa: S101 -- opened above
            process.stdin.write(f"{seconds}\n")
        records_per_s = sum(map(_answer, self._processes))
        return Block(records_per_s, processor.cores())

    def close(self) -> None:
        """Stop the processes."""
        for process in self._processes:
            process.communicate()


class SingleConsumer:
    """One consumer that reads and decodes all partitions from the start, and does nothing else.

    Args:
        log: Kafka.
        topics: Topics to read.
        codec: Decodes the records.
        follow: Optional. Called with the positions of partitions as they are read, if producers
            write meanwhile. If unset, the topics are complete.
    """

    name = "one consumer that reads and decodes"

    def __init__(
        self,
        log: StreamLog,
        topics: Sequence[str],
        codec: Codec,
        follow: Callable[[Mapping[Partition, int]], object] | None = None,
    ) -> None:
        self._log = log
        self._topics = tuple(topics)
        self._codec = codec
        self._follow = follow

    def run(self, seconds: float) -> Block:
        """Join a new group, read until the time or the topics are over, and leave.

        The clock runs from the first records, which are not counted, to the last.
        """
        places = [place for topic in self._topics for place in self._log.partitions(topic)]
        bounds = {place: self._log.bounds(place) for place in places}
        ends = sum(bound.end - bound.start for bound in bounds.values())
        left = inf if self._follow else ends
        reader = self._log.stream("load-reader", self._topics, "reader")
        try:
            left -= self._read(reader, bounds, time.perf_counter() + _JOIN_S)
            processor, started = Processor({"reader": os.getpid()}), time.perf_counter()
            records, ended = 0, started
            while left > records and ended < started + seconds:
                records += self._read(reader, bounds, ended + _JOIN_S)
                ended = time.perf_counter()
            return Block(records / (ended - started), processor.cores())
        finally:
            reader.close()

    def _read(self, reader: StreamReader, bounds: Mapping[Partition, Bounds], until: float) -> int:
        """Wait for records and decode them. Returns their number."""
        found = 0
        while not found:
            for event in reader.poll(_POLL_RECORDS, _POLL_S):
                if isinstance(event, Assigned):
                    reader.place({place: bounds[place].start for place in event.partitions})
                elif isinstance(event, Fetched):
                    self._codec.decode(event.values)
                    found += len(event.values)
                    if self._follow is not None:
                        self._follow({event.partition: event.offsets[-1] + 1})
            if not found and time.perf_counter() > until:
                raise NotMeasuredError(
                    f"a reader of {self._topics} received nothing for {_JOIN_S:g} s"
                )
        return found


def _answer(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None  # noqa: S101 -- opened with it
    words = process.stdout.readline().split()
    if len(words) != 2:
        raise NotMeasuredError("a baseline process has ended")
    return int(words[0]) / float(words[1])
