"""One partition of both sides: what it reads, decides and writes, from state to samples.

Whoever takes it takes its transactional id, so that nobody else writes for it any more, and reads
what was kept. A transaction holds samples, dead letters, entries that are kept or forgotten, and
where both sides are read on: of whoever is killed, all of it is there or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from common.core.messages import Skipped
from common.core.spans import LogPosition, Partition
from common.data.codecs import reason_of
from common.errors import ConflictError, ExpiredError, TruncatedError
from common.joining.machine import (
    SIDES,
    EndReached,
    Entry,
    Forget,
    Keep,
    PartitionJoin,
    Progress,
    Read,
    Sample,
    Side,
)
from common.joining.records import LARGEST_BYTES, JoinSpec, Records
from common.kafka.dead_letters import Letter, letter_of
from common.kafka.names import joins_topic
from common.kafka.read import identified, records_of
from common.ports.servers import Log, LogRecord, NewRecord, NewTopic, Tail
from common.wire.joins import (
    PROGRESS,
    JoinProgress,
    decode_kept,
    encode_entry,
    encode_progress,
    entry_key,
)

if TYPE_CHECKING:
    from common.joining.machine import Command
    from common.telemetry.logging import EventLogger

READ_RECORDS = 1_000
_RESTORED = 5_000  # entries in a row: the group must hear of this member meanwhile
LINGER_S = 0.1  # how long what was decided waits for more
_RECORDS = 4_000  # of one transaction; what one call of the machine decides is never parted
_BYTES = 8 << 20


class Shared(NamedTuple):
    """What all partitions of a process have in common."""

    log: Log
    spec: JoinSpec
    records: Records
    logger: EventLogger


class Written(NamedTuple):
    """What a transaction has brought."""

    before: Progress
    after: Progress
    dead_letters: int


class JoinedPartition:
    """A partition that this process has.

    Args:
        index: Its number, on both sides.
        now: A clock that never goes back.

    Raises:
        OutsideError: If Kafka is unavailable or refuses.
    """

    def __init__(self, shared: Shared, index: int, now: float) -> None:
        self._shared = shared
        self._log, self._spec = shared.log, shared.spec
        self._index = index
        self._own = Partition(joins_topic(self._spec.to), index)
        self._transactions = self._log.transactions(f"{self._own.topic}.{index}")
        self._entries = dict[tuple[Side, int], Entry]()
        self._known: JoinProgress | None = None
        self._restoring: Iterator[LogRecord] | None = records_of(self._log, self._own)
        self._join = PartitionJoin(self._spec.times, now)
        self._tails = dict[Side, Tail]()
        self._positions = dict[Side, LogPosition]()
        self._state = dict[bytes, bytes | None]()  # not written yet, and so are the others below
        self._new = set[bytes]()  # of those, what nobody knows yet
        self._samples = list[NewRecord]()
        self._letters = list[NewRecord]()
        self._bytes = 0
        self._since = 0.0

    def turn(self, now: float) -> bool:
        """Read and decide for a while; returns whether there was anything to do.

        Raises:
            OutsideError: If Kafka is unavailable or refuses.
            ConflictError: If another join writes to the topic, or a side is another topic now.
        """
        if self._restoring is not None:
            self._restore(now)
            return True
        if self._join.has_more:
            self._take(self._join.advance())
            return True
        worked = False
        for side in self._join.readable():
            if found := self._read(side):
                self._take(self._join.on(Read(side, tuple(self._sound(side, found))), now))
                worked = True
        for side in self._join.silent(now):
            end = self._log.bounds(self._place(side)).end
            if self._tails[side].position() >= end:
                self._take(self._join.on(EndReached(side), now))
        return worked

    def write(self, now: float) -> Written | None:
        """Write what was decided, if it is time for that.

        Raises:
            DeliveryError: If another process has this partition now.
            OutsideError: If Kafka is unavailable or refuses; all may be written, or nothing.
        """
        before = self._known
        if before is None or self._restoring is not None:
            return None
        moved = self._positions != {"left": before.left, "right": before.right}
        if not (moved or self._state or self._samples):
            return None
        size = len(self._state) + len(self._samples) + len(self._letters)
        if size < _RECORDS and self._bytes < _BYTES and now < self._since + LINGER_S:
            return None
        after = self._progress(len(self._letters))
        state = {**self._state, PROGRESS: encode_progress(after)}
        if self._letters:
            topics = {each.topic for each in self._letters}
            self._log.create_topics([NewTopic(each, kept_forever=True) for each in sorted(topics)])
        kept = [NewRecord(self._own.topic, state[key], key, (), self._index) for key in state]
        self._transactions.write([*self._samples, *self._letters, *kept])
        self._known = after
        self._state, self._new, self._samples, self._letters = {}, set(), [], []
        self._bytes, self._since = 0, now
        return Written(before.known, after.known, after.dead_letters - before.dead_letters)

    def positions(self) -> dict[Partition, int]:
        """Up to where both sides were read when it was last written."""
        if self._known is None:
            return {}
        return {
            self._place("left"): self._known.left.offset,
            self._place("right"): self._known.right.offset,
        }

    @property
    def known(self) -> JoinProgress | None:
        """Where it stands; None before that was read."""
        return self._known

    def waiting(self) -> dict[Side, int]:
        """How many entries of each side wait."""
        return self._join.waiting()

    def close(self) -> None:
        """Let go of it; what is not written is decided again by whoever has it next."""
        for tail in self._tails.values():
            tail.close()
        self._transactions.close()

    def _place(self, side: Side) -> Partition:
        return Partition(self._spec.topics[side], self._index)

    # --- what was kept ---------------------------------------------------------------------------

    def _restore(self, now: float) -> None:
        """Read on in what was kept; at its end, begin.

        Raises:
            ConflictError: If another join writes to the topic.
            WireError: If something else is there.
        """
        assert self._restoring is not None  # noqa: S101 -- asked by `turn`
        for count, record in enumerate(self._restoring, 1):
            self._fold(record)
            if count == _RESTORED:
                return
        self._restoring = None
        known = self._known
        if known is None:
            self._positions = {side: self._first(side) for side in SIDES}
        else:
            self._positions = {"left": known.left, "right": known.right}
        kept = {side: [e for (of, _), e in self._entries.items() if of == side] for side in SIDES}
        self._entries.clear()
        progress = known.known if known else Progress()
        self._join = PartitionJoin(self._spec.times, now, progress, kept["left"], kept["right"])
        self._known = known or self._progress(0)
        for side in SIDES:
            self._tails[side] = self._log.tail(self._place(side), self._positions[side])
        self._shared.logger.info("partition_taken", partition=self._index, **self._join.waiting())

    def _fold(self, record: LogRecord) -> None:
        if record.value is None:
            side, _, offset = (record.key or b"").decode(errors="replace").partition(" ")
            if side in SIDES and offset.isdecimal():
                self._entries.pop((side, int(offset)), None)
            return
        read = decode_kept(record.key, record.value)
        if not isinstance(read, JoinProgress):
            self._entries[read.side, read.entry.offset] = read.entry
            return
        if read.identity != self._spec.identity:
            raise ConflictError(
                f"{self._spec.to} has samples of {read.identity}, not of {self._spec.identity}:"
                " join to another topic"
            )
        self._known = read

    def _first(self, side: Side) -> LogPosition:
        place = self._place(side)
        return identified(self._log, place, self._log.bounds(place).start)

    def _progress(self, letters: int) -> JoinProgress:
        before = self._known.dead_letters if self._known else 0
        left, right = self._positions["left"], self._positions["right"]
        return JoinProgress(self._spec.identity, left, right, self._join.progress, before + letters)

    # --- what is read ----------------------------------------------------------------------------

    def _read(self, side: Side) -> list[LogRecord]:
        """The next records of a side.

        Raises:
            ConflictError: If it is another topic now, or has lost what was read.
            UnavailableError: If Kafka is unavailable.
        """
        tail, place, at = self._tails[side], self._place(side), self._positions[side]
        try:
            found = tail.read(READ_RECORDS, 0.0)
        except ExpiredError:
            first = self._first(side)
            lost = first.offset - at.offset
            self._shared.logger.warning("records_expired", partition=str(place), records=lost)
            tail.close()
            self._positions[side] = first
            self._tails[side] = self._log.tail(place, first)
            return []
        except TruncatedError as error:
            raise ConflictError(
                f"{error}: samples of it are in {self._spec.to}; delete {self._own.topic} to begin"
                " anew, or join to another topic"
            ) from error
        epoch = found[-1].epoch if found else at.epoch
        self._positions[side] = LogPosition(tail.position(), at.topic_id, epoch)
        return found

    def _sound(self, side: Side, found: Iterable[LogRecord]) -> Iterator[Entry]:
        """Those that can be joined; the others become dead letters."""
        place = self._place(side)
        for record in found:
            try:
                yield self._shared.records.entry(side, record)
            except ValueError as error:
                skipped = Skipped(*place, record.offset, reason_of(error))
                topic_id = self._positions[side].topic_id
                letter: Letter | None = letter_of(
                    self._spec.to, skipped, record.offset, record.value, topic_id
                )
                while letter is not None and len(letter.value or b"") > LARGEST_BYTES:
                    letter = letter.shortened()
                if letter is not None:
                    self._letters.append(NewRecord(*letter, 0))

    # --- what is decided -------------------------------------------------------------------------

    def _take(self, commands: Iterable[Command]) -> None:
        """Gather for the next transaction; what came and went within it is not written."""
        for command in commands:
            match command:
                case Keep(side, entry, is_new):
                    key = entry_key(side, entry.offset)
                    self._keep(key, encode_entry(side, entry))
                    if is_new:
                        self._new.add(key)
                case Forget(side, offset):
                    key = entry_key(side, offset)
                    if key in self._new:
                        self._new.remove(key)
                        del self._state[key]
                    else:
                        self._keep(key, None)
                case Sample(left, right):
                    value, *addresses = self._shared.records.sample(self._index, left, right)
                    headers = tuple(zip(SIDES, addresses, strict=False))
                    self._samples.append(NewRecord(self._spec.to, value, left.record_key, headers))
                    self._bytes += len(value)

    def _keep(self, key: bytes, value: bytes | None) -> None:
        self._state[key] = value
        self._bytes += len(value or b"")
