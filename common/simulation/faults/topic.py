"""One of a job's own topics in the simulated Kafka. It may lose its last records, or all.

A log that lost its tail continues under a new leader epoch, and assigns the same offsets to other
records. A recreated topic has another id, and begins at 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from common.core.spans import LogPosition

R = TypeVar("R")


@dataclass
class SimulatedTopic(Generic[R]):
    """A topic's records, and what a reader can know of them."""

    # Shown in messages.
    name: str
    # Number of times that the topic was recreated.
    generation: int = 0
    # Kafka's leader epoch in force.
    epoch: int = 0
    # Records with their leader epochs.
    _records: list[tuple[R | None, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[R | None]:
        return (record for record, _ in self._records)

    @property
    def topic_id(self) -> str:
        """Kafka's id of the topic."""
        return f"{self.name}#{self.generation}"

    def append(self, record: R | None) -> int:
        """Append a record, and return its offset."""
        self._records.append((record, self.epoch))
        return len(self._records) - 1

    def position(self, offset: int) -> LogPosition:
        """Return the position of a reader that has read all records below an offset."""
        epoch = self._records[offset - 1][1] if offset else -1
        return LogPosition(offset, self.topic_id, epoch)

    def agrees(self, position: LogPosition) -> bool:
        """Return True if the log still agrees with a position."""
        offset, topic_id, epoch = position
        if topic_id not in {"", self.topic_id} or offset > len(self):
            return False
        return epoch < 0 or offset == 0 or self._records[offset - 1][1] <= epoch

    def run(self, begin: int, end: int) -> tuple[tuple[tuple[int, R | None], ...], int]:
        """Return records from `begin` on, below `end`, of one leader epoch, and this epoch."""
        epoch = self._records[begin][1]
        found = list[tuple[int, R | None]]()
        for offset in range(begin, end):
            record, other = self._records[offset]
            if other != epoch:
                break
            found.append((offset, record))
        return tuple(found), epoch

    def elect(self) -> None:
        """Let another broker lead the topic. No record is lost."""
        self.epoch += 1

    def cut(self, end: int) -> None:
        """Lose the records from an offset on."""
        del self._records[end:]
        self.epoch += 1

    def recreate(self) -> None:
        """Delete the topic with all records, and recreate it."""
        self._records.clear()
        self.generation += 1
        self.epoch = 0
