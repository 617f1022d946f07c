"""Chaos with tiers: the victims of faults, and the minimum that a run must reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from common.core.messages import GroupStatus, LeaderStatus, ModelId, WorkerId
from common.errors import UnavailableError
from load.faults.fleet import Fleet, Slot
from load.faults.tiers import BARS, Reached, Tiers, tier_of
from load.harness.updates import Fallback

if TYPE_CHECKING:
    from common.embedded.services import EmbeddedService
    from load.harness.counting import CountingJob

BASE, HEAD = ModelId(1, 40), ModelId(1, 47)


class _Machine:
    """A process that is killed and restarted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.exit_code: int | None = None

    def kill(self) -> None:
        self.exit_code = -9

    def restart(self) -> None:
        self.exit_code = None


class _Job:
    """A job whose leader reports the owners of slices, or is unreachable."""

    def __init__(self, *owners: str) -> None:
        self.board = self
        self.owners: tuple[str, ...] | None = owners

    def get_leader_status(self) -> LeaderStatus:
        if self.owners is None:
            raise UnavailableError("Redis is unavailable")
        status = GroupStatus((), {}, 2, tuple(map(WorkerId, self.owners)))
        return LeaderStatus(1, 0, {}, 0, 0, 6, {}, group=status)


def fleet() -> tuple[Fleet, list[_Machine]]:
    machines = [_Machine(f"w{n + 1}") for n in range(6)]
    slots = [Slot(lambda _life, m=machine: cast("EmbeddedService", m)) for machine in machines]  # type: ignore[misc]
    return Fleet(slots), machines


def gone(machines: list[_Machine]) -> list[str]:
    return [machine.name for machine in machines if machine.exit_code is not None]


def test_tiers_lose_and_restart_the_machines_of_a_tier() -> None:
    workers, machines = fleet()
    tiers = Tiers(workers, cast("CountingJob", _Job()))
    assert [tier_of(n, 6) for n in range(6)] == ["reliable"] * 2 + ["spot"] * 4

    tiers.lose("spot")
    assert gone(machines) == ["w3", "w4", "w5", "w6"]
    tiers.bring_back()
    assert gone(machines) == []
    tiers.lose("reliable")
    assert gone(machines) == ["w1", "w2"]
    assert tiers.reached(60.0, 0, []).found["spot machines lost"] == 4


def test_tiers_lose_the_owners_named_by_the_leader() -> None:
    workers, machines = fleet()
    # No machine is named w9: a restarted machine has another name.
    job = _Job("w3", "w5", "w9")
    tiers = Tiers(workers, cast("CountingJob", job))
    tiers.lose_owners()
    assert gone(machines) == ["w3", "w5"]
    tiers.bring_back()

    job.owners = None
    tiers.lose_owners()
    tiers.bring_back()
    job.owners = ("w3",)
    tiers.look()  # the fault is over
    assert gone(machines) == []
    assert tiers.reached(60.0, 0, []).found["times all owners were killed"] == 1


def test_lead_from_version_0_is_not_a_lead_from_a_backup() -> None:
    tiers = Tiers(fleet()[0], cast("CountingJob", _Job()))
    fallbacks = [Fallback(0.0, BASE, HEAD), Fallback(1.0, ModelId(-1, 0), HEAD)]
    assert tiers.reached(60.0, 0, fallbacks).found["leads from a backup"] == 1


@pytest.mark.parametrize(("seconds", "share"), [(300.0, 1.0), (90.0, 0.5)])
def test_run_must_reach_every_minimum_scaled_by_its_length(seconds: float, share: float) -> None:
    whole = Reached(seconds, {name: max(1, round(bar * share)) for name, bar in BARS.items()})
    assert whole.failures() == []
    missed = Reached(seconds, {name: value - 1 for name, value in whole.found.items()})
    assert len(missed.failures()) == len(BARS)
    assert missed.as_data()["stage switches"] == {"value": 6 * share - 1, "bar": 6 * share}
