"""Availability as measured by the job itself."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from common.spot.provisioning.availability import Availability, prior_of
from common.spot.provisioning.fleet_ledger import FleetLedger
from common.spot.provisioning.records import Ended, Planned, PlanRecord, Settled, Started
from common.spot.theory.estimates import availability_from_times, cycle_from_times
from tests.unit.spot.provisioning.examples import (
    SPOT,
    T0,
    ended,
    lead,
    ordered,
    planned,
    started,
)


def watched(*records: PlanRecord) -> Availability:
    """Return the availability after these records. All of them count."""
    ledger, found = FleetLedger(), Availability()
    for offset, record in enumerate((lead(), *records)):
        assert ledger.feed(offset, record)
        rented = None
        if isinstance(record, (Started, Ended)):
            rented = ledger.machines[record.launch]
        found.feed(record, rented)
    return found


def seen(up_s: float, down_s: float, outages: int) -> tuple[object, object]:
    """Return availability and cycle for these times, with the market file's prior."""
    return (
        availability_from_times(up_s, down_s, outages, prior_of(SPOT)).value,
        cycle_from_times(up_s, down_s, outages, prior_of(SPOT)).value,
    )


def seen_at(found: Availability, now_s: float) -> tuple[object, object]:
    return found.availability(SPOT, now_s).value, found.cycle(SPOT, now_s).value


def test_availability_without_observations_is_that_of_the_market_file() -> None:
    assert seen_at(watched(), T0) == (pytest.approx(0.9), pytest.approx(100.0))


def test_slot_is_up_from_start_to_end_and_down_until_the_next_start() -> None:
    # up 100 s, preempted, down 20 s, up 30 s so far
    found = watched(
        ordered(1),
        started(1, T0),
        ended(1, T0 + 100, "preempted"),
        ordered(2),
        started(2, T0 + 120),
    )

    assert seen_at(found, T0 + 150) == seen(130, 20, 1)


def test_ongoing_outage_counts_and_is_not_ended_by_refusals() -> None:
    found = watched(
        ordered(1),
        started(1, T0),
        ended(1, T0 + 100, "preempted"),
        ordered(2),
        ended(2, T0 + 101, "refused"),
    )

    assert seen_at(found, T0 + 130) == seen(100, 30, 1)


def test_released_machine_is_not_an_outage() -> None:
    found = watched(ordered(1), started(1, T0), ended(1, T0 + 100, "released"))

    assert seen_at(found, T0 + 500) == seen(100, 0, 0)


def test_outage_ends_when_the_slot_moves_to_another_pool() -> None:
    elsewhere: Planned = msgspec.structs.replace(planned(1, places=(0, 1, 1, 0)), at_s=T0 + 110)
    found = watched(ordered(1), started(1, T0), ended(1, T0 + 100, "preempted"), elsewhere)

    assert seen_at(found, T0 + 500) == seen(100, 10, 1)


def test_time_without_a_provisioner_does_not_count_as_outage() -> None:
    found = watched(ordered(1), started(1, T0), ended(1, T0 + 100, "preempted"), lead(0, "c2"))

    assert seen_at(found, T0 + 500) == seen(100, 0, 1)


def test_outage_ends_when_the_job_is_paused_or_settled() -> None:
    records = (ordered(1), started(1, T0), ended(1, T0 + 100, "preempted"))
    paused = watched(*records)
    paused.unwanted(T0 + 110)
    over = watched(*records, Settled(0, T0 + 110, "done", 0.0, 0.0, None))

    assert seen_at(paused, T0 + 500) == seen_at(over, T0 + 500) == seen(100, 10, 1)


def test_availability_of_1_in_the_market_file_can_be_revised() -> None:
    sure = replace(SPOT, availability=1.0)

    assert 0.99 < float(watched().availability(sure, T0).value) < 1
