"""Reliable and spot machines, lost a tier at a time or if they own slices of the weights."""

from __future__ import annotations

import time
from collections.abc import Collection
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import UnavailableError

if TYPE_CHECKING:
    from common.core.messages import Tier, WorkerId
    from load.faults.fleet import Fleet, Slot
    from load.harness.counting import CountingJob
    from load.harness.updates import Fallback

# One of this many machines is reliable.
_RELIABLE = 3
# Time between checks which workers own slices.
_LOOK_S = 0.1
# A shorter run must reach proportionally less.
_WHOLE_S = 180.0
# Minimum counts in a run of at least `_WHOLE_S`.
BARS = {
    "stage switches": 6,
    "spot machines lost": 24,
    "times all owners were killed": 1,
    "leads from a backup": 1,
}


def tier_of(number: int, workers: int) -> Tier:
    """Return the tier of a slot's machine. With three slots or more both tiers occur."""
    return "reliable" if number < workers // _RELIABLE else "spot"


class Reached(NamedTuple):
    """Counts that a run reached, and its length."""

    seconds: float
    # Counts, by the names of `BARS`.
    found: dict[str, int]

    def as_data(self) -> dict[str, Any]:
        """Return the counts for the JSON file."""
        return {
            name: {"value": value, "bar": self._bar(name)} for name, value in self.found.items()
        }

    def failures(self) -> list[str]:
        """Return the bars that were missed."""
        return [
            f"{name}: {value}, expected at least {self._bar(name)}"
            for name, value in self.found.items()
            if value < self._bar(name)
        ]

    def _bar(self, name: str) -> int:
        return ceil(BARS[name] * min(1.0, self.seconds / _WHOLE_S))


class Tiers:
    """Strikes a run's workers by their tier."""

    def __init__(self, workers: Fleet, job: CountingJob) -> None:
        self._workers = workers
        self._job = job
        # Lost slots, until they are brought back.
        self._lost = list["Slot"]()
        self._spot_lost = self._owners_lost = 0
        self._awaits_owners = False
        self._look_at = 0.0

    def lose(self, tier: Tier) -> None:
        """Lose all machines of a tier at once."""
        self._kill([slot for slot in self._workers.slots if self._tier(slot) == tier])

    def lose_owners(self) -> None:
        """Lose all owners of slices, as soon as the leader's status names them."""
        self._awaits_owners = True
        self.look()

    def look(self) -> None:
        """Do what is due. Call it often."""
        if not self._awaits_owners or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_S
        owners = self._owners()
        if lost := [slot for slot in self._workers.slots if slot.name in owners]:
            self._awaits_owners = False
            self._owners_lost += 1
            self._kill(lost)

    def bring_back(self) -> None:
        """Replace the lost machines."""
        self._awaits_owners = False
        lost, self._lost = self._lost, []
        for slot in lost:
            slot.bring_back()

    def reached(self, seconds: float, switches: int, fallbacks: Collection[Fallback]) -> Reached:
        """Return the counts of the run.

        Args:
            seconds: Time during which faults occurred.
            switches: Number of stage switches that leaders logged.
            fallbacks: Leads that rolled updates back.
        """
        backups = sum(each.base.version > 0 for each in fallbacks)
        found = (switches, self._spot_lost, self._owners_lost, backups)
        return Reached(seconds, dict(zip(BARS, found, strict=True)))

    def _kill(self, slots: list[Slot]) -> None:
        self._lost += slots
        self._spot_lost += sum(self._tier(slot) == "spot" for slot in slots)
        for slot in slots:
            slot.kill()

    def _tier(self, slot: Slot) -> Tier:
        return tier_of(self._workers.slots.index(slot), len(self._workers.slots))

    def _owners(self) -> frozenset[WorkerId]:
        try:
            status = self._job.board.get_leader_status()
        except UnavailableError:
            return frozenset()
        return frozenset(status.group.owners if status is not None and status.group else ())
