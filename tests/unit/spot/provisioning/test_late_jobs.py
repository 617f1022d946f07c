"""Jobs that miss their deadline anyway keep their machines, under every policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

import pytest

from common.config.policy_names import PolicyName
from common.core.messages import GENESIS, Lead, UpdateApplied
from common.spot.provisioning import events
from common.spot.provisioning.records import Ended, LaunchRequested, Planned
from tests.unit.core.examples import batch
from tests.unit.spot.provisioning.examples import ON_DEMAND, SETTINGS, SPOT, T0, batches
from tests.unit.spot.provisioning.harness import ProviderThread, Street

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.spot.provisioning.settings import ProvisionerSettings

STARTS_S = {"on-demand": 30.0, "spot": 40.0}
POOLS = (
    replace(ON_DEMAND, start_up_s=STARTS_S["on-demand"]),
    replace(SPOT, cycle_s=1000.0, start_up_s=STARTS_S["spot"]),
)
# A gradient of four records a second. With four workers, the job takes 180 s.
GRADIENT_S, UPDATES = 4.5, 40
# All streams together. The records of an update, K b = 40, arrive within half a second.
RATE_PER_S = 80.0
STEP_S = 2


def run(street: Street, settings: ProvisionerSettings, seconds: int) -> Iterator[tuple[int, float]]:
    """Run a job whose machines work once they have started up. Yields the time and the updates."""
    harness, made, known = ProviderThread(street, settings), 0.0, 0
    harness.on(events.UpdateRecordsRead(((0, Lead(-1, GENESIS, "c", 0)),)))
    claims = batches(int(RATE_PER_S * seconds / settings.batch_size), RATE_PER_S)
    for second in range(STEP_S, seconds + 1, STEP_S):
        harness.run(STEP_S, STEP_S)
        arrived = int(RATE_PER_S * second)
        since = arrived - int(RATE_PER_S * STEP_S)
        new = slice(since // settings.batch_size, arrived // settings.batch_size)
        harness.on(events.ClaimsRead(tuple(claims[new])))
        harness.on(events.RecordsCounted(arrived))
        works = [
            each
            for each in street.fleet.machines()
            if each.state == "running" and street.clock() >= each.started_s + STARTS_S[each.pool]
        ]
        made = min(made + STEP_S * min(len(works), 4) / 4 / GRADIENT_S, UPDATES)
        for version in range(known + 1, int(made) + 1):
            update = UpdateApplied(0, version, (batch(version),), 40, 1.0, gradient_s=GRADIENT_S)
            harness.on(events.UpdateRecordsRead(((version, update),)))
        known = int(made)
        yield second, made


@pytest.mark.parametrize("deadline_s", [60.0, 150.0])
@pytest.mark.parametrize("mode", ["reassign", "hold"])
@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_job_too_late_for_its_deadline_keeps_machines_and_ends_early(
    policy: PolicyName, mode: Literal["reassign", "hold"], deadline_s: float
) -> None:
    # all machines  ░░░░████████████████████████████████████  180 s of work
    # one more start-up, if a plan before the deadline moves workers: ░░░░
    # deadline                  |
    street = Street(joins_s=STARTS_S)
    settings = replace(
        SETTINGS,
        pools=POOLS,
        policy=policy,
        on_preemption=mode,
        updates=UPDATES,
        deadline_at_s=T0 + deadline_s,
    )
    took_s = next(at_s for at_s, made in run(street, settings, 400) if made == UPDATES)

    assert took_s <= 180 + 40 + 60
    started_s = {each.launch: each.started_s for each in street.fleet.rented}
    released = [each for each in street.written(Ended) if each.cause == "released"]
    pools = {each.launch: each.pool for each in street.written(LaunchRequested)}
    for each in released:
        assert each.at_s - started_s[each.launch] >= STARTS_S[pools[each.launch]]
    # Nothing moves after the deadline, except at a review soon after it.
    late_s = T0 + deadline_s + 60
    assert not [each for each in released if each.at_s > late_s]
    assert not [each for each in street.written(LaunchRequested) if each.at_s > late_s]
    assert len(street.written(Planned)) <= 8
