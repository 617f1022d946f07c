"""Each left record becomes one sample, whatever is interleaved, cut or killed."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.joining import machine
from common.joining.machine import (
    NEVER_MS,
    Command,
    EndReached,
    Entry,
    Forget,
    Keep,
    PartitionJoin,
    Progress,
    Read,
    Sample,
    Side,
    Times,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


AGES = st.integers(0, 12)
TIMES = st.builds(Times, AGES, st.integers(0, 4), AGES, st.just(5.0))
CHANCES = st.builds(Random, st.integers(0, 2**32))  # of what is read when, and who is killed
SIDE = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40)), max_size=12)
LAST_MS = 10_000  # beyond all windows


def entries(side: Iterable[tuple[str, int]]) -> list[Entry]:
    return [Entry(offset, key, time_ms, b"{}") for offset, (key, time_ms) in enumerate(side)]


def streams_of(side: Sequence[Entry]) -> list[int]:
    """The stream time before each record."""
    return [max([NEVER_MS, *(each.time_ms for each in side[:at])]) for at in range(len(side))]


def expected(
    times: Times, lefts: Sequence[Entry], rights: Sequence[Entry]
) -> dict[int, int | None]:
    """Of each left record's offset the right one's: by its definition, one by one."""
    found = dict[int, int | None]()
    for left, left_stream_ms in zip(lefts, streams_of(lefts), strict=True):
        several = [
            (right.time_ms, right.offset)
            for right, right_stream_ms in zip(rights, streams_of(rights), strict=True)
            if right.key == left.key
            and -times.before_ms <= right.time_ms - left.time_ms <= times.window_ms
            and right_stream_ms <= left.time_ms + times.window_ms + times.grace_ms
            and left_stream_ms <= right.time_ms + times.before_ms + times.grace_ms
        ]
        found[left.offset] = min(several)[1] if several else None
    return found


class Kept(NamedTuple):
    """What was written for whoever goes on: as a transaction leaves it."""

    entries: dict[tuple[Side, int], Entry]
    samples: list[Sample]

    def write(self, commands: Iterable[Command]) -> None:
        """Do what was decided."""
        for command in commands:
            match command:
                case Sample():
                    self.samples.append(command)
                case Keep(side, entry, is_new):
                    assert is_new == ((side, entry.offset) not in self.entries)
                    self.entries[side, entry.offset] = entry
                case Forget(side, offset):
                    del self.entries[side, offset]

    def joined(self) -> dict[int, int | None]:
        """Of each left record the right one."""
        found = {each.left.offset: each.right and each.right.offset for each in self.samples}
        assert len(found) == len(self.samples), "a left record became two samples"
        return found

    def restored(self, times: Times, now: float, progress: Progress, at_once: int) -> PartitionJoin:
        """What goes on after a process that was killed."""
        sides = {
            side: [each for (of, _), each in self.entries.items() if of == side]
            for side in machine.SIDES
        }
        return PartitionJoin(times, now, progress, sides["left"], sides["right"], at_once)


def drained(join: PartitionJoin, kept: Kept) -> None:
    while join.has_more:
        kept.write(join.advance())


@pytest.mark.parametrize("at_once", [1, 1000])
@given(TIMES, SIDE, SIDE, CHANCES)
def test_samples_depend_on_the_records_of_both_sides_alone(
    at_once: int,
    times: Times,
    left: list[tuple[str, int]],
    right: list[tuple[str, int]],
    chance: Random,
) -> None:
    """Not on what is read when, nor on who is killed where.

    written  ──┬────────┬───────┬──
    read       │────?   │──?    │──────   ?: killed, and read again from the last that was written
    """
    sides: dict[Side, list[Entry]] = {
        "left": entries([*left, ("end", LAST_MS)]),
        "right": entries([*right, ("end", LAST_MS)]),
    }
    kept, read = Kept({}, []), dict.fromkeys(machine.SIDES, 0)
    join = PartitionJoin(times, 0.0, at_once=at_once)
    while any(read[side] < len(sides[side]) for side in machine.SIDES):
        before, doubtful = join.progress, dict(read)
        commands = list[Command]()
        for _ in range(chance.randint(1, 3)):
            side = chance.choice(machine.SIDES)
            count = chance.randint(0, 4)
            batch = sides[side][doubtful[side] : doubtful[side] + count]
            doubtful[side] += len(batch)
            commands += join.on(Read(side, tuple(batch)), 0.0)
            if chance.randint(0, 1):
                commands += join.advance()
        if chance.randint(0, 3) == 0:
            join = kept.restored(times, 0.0, before, at_once)
        else:
            kept.write(commands)
            read = doubtful
    drained(join, kept)

    wanted = expected(times, sides["left"], sides["right"])
    last = len(left)
    del wanted[last]  # its window is open
    assert kept.joined() == wanted
    progress = join.progress
    assert progress.joined + progress.alone == len(kept.samples)
    used = {offset for offset in wanted.values() if offset is not None}
    assert set(kept.entries) == {("left", last), ("right", len(right))}
    assert progress.late + progress.double + progress.unmatched + len(used) == len(right)


@given(TIMES, SIDE, SIDE, CHANCES)
def test_a_right_record_that_comes_in_order_joins_and_silence_closes_all_windows(
    times: Times, left: list[tuple[str, int]], right: list[tuple[str, int]], chance: Random
) -> None:
    sides: dict[Side, list[Entry]] = {
        "left": entries(sorted(left, key=lambda each: each[1])),
        "right": entries(sorted(right, key=lambda each: each[1])),
    }
    kept, read, now = Kept({}, []), dict.fromkeys(machine.SIDES, 0), 0.0
    join = PartitionJoin(times, now)
    while any(read[side] < len(sides[side]) for side in machine.SIDES):
        blocked = True
        for side in join.readable():
            at, count = read[side], chance.randint(1, 3)
            if batch := sides[side][at : at + count]:
                blocked = False
                kept.write(join.on(Read(side, tuple(batch)), now))
                read[side] += len(batch)
                break
        now += times.idle_s if blocked else 0.0
        for side in join.silent(now):
            if read[side] == len(sides[side]):
                kept.write(join.on(EndReached(side), now))
    while join.waiting()["left"]:
        now += 1.0
        for side in join.silent(now):
            kept.write(join.on(EndReached(side), now))
        drained(join, kept)

    wanted = {
        one.offset: min(
            (
                (two.time_ms, two.offset)
                for two in sides["right"]
                if two.key == one.key
                and -times.before_ms <= two.time_ms - one.time_ms <= times.window_ms
            ),
            default=(0, None),
        )[1]
        for one in sides["left"]
    }
    assert kept.joined() == wanted
    assert now < 60.0


def test_what_comes_late_or_twice_is_counted() -> None:
    """Window 10, grace 5.

    left    a0         b100  a0 (late)      end
    right   a5 a6  x90 c20 (late)  d100     end
    """
    join, kept = PartitionJoin(Times(10, 0, 5), 0.0), Kept({}, [])
    left = entries([("a", 0), ("b", 100), ("a", 0), ("end", 1000)])
    right = entries([("a", 5), ("a", 6), ("x", 90), ("c", 20), ("d", 100), ("end", 1000)])
    kept.write(join.on(Read("left", tuple(left)), 0.0))
    kept.write(join.on(Read("right", tuple(right)), 0.0))

    assert kept.joined() == {0: 0, 1: None, 2: None}
    assert join.progress == Progress(1000, 1000, 1000, 1, 2, 1, 1, 1, 2)


def test_a_silent_side_holds_nobody_up_and_two_go_on_with_the_clock() -> None:
    join, kept = PartitionJoin(Times(10, 0, 5, idle_s=3.0), 0.0), Kept({}, [])

    def end_of(side: Side, now: float) -> None:
        kept.write(join.on(EndReached(side), now))

    assert list(join.readable()) == ["left", "right"]
    kept.write(join.on(Read("left", tuple(entries([("a", 1000), ("b", 1016)]))), 1.0))
    assert list(join.readable()) == ["right"]  # the left side is ahead by more than a window
    assert list(join.silent(2.9)) == []
    end_of("right", 2.9)  # not for long enough
    assert kept.joined() == {}
    assert list(join.silent(3.0)) == ["right"]
    end_of("right", 3.0)
    assert kept.joined() == {0: None}
    assert list(join.readable()) == ["left", "right"]
    assert list(join.silent(3.5)) == []  # the left one is not silent yet
    assert list(join.silent(4.0)) == ["left", "right"]
    end_of("left", 4.0)
    end_of("right", 4.01)
    assert kept.joined() == {0: None}
    assert list(join.silent(4.5)) == []
    end_of("right", 5.01)
    assert kept.joined() == {0: None, 1: None}


def test_what_comes_after_a_pause_is_joined_however_old_it_is() -> None:
    """As where history is sent; all windows of what came before the pause are closed.

    clock   0      100 (silent)   200      300 (silent)
    left    a1000                 b1001
    right                         c1002 b1003
    """
    join, kept = PartitionJoin(Times(10, 0, 5, idle_s=3.0), 0.0), Kept({}, [])
    side: Side
    kept.write(join.on(Read("left", tuple(entries([("a", 1000)]))), 0.0))
    for side in machine.SIDES:
        kept.write(join.on(EndReached(side), 100.0))
    assert kept.joined() == {0: None}
    assert list(join.silent(200.0)) == []
    kept.write(join.on(Read("left", (Entry(1, "b", 1001, b"{}"),)), 200.0))
    kept.write(join.on(Read("right", tuple(entries([("c", 1002), ("b", 1003)]))), 200.0))
    assert kept.joined() == {0: None}
    for side in machine.SIDES:
        kept.write(join.on(EndReached(side), 300.0))
    assert kept.joined() == {0: None, 1: 1}
    assert join.progress.late_left == 0


def test_a_key_that_all_records_have_is_looked_through_once() -> None:
    count = 3_000
    join, kept = PartitionJoin(Times(10**6, 0, 0), 0.0), Kept({}, [])
    records = tuple(Entry(offset, "a", offset, b"{}") for offset in range(count))
    kept.write(join.on(Read("left", records), 0.0))
    kept.write(join.on(Read("right", records), 0.0))
    kept.write(join.on(Read("left", (Entry(count, "b", 10**9, b"{}"),)), 0.0))
    commands = [join.on(Read("right", (Entry(count, "b", 10**9, b"{}"),)), 0.0)]
    while join.has_more:
        commands.append(join.advance())
    told = [command for several in commands for command in several]
    kept.write(told)
    assert kept.joined() == {number: number for number in range(count)}
    assert sum(isinstance(command, Keep) for command in told) <= 2 * count + 1
    assert join.progress.joined == count
