"""Who should own slices of the weights, by which machines there are (the stages of AgileML).

    stage  1   reliable machines, where they are at least as many as spot machines
           2   half of the spot machines, those that have run longest
           3   likewise, and reliable machines compute no gradients: above 15 spot to a reliable one

A slice's owners are drawn by lot among those, always the same lot, so that few slices move where a
machine comes or goes; first owners have equally many.
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

# Spot machines to a reliable one above which a stage ends: thresholds of AgileML (EuroSys 2017).
ENDS = {1: 1.0, 2: 15.0}
HYSTERESIS = 0.2  # so much further the ratio must go until a stage is left


class MemberMachine(NamedTuple):
    """A member by the machine that it runs on."""

    member: Member
    tier: Tier
    began_s: float  # when its process did, since 1970
    room: int | None = None  # slices whose optimizer state it has memory for; None: any number

    @property
    def reported(self) -> tuple[Tier, float, int | UnsetType]:
        """What a member says of it."""
        return self.tier, self.began_s, UNSET if self.room is None else self.room


def stage_of(machines: Iterable[MemberMachine], before: Stage | None) -> Stage:
    """The stage, by the ratio of spot to reliable machines.

    Args:
        machines: Of all members.
        before: The stage so far; None: the first one.
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
    """Members that should own slices, in their order; more than said, where these lack the room."""
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
    """By slice who should own it, the first owner first; nobody, where all lack the room.

    Args:
        servers: Of whom.
        settings: Of the job.
        rooms: Of each server for how many slices; None, or left out: for all.
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
    # Further ones have what room first ones leave.
    for number, lot in enumerate(lots):
        able = [member for member in lot if left[member] and member not in found[number]]
        others = able[: settings.owners - 1] if found[number] else []
        found[number] += tuple(others)
        left.update({member: left[member] - 1 for member in others})
    return tuple(found)
