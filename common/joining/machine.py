"""Which right record each left record is joined with, and when that is certain: of one partition.

As a left join of two streams in Kafka Streams: each left record looks for the right record of its
key in a *window* around its time. A side's *stream time* is the latest time of its records so far;
records may come later than that by a *grace*. Once the right side's stream time is beyond the
window and the grace, the window is closed, and the left record becomes a sample, whether it has
found a right one or not: each exactly one.

    left    ───L────────────────────────────────────────▶
    window   [─┴──────────────────────]
    right   ────────R────R'──────────────────────R''────▶
                    the first counts            closes the window of L: a sample of L and R

Which right record that is depends on the records of both sides in their orders alone, not on how
the two are interleaved or where reading was interrupted. So what came before each record on its
side is kept with it: a right record that came after a window's end is not looked at, however late
the left one is read; nor is one whose own time the left side had left behind.

A side that is silent must not hold the other up for ever: once it has been read to its end, and
nothing has come for a while, its stream time is the other's; where both are silent it goes on with
the clock, until the windows of all that came are closed: what comes after a pause may be of the
time before it, as where history is sent. That depends on when it was asked; so whoever writes a
sample writes with it that its left record has got it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import Literal, NamedTuple, TypeAlias

Side: TypeAlias = Literal["left", "right"]
Fate: TypeAlias = Literal["unmatched", "double", "joined"]
SIDES: tuple[Side, Side] = ("left", "right")
NEVER_MS = -(2**62)  # before any record
CLOCK_S = 1.0  # between looks at sides that are silent both
AT_ONCE = 1_000  # so that others have their turns meanwhile


class Times(NamedTuple):
    """How far apart records may be, and come."""

    window_ms: int  # a right record's time is no more than this after the left one's
    before_ms: int = 0  # nor more than this before it
    grace_ms: int = 0  # records may be so much older than the newest of their side before them
    idle_s: float = 0.0  # a side that says nothing for so long is silent

    @property
    def ahead_ms(self) -> int:
        """A side is read no further than this ahead of the other, or memory would have no bound."""
        return self.before_ms + self.window_ms + self.grace_ms


class Entry(NamedTuple):
    """One record of one side."""

    offset: int
    key: str
    time_ms: int
    value: bytes  # JSON: of the left side the record, of the right one what it adds to a sample
    record_key: bytes | None = None  # Kafka's
    stream_ms: int = NEVER_MS  # stream time of its side before it
    fate: Fate = "unmatched"  # of the right side


class Read(NamedTuple):
    """These records of a side come next, in their order."""

    side: Side
    entries: tuple[Entry, ...]


class EndReached(NamedTuple):
    """There is nothing to read of a side, asked after all that was told had been read."""

    side: Side


Event: TypeAlias = Read | EndReached


class Keep(NamedTuple):
    """An entry must be known to whoever goes on after this process."""

    side: Side
    entry: Entry
    is_new: bool


class Forget(NamedTuple):
    """An entry that was kept is of no use any more."""

    side: Side
    offset: int


class Sample(NamedTuple):
    """A left record's window is closed."""

    left: Entry
    right: Entry | None


Command: TypeAlias = Keep | Forget | Sample


class Progress(NamedTuple):
    """What is known besides the entries that are kept."""

    left_ms: int = NEVER_MS  # stream time
    right_ms: int = NEVER_MS
    newest_ms: int = NEVER_MS  # of all records
    joined: int = 0  # samples
    alone: int = 0  # samples of left records that found no right one
    late_left: int = 0  # came later than the grace: their right ones may have been forgotten
    late: int = 0  # right records that joined nothing, and came later than the grace
    double: int = 0  # right records whose left ones were joined with an earlier one
    unmatched: int = 0  # right records that no left one looked for


