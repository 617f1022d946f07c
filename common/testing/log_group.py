"""Consumer groups of the log in memory: who owns which partition, and the members that read them.

A partition changes hands as under Kafka's cooperative protocol: its owner is told first, inside its
own `poll`, and only then does the next one get it.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from common.core.events import Assigned, Revoked
from common.core.reading import RunsInTurn
from common.core.spans import LogPosition, Partition
from common.errors import OutsideError, UnknownTopicError
from common.ports import Bounds, EndReached, OutOfRange, StreamEvent
from common.testing.log_readers import fetched, moved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.testing.log import MemoryLog


class Group:
    """Members of a consumer group; the log's lock guards it."""

    def __init__(self) -> None:
        self.members: dict[str, MemoryStreamReader | None] = {}  # None: held for its return
        self.target: dict[Partition, str] = {}  # who shall own each partition
        self.owner: dict[Partition, MemoryStreamReader] = {}  # who does
        self.committed: dict[Partition, int] = {}
        self._numbers = count()

    def join(self, reader: MemoryStreamReader, name: str, *, hold: bool) -> str:
        """Add a member and give its id; a static one replaces its predecessor of the same name."""
        member_id = name if hold else f"{name}#{next(self._numbers)}"
        self._disown(member_id)
        self.members[member_id] = reader
        return member_id

    def leave(self, member_id: str, *, hold: bool) -> None:
        """Take a member out; the partitions of a static one wait for it."""
        self._disown(member_id)
        if hold:
            self.members[member_id] = None
        else:
            self.members.pop(member_id, None)

    def lose(self, name: str) -> None:
        """Take out all dynamic members of a name before they hear of it."""
        for member_id in [each for each in self.members if each.split("#")[0] == name]:
            self.leave(member_id, hold=False)

    def rotate(self) -> None:
        """Let everything belong to the next member."""
        ids = list(self.members)
        after = dict(zip(ids, [*ids[1:], *ids[:1]], strict=True))
        self.target = {partition: after[owner] for partition, owner in self.target.items()}

    def balance(self, partitions: tuple[Partition, ...]) -> None:
        """Give every member its share; moves no more partitions than it must."""
        kept: dict[str, list[Partition]] = {member_id: [] for member_id in self.members}
        free: list[Partition] = []
        for partition in partitions:
            kept.get(self.target.get(partition, ""), free).append(partition)
        share, larger = divmod(len(partitions), max(len(kept), 1))
        ranked = sorted(kept, key=lambda member_id: -len(kept[member_id]))
        quotas = {member_id: share + (i < larger) for i, member_id in enumerate(ranked)}
        for member_id, quota in quotas.items():
            free += kept[member_id][quota:]
            del kept[member_id][quota:]
        for member_id, quota in quotas.items():
            while len(kept[member_id]) < quota:
                kept[member_id].append(free.pop(0))
        self.target = {each: member_id for member_id, mine in kept.items() for each in mine}

    def _disown(self, member_id: str) -> None:
        gone = self.members.get(member_id)
        self.owner = {each: reader for each, reader in self.owner.items() if reader is not gone}


