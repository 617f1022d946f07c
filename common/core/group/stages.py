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
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.core.messages import Member, Tier
    from common.core.settings import SliceSettings, Stage

# Spot machines to a reliable one above which a stage ends: thresholds of AgileML (EuroSys 2017).
ENDS = {1: 1.0, 2: 15.0}
HYSTERESIS = 0.2  # so much further the ratio must go until a stage is left


class Machine(NamedTuple):
    """A member by the machine that it runs on."""

    member: Member
    tier: Tier
    began_s: float  # when its process did, since 1970


def stage_of(machines: Iterable[Machine], before: Stage | None) -> Stage:
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
    machines: Iterable[Machine], stage: Stage, settings: SliceSettings
) -> tuple[Member, ...]:
    """Members that should own slices, in their order."""
    wanted = "reliable" if stage == 1 else "spot"
    ranked = sorted(machines, key=lambda each: (each.tier != wanted, each.began_s, each.member))
    right = sum(each.tier == wanted for each in ranked)
    auto = right if stage == 1 else right // 2
    count = max(auto if settings.servers is None else settings.servers, settings.owners)
    return tuple(sorted(each.member for each in ranked[:count]))


@lru_cache(maxsize=64)
def wanted_owners(
    servers: tuple[Member, ...], settings: SliceSettings
) -> tuple[tuple[Member, ...], ...]:
    """By slice who should own it, the first owner first.

    Args:
        servers: At least one.
        settings: Of the job.
    """
    found, load = list[tuple["Member", ...]](), Counter["Member"]()
    most = -(-settings.count // len(servers))
    for number in range(settings.count):
        drawn = sorted(servers, key=lambda m: (crc32(f"{m.life} {number}".encode()), m))
        first = next(member for member in drawn if load[member] < most)
        load[first] += 1
        others = islice((each for each in drawn if each != first), settings.owners - 1)
        found.append((first, *others))
    return tuple(found)
