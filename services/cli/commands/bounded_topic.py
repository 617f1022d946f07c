"""Writes to a Kafka that drops the oldest records past a size, and never has an unused one dropped.

Such is the built-in one. It may drop a record that every job which reads the topic has trained;
while no job reads the topic, none.

    start             needed                 end
      |-- may be dropped --|-- not yet trained --|-- under way --|
                           |<----------- at most `keeps_bytes` ->|     of each partition
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from common.core.spans import Partition, Span
from common.errors import (
    CorruptError,
    ExpiredError,
    FutureFormatError,
    OutsideError,
    UnavailableError,
    UserError,
)
from common.storage.snapshot_file import from_bytes
from services.cli.commands.producing import SILENCE_S

if TYPE_CHECKING:
    from common.core.messages import Positions
    from common.jobs.store import JobRecord, JobStore
    from common.ports.servers import Board, Log, Writer

# What Kafka's format adds to a record, one in a batch of its own as with a low rate: 61 bytes of
# the batch and up to 16 of the record.
_MORE_BYTES = 80
_MARGIN = 1 / 8  # of what is kept: others may write to the topic between two looks
_READ_S = 10.0
_UNDER_WAY_S = 0.05  # between looks while records are under way
_LOOK_S = 0.5  # else: a hot snapshot, which is looked at, comes once in a second
_BLIND_LOOKS = int(SILENCE_S / _LOOK_S)  # in a row, after which people hear why it stands still


class BoundedTopic:
    """One topic, and who needs its records; records go to partitions in turn.

    Args:
        writer: For this topic alone.
        keeps_bytes: Of each partition; what comes beyond that drops the oldest records.
        wait: Waits so many seconds.
        say: Shows a line to people.

    Raises:
        UnknownTopicError: If there is no such topic.
        UnavailableError: If Kafka is unavailable.
    """

    def __init__(  # noqa: PLR0913 -- everything that it touches
        self,
        log: Log,
        writer: Writer,
        topic: str,
        *,
        keeps_bytes: int,
        book: JobStore,
        open_board: Callable[[str], Board],
        wait: Callable[[float], None],
        say: Callable[[str], None],
    ) -> None:
        self._log = log
        self._writer = writer
        self._topic = topic
        self._bytes = int(keeps_bytes * (1 - _MARGIN))
        self._keeps = f"{keeps_bytes / (1 << 20):,.3g} MB"
        self._book = book
        self._open_board = open_board
        self._boards: dict[str, Board] = {}
        self._wait = wait
        self._say = say
        self._places = log.partitions(topic)
        self._turns = cycle(self._places)
        self._first = log.starts(self._places)
        self._largest = max(map(self._largest_in, self._places), default=0)
        self._room = dict.fromkeys(self._places, 0)  # bytes, by the last look and what went since
        self._under_way = Counter[Partition]()  # records sent and not yet delivered
        self._jobs = tuple[str, ...]()  # that read the topic, as of the last look
        self._told = tuple[str, ...]()  # those that people know we wait for
        self._sent = 0
        self._blind = 0  # looks in a row that nobody answered

    def check(self, records: int, size: int) -> None:
        """Refuse at once what does not fit, where no job would make room.

        Args:
            records: How many are to be sent.
            size: Bytes of one of them.

        Raises:
            UserError: If they do not fit.
        """
        size += _MORE_BYTES
        self._largest = max(self._largest, size)
        if self._look() and not self._jobs:
            fit = sum(max(0, room) // size for room in self._room.values())
            if records > fit:
                raise UserError(self._full(f"has room for {fit:,} of these {records:,} records"))

    def send(self, value: bytes) -> None:
        """Send a record, once there is room for it.

        Raises:
            UserError: If there is no room, and no job will make some.
            OutsideError: If records were dropped that a job had not trained.
        """
        size = len(value) + _MORE_BYTES
        self._largest = max(self._largest, size)
        while (place := self._next(size)) is None:
            if not self._look() or any(self._room[each] >= size for each in self._places):
                continue
            if self._under_way.total():
                self._wait(_UNDER_WAY_S)
                continue
            if not self._jobs:
                raise UserError(self._full(f"is full after {self._sent:,} records"))
            if self._jobs != self._told:
                self._told = self._jobs
                names = ", ".join(self._jobs)
                self._say(
                    f"{self._topic} is full: from now on records go as fast as {names} trains them"
                    f" (`doll job watch {self._jobs[0]}` shows how fast that is)"
                )
            self._wait(_LOOK_S)
        self._room[place] -= size
        self._under_way[place] += 1
        self._sent += 1
        self._writer.append(
            self._topic,
            value,
            partition=place.index,
            on_delivered=partial(self._delivered, place),
        )

    def verify(self) -> None:
        """Look whether all that jobs need is still there, as far as anybody can tell now.

        Raises:
            OutsideError: If it is not.
        """
        self._look()

    def _delivered(self, place: Partition, _offset: int | None) -> None:
        self._under_way[place] -= 1

    def _next(self, size: int) -> Partition | None:
        """The next partition in turn with room for so many bytes."""
        for _ in self._places:
            place = next(self._turns)
            if self._room[place] >= size:
                return place
        return None

    def _look(self) -> bool:
        """See how much room there is; False, after a moment, where nobody can tell now."""
        try:
            self._look_once()
        except UnavailableError as error:
            self._blind += 1
            if self._blind == _BLIND_LOOKS:
                self._say(f"waiting: {error}")
            self._wait(_LOOK_S)
            return False
        self._blind = 0
        return True

    def _look_once(self) -> None:
        self._writer.poll()
        under_way = Counter(self._under_way)  # before the ends, in which the others then are
        readers = {
            name: record
            for name, record in self._book.read().items()
            if self._topic in record.spec.streams and record.wanted != "stopped"
        }
        trained = [self._trained(record) for record in readers.values()]
        starts, ends = self._log.starts(self._places), self._log.ends(self._places)
        if not self._places_are_in(starts) or not self._places_are_in(ends):
            raise UnavailableError(f"Kafka did not report all partitions of {self._topic}")
        dropped = 0
        for place in self._places:
            first = self._first[place]
            needed = max(first, min((each.get(place, first) for each in trained), default=first))
            dropped += max(0, starts[place] - needed)
            waiting = ends[place] - needed + under_way[place]
            self._room[place] = self._bytes - waiting * self._largest
        self._jobs = tuple(sorted(readers))
        if dropped:
            raise OutsideError(
                f"the built-in Kafka keeps {self._keeps} of each partition and has dropped"
                f" {dropped:,} records of {self._topic} that nobody had trained: does another"
                " program write to it, too? Use a real Kafka (`doll up --kafka-real`) for that"
            )

    def _places_are_in(self, positions: Positions) -> bool:
        return positions.keys() >= set(self._places)

    def _trained(self, record: JobRecord) -> Positions:
        """Below these positions a job needs no record again, whoever of its processes dies."""
        job = record.id
        board = self._boards.get(job)
        if board is None:
            board = self._boards[job] = self._open_board(job)
        leader_status = board.get_leader_status()
        if leader_status is None:
            return record.first
        for data in board.snapshots():
            try:
                snapshot = from_bytes(data).snapshot
            except (CorruptError, FutureFormatError):
                continue
            if snapshot.by == leader_status.epoch:
                return snapshot.settled
        return leader_status.settled or record.first

    def _largest_in(self, place: Partition) -> int:
        """What the largest record that is there already takes."""
        reader = self._log.spans()
        try:
            while True:
                bounds = self._log.bounds(place)
                try:
                    found = reader.read(Span(*place, bounds.start, bounds.end), _READ_S)
                except ExpiredError:  # the broker dropped some in this moment
                    continue
                return max((len(value or b"") + _MORE_BYTES for value in found.values), default=0)
        finally:
            reader.close()

    def _full(self, how: str) -> str:
        return (
            f"the built-in Kafka keeps {self._keeps} of each partition; {self._topic} {how}, and no"
            " job that is not stopped reads it, so more would drop the oldest unread: submit the"
            " job first, and records go as fast as it trains them; or create a topic with more"
            " partitions; or use a real Kafka (`doll up --kafka-real`, which needs Java and Maven,"
            " or DOLL_KAFKA)"
        )