class PartitionJoin:
    """The entries of one partition that wait, and what becomes of them.

    Args:
        times: What may be apart.
        now: When it begins; a clock that never goes back.
        progress: What was known when the entries were kept.
        lefts: Those of the left side that were kept.
        rights: Those of the right side.
        at_once: Windows that one call closes, and right records that it forgets.
    """

    def __init__(
        self,
        times: Times,
        now: float,
        progress: Progress | None = None,
        lefts: Sequence[Entry] = (),
        rights: Sequence[Entry] = (),
        at_once: int = AT_ONCE,
    ) -> None:
        known = progress or Progress()
        self._at_once = at_once
        self._times = times
        self._stream_ms: dict[Side, int] = {"left": known.left_ms, "right": known.right_ms}
        self._counts = known
        self._lefts = [(each.time_ms, each.offset, each) for each in lefts]  # a heap
        self._rights = [(each.time_ms, each.offset, each.key) for each in rights]  # a heap
        # Of each key by time: (time, offset, entry).
        self._by_key = dict[str, list[tuple[int, int, Entry]]]()
        for entry in rights:
            insort(self._by_key.setdefault(entry.key, []), (entry.time_ms, entry.offset, entry))
        heapify(self._lefts)
        heapify(self._rights)
        self._heard_at: dict[Side, float] = dict.fromkeys(SIDES, now)
        self._ended = set[Side]()  # since anything came of them
        self._newest_ms = known.newest_ms
        self._looked_at = now

    def on(self, event: Event, now: float) -> tuple[Command, ...]:
        """Take what was read, or that there is nothing to read."""
        match event:
            case Read(side, entries):
                kept = [self._add(side, entry) for entry in entries]
                self._heard_at[side] = now
                self._ended.discard(side)
                return (*kept, *self.advance())
            case EndReached(side):
                self._ended.add(side)
                self._looked_at = now
                self._go_on_without(side, now)
                return self.advance()

    def advance(self) -> tuple[Command, ...]:
        """Close windows and forget right records, some at a time: see `has_more`."""
        commands = list[Command]()
        for _ in range(self._at_once):
            if not self._may_close():
                break
            commands += self._close(heappop(self._lefts)[2])
        else:
            return tuple(commands)  # a window that is to be closed yet may need a right record
        for _ in range(self._at_once):
            if not self._may_forget():
                break
            commands.append(self._forget())
        return tuple(commands)

    @property
    def has_more(self) -> bool:
        """Whether `advance` has something to do."""
        return self._may_close() or self._may_forget()

    @property
    def progress(self) -> Progress:
        """What is known besides what is kept."""
        times = self._stream_ms
        return self._counts._replace(
            left_ms=times["left"], right_ms=times["right"], newest_ms=self._newest_ms
        )

    def waiting(self) -> dict[Side, int]:
        """How many entries of each side are kept."""
        return {"left": len(self._lefts), "right": len(self._rights)}

    def readable(self) -> Iterator[Side]:
        """The sides that may be read now, the one that is behind first."""
        for side in sorted(SIDES, key=self._stream_ms.__getitem__):
            if self._stream_ms[side] <= self._stream_ms[_other(side)] + self._times.ahead_ms:
                yield side

    def silent(self, now: float) -> Iterator[Side]:
        """The sides of which it matters whether they have been read to their ends."""
        silent = [side for side in SIDES if now - self._heard_at[side] >= self._times.idle_s]
        looks = len(silent) == len(SIDES) and now - self._looked_at >= CLOCK_S
        # Of both, though one may have come as far as it is to: who was here before knew of its end.
        clock = looks and any(self._stream_ms[s] < ms for s, ms in self._after_all().items())
        for side in silent:
            if clock or self._stream_ms[side] < self._newest_ms:
                yield side

    def _add(self, side: Side, entry: Entry) -> Keep:
        stream_ms = self._stream_ms[side]
        entry = entry._replace(stream_ms=stream_ms)
        self._stream_ms[side] = max(stream_ms, entry.time_ms)
        self._newest_ms = max(self._newest_ms, entry.time_ms)
        if side == "left":
            heappush(self._lefts, (entry.time_ms, entry.offset, entry))
            if entry.time_ms + self._times.grace_ms < stream_ms:
                self._count("late_left")
        else:
            heappush(self._rights, (entry.time_ms, entry.offset, entry.key))
            insort(self._by_key.setdefault(entry.key, []), (entry.time_ms, entry.offset, entry))
        return Keep(side, entry, is_new=True)

    def _go_on_without(self, side: Side, now: float) -> None:
        idle_s = self._times.idle_s
        if now - self._heard_at[side] < idle_s:
            return
        self._stream_ms[side] = max(self._stream_ms[side], self._newest_ms)
        silent_s = now - max(self._heard_at.values()) - idle_s
        if len(self._ended) == len(SIDES) and silent_s > 0:
            by_clock_ms = self._newest_ms + int(silent_s * 1000)
            for each, all_ms in self._after_all().items():
                self._stream_ms[each] = max(self._stream_ms[each], min(by_clock_ms, all_ms))

    def _after_all(self) -> dict[Side, int]:
        """The stream times at which nobody looks for any record that came so far."""
        later_ms = self._newest_ms + self._times.grace_ms + 1
        return {"left": later_ms + self._times.before_ms, "right": later_ms + self._times.window_ms}

    def _may_close(self) -> bool:
        closes_ms = self._stream_ms["right"] - self._times.window_ms - self._times.grace_ms
        return bool(self._lefts) and self._lefts[0][0] < closes_ms

    def _close(self, left: Entry) -> Iterator[Command]:
        """The sample of a left record, and what that means for the right ones in its window."""
        of_key = self._by_key.get(left.key, [])
        first_ms, last_ms = (
            left.time_ms - self._times.before_ms,
            left.time_ms + self._times.window_ms,
        )
        begin = bisect_left(of_key, first_ms, key=itemgetter(0))
        end = bisect_right(of_key, last_ms, key=itemgetter(0))
        places = (each for each in range(begin, end) if self._may_join(left, of_key[each][2]))
        found = next(places, None)
        self._count("alone" if found is None else "joined")
        if found is None:
            yield Sample(left, None)
        else:
            yield Sample(left, of_key[found][2])
            yield from self._settle(of_key, found, "joined")
            # Below one that is settled all are, by a left record before this one: of a key that all
            # records have, nobody looks at all of them again and again.
            for place in range(end - 1, found, -1):
                if of_key[place][2].fate != "unmatched":
                    break
                if self._may_join(left, of_key[place][2]):
                    yield from self._settle(of_key, place, "double")
        yield Forget("left", left.offset)

    def _may_join(self, left: Entry, right: Entry) -> bool:
        """Of two with times that fit, whether both came before nobody looks for them any more."""
        times = self._times
        return (
            right.stream_ms <= left.time_ms + times.window_ms + times.grace_ms
            and left.stream_ms <= right.time_ms + times.before_ms + times.grace_ms
        )

    def _settle(
        self, of_key: list[tuple[int, int, Entry]], place: int, fate: Fate
    ) -> Iterator[Keep]:
        right = of_key[place][2]
        if right.fate not in (fate, "joined"):
            right = right._replace(fate=fate)
            of_key[place] = (right.time_ms, right.offset, right)
            yield Keep("right", right, is_new=False)

    def _may_forget(self) -> bool:
        """Whether no left record can look for the oldest right one any more."""
        if not self._rights:
            return False
        last_ms = self._rights[0][0] + self._times.before_ms + self._times.grace_ms
        left_ms, right_ms = self._stream_ms["left"], self._stream_ms["right"]
        return last_ms < left_ms and last_ms + self._times.window_ms < right_ms

    def _forget(self) -> Forget:
        time_ms, offset, key = heappop(self._rights)
        of_key = self._by_key[key]
        right = of_key.pop(bisect_left(of_key, (time_ms, offset), key=itemgetter(0, 1)))[2]
        if not of_key:
            del self._by_key[key]
        if right.fate == "double":
            self._count("double")
        elif right.fate == "unmatched":
            late = time_ms + self._times.grace_ms < right.stream_ms
            self._count("late" if late else "unmatched")
        return Forget("right", offset)

    def _count(self, what: str) -> None:
        self._counts = self._counts._replace(**{what: getattr(self._counts, what) + 1})


def _other(side: Side) -> Side:
    return "right" if side == "left" else "left"
