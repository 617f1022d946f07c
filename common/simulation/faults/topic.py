"""One of a job's own topics in the simulated Kafka: it may lose its last records, or all of them.

A log that lost its tail goes on under a new leader epoch, and gives the same offsets to other
records; a topic that is created anew has another id, and begins at 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from common.core.spans import LogPosition

R = TypeVar("R")


@dataclass
class SimulatedTopic(Generic[R]):
    """Its records, and what a reader can know of them."""

    name: str  # for people
    generation: int = 0  # how often it was created anew
    epoch: int = 0  # Kafka's leader epoch in force
    _records: list[tuple[R | None, int]] = field(default_factory=list)  # each with its epoch

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[R | None]:
        return (record for record, _ in self._records)

    @property
    def topic_id(self) -> str:
        """Kafka's id."""
        return f"{self.name}#{self.generation}"

    def append(self, record: R | None) -> int:
        """Append a record; returns its offset."""
        self._records.append((record, self.epoch))
        return len(self._records) - 1

    def position(self, offset: int) -> LogPosition:
        """What a reader knows that has read all below an offset."""
        epoch = self._records[offset - 1][1] if offset else -1
        return LogPosition(offset, self.topic_id, epoch)

    def agrees(self, position: LogPosition) -> bool:
        """Whether it still is what a position knows of it."""
        offset, topic_id, epoch = position
        if topic_id not in {"", self.topic_id} or offset > len(self):
            return False
        return epoch < 0 or offset == 0 or self._records[offset - 1][1] <= epoch

    def run(self, begin: int, end: int) -> tuple[tuple[tuple[int, R | None], ...], int]:
        """Records from one offset on, up to another, that have one leader epoch; and that one."""
        epoch = self._records[begin][1]
        found = list[tuple[int, R | None]]()
        for offset in range(begin, end):
            record, other = self._records[offset]
            if other != epoch:
                break
            found.append((offset, record))
        return tuple(found), epoch

    def elect(self) -> None:
        """Another broker leads it from now on, and knows all that the one before did."""
        self.epoch += 1

    def cut(self, end: int) -> None:
        """Lose the records from an offset on."""
        del self._records[end:]
        self.epoch += 1

    def create_anew(self) -> None:
        """Be deleted with all that it holds, and created anew."""
        self._records.clear()
        self.generation += 1
        self.epoch = 0
