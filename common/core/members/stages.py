"""Owners of slices of the weights, chosen by the machines of the members (stages of AgileML).

    stage  1   reliable machines, if there are at least as many as spot machines
           2   half of the spot machines, those that have run longest
           3   the same, and reliable machines compute no gradients: above 15 spot per reliable one

A fixed hash draws a slice's owners among those, so that few slices move if a machine comes or goes.
Each of them is the first owner of about the same number of slices.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from msgspec import UNSET

if TYPE_CHECKING:
    from collections.abc import Iterable

    from msgspec import UnsetType

    from common.core.messages import Member, Tier
    from common.core.settings import SliceSettings, Stage

# Ratio of spot to reliable machines at which a stage ends: thresholds of AgileML (EuroSys 2017).
ENDS = {1: 1.0, 2: 15.0}
# Share of a threshold by which the ratio must be beyond it before the stage changes.
HYSTERESIS = 0.2


class MemberMachine(NamedTuple):
    """A member and its machine."""

    member: Member
    tier: Tier
    # Start of its process, in seconds since 1970.
    began_s: float
    # Number of slices whose optimizer state fits into its memory. None if unlimited.
    room: int | None = None

    @property
    def reported(self) -> tuple[Tier, float, int | UnsetType]:
        """The machine in the form of a member's report."""
        return self.tier, self.began_s, UNSET if self.room is None else self.room


def stage_of(machines: Iterable[MemberMachine], before: Stage | None) -> Stage:
    """Return the stage for the ratio of spot to reliable machines.

    Args:
        machines: Machines of all members.
        before: Current stage. None at the start.
    """
    count = Counter(each.tier for each in machines)
    if not count["spot"]:
        return 1
    ratio = count["spot"] / count["reliable"] if count["reliable"] else float("inf")

    def above(stage: Stage) -> bool:
        wider = 0.0 if before is None else HYSTERESIS if before <= stage else -HYSTERESIS
        return ratio > ENDS[stage] * (1 + wider)

    return 3 if above(2) else 2 if above(1) else 1


def servers_of(
    machines: Iterable[MemberMachine], stage: Stage, settings: SliceSettings
) -> tuple[Member, ...]:
    """Return the members that should own slices, sorted. More than configured if room is short."""
    wanted = "reliable" if stage == 1 else "spot"
    ranked = sorted(
        (each for each in machines if each.room != 0),
        key=lambda each: (each.tier != wanted, each.began_s, each.member),
    )
    right = sum(each.tier == wanted for each in ranked)
    auto = right if stage == 1 else right // 2
    count = max(auto if settings.servers is None else settings.servers, settings.owners)
    rooms = [settings.count if each.room is None else each.room for each in ranked]
    while count < len(ranked) and sum(rooms[:count]) < settings.count:
        count += 1
    return tuple(sorted(each.member for each in ranked[:count]))


@lru_cache(maxsize=64)
def wanted_owners(
    servers: tuple[Member, ...], settings: SliceSettings, rooms: tuple[int | None, ...] = ()
) -> tuple[tuple[Member, ...], ...]:
    """Return the preferred owners of each slice, first owner first. Empty if none has room.

    Args:
        servers: Members that should own slices.
        settings: Settings of the job.
        rooms: Number of slices that fit into each server. None, or no entry, if all do.
    """
    known = rooms or (None,) * len(servers)
    left = {
        member: settings.count if room is None else room
        for member, room in zip(servers, known, strict=True)
    }
    lots = [
        sorted(servers, key=lambda m: (crc32(f"{m.life} {number}".encode()), m))
        for number in range(settings.count)
    ]
    most, load = -(-settings.count // max(len(servers), 1)), Counter["Member"]()
    found = list[tuple["Member", ...]]()
    for lot in lots:
        able = [member for member in lot if left[member]]
        first = next((member for member in able if load[member] < most), next(iter(able), None))
        found.append(() if first is None else (first,))
        load.update(found[-1])
        left.update({member: left[member] - 1 for member in found[-1]})
    # Further owners use the memory that first owners leave.
    for number, lot in enumerate(lots):
        able = [member for member in lot if left[member] and member not in found[number]]
        others = able[: settings.owners - 1] if found[number] else []
        found[number] += tuple(others)
        left.update({member: left[member] - 1 for member in others})
    return tuple(found)