class MemoryStreamReader:
    """The `StreamReader` port."""

    def __init__(
        self, log: MemoryLog, group: Group, topics: tuple[str, ...], name: str, *, hold: bool
    ) -> None:
        self._log = log
        self._group = group
        self._topics = topics
        self._name = name
        self._hold = hold
        self._owned: set[Partition] = set()
        self._positions: dict[Partition, LogPosition] = {}  # of those that have been placed
        self._in_turn = RunsInTurn()
        self._paused = False
        self._id = group.join(self, name, hold=hold)

    def poll(
        self, max_records: int, timeout_s: float, run: int | None = None
    ) -> tuple[StreamEvent, ...]:
        """See the port.

        Raises:
            UnavailableError: If the broker is away; call again.
            OutsideError: If another static member of its name has taken its place.
        """
        with self._log.here():
            wanted = 0 if self._paused else max_records
            self._rejoin()
            self._log.wait_until(lambda: self._has_news(wanted), timeout_s)
            return (*self._rebalanced(), *self._read(wanted, run or max(wanted, 1)))

    def place(self, positions: Mapping[Partition, int | LogPosition]) -> None:
        """See the port; partitions that are not this member's (any more) are left out."""
        for partition in self._owned & positions.keys():
            self._positions[partition] = LogPosition.of(positions[partition])

    def pause(self) -> None:
        """See the port."""
        self._paused = True

    def resume(self) -> None:
        """See the port."""
        self._paused = False

    def commit(self, positions: Mapping[Partition, int]) -> None:
        """See the port."""
        self._group.committed.update(positions)

    def lag(self) -> dict[Partition, int]:
        """See the port."""
        with self._log.here():
            return {
                partition: max(0, self._log.stored(partition).end - position.offset)
                for partition, position in self._positions.items()
            }

    def close(self) -> None:
        """See the port."""
        with self._log.anyway():
            if self._group.members.get(self._id) is self:
                self._group.leave(self._id, hold=self._hold)

    def _rejoin(self) -> None:
        present = self._group.members.get(self._id)
        if present is self:
            return
        if self._hold:
            raise OutsideError(f"another static member {self._name} has taken this one's place")
        self._id = self._group.join(self, self._name, hold=False)
        self._log.changed()

    def _has_news(self, wanted: int) -> bool:
        self._group.balance(self._partitions())
        return bool(self._losing() or self._gaining() or (wanted > 0 and self._readable()))

    def _partitions(self) -> tuple[Partition, ...]:
        found: list[Partition] = []
        for topic in self._topics:
            try:
                found += self._log.partitions_of(topic)
            except UnknownTopicError:
                continue  # it may come
        return tuple(found)

    def _losing(self) -> list[Partition]:
        owner, target = self._group.owner, self._group.target
        return [
            each
            for each in self._owned
            if owner.get(each) is not self or target.get(each) != self._id
        ]

    def _gaining(self) -> list[Partition]:
        owner, target = self._group.owner, self._group.target
        return [each for each, mine in target.items() if mine == self._id and each not in owner]

    def _readable(self) -> list[Partition]:
        """Placed partitions that do not stand at their end: there is something to tell."""
        return [
            partition
            for partition, position in self._positions.items()
            if partition in self._owned
            and (
                position.offset != self._log.stored(partition).end
                or self._log.loss(partition, position)
            )
        ]

    def _rebalanced(self) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if losing := self._losing():
            for partition in losing:
                self._owned.discard(partition)
                self._positions.pop(partition, None)
                if self._group.owner.get(partition) is self:
                    del self._group.owner[partition]
            events.append(Revoked(tuple(losing)))
        if gaining := self._gaining():
            self._owned.update(gaining)
            self._group.owner.update(dict.fromkeys(gaining, self))
            events.append(Assigned(tuple(gaining)))
        if events:
            self._log.changed()
        return events

    def _read(self, wanted: int, run: int) -> list[StreamEvent]:
        if wanted < 1:
            return []
        events = list[StreamEvent]()
        here, lags = dict[Partition, int](), dict[Partition, int]()
        for partition in self._readable():
            stored, position = self._log.stored(partition), self._positions[partition]
            if loss := self._log.loss(partition, position):
                del self._positions[partition]
                events.append(loss)
            elif position.offset < stored.start:
                del self._positions[partition]
                events.append(OutOfRange(partition, Bounds(stored.start, stored.end)))
            elif length := len(stored.read(position.offset, wanted)):
                here[partition] = length
                lags[partition] = stored.end - position.offset
            else:
                self._positions[partition] = moved(position, (), stored.end)
                events.append(EndReached(partition, stored.end))
        for partition, length in self._in_turn.plan(here, lags, wanted, run):
            position = self._positions[partition]
            records = self._log.stored(partition).read(position.offset, length)
            self._positions[partition] = moved(position, records, records[-1].offset + 1)
            events.append(fetched(partition, records))
        return events
