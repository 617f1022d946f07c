"""The provisioner: who leads, what is written before it is done, and how it ends."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from common.core.events import LeaseAnswered, Tick
from common.core.messages import GENESIS, UpdateApplied
from common.core.messages import Lead as Leads
from common.spot.machines import LaunchRequest, Offer
from common.spot.provisioning import commands as do
from common.spot.provisioning import events, policy_runner
from common.spot.provisioning.provisioner import CANDIDACY_S, Provisioner
from common.spot.provisioning.records import (
    Ended,
    LaunchRequested,
    Left,
    OfferPrice,
    Planned,
    Priced,
    ProvisionerLead,
    Reviewed,
    Settled,
    SlotAssigned,
    Started,
    client_token,
)
from common.spot.provisioning.stability import stability_of_fleet
from common.spot.provisioning.term import UNREAD_S
from tests.counting_policy import Counting
from tests.memory_fleet import MemoryFleet
from tests.unit.core.examples import batch
from tests.unit.spot.provisioning.examples import SETTINGS, T0, lead, ordered, planned, priced
from tests.unit.spot.provisioning.harness import ProviderThread, Street

if TYPE_CHECKING:
    from common.spot.policies.policy import Situation


@pytest.fixture
def street() -> Street:
    return Street()


def at_work(street: Street, name: str = "p1") -> ProviderThread:
    """Return a provisioner that leads, with all machines of its first plan."""
    harness = ProviderThread(street, name=name)
    harness.run(10)
    assert harness.provisioner.is_leader
    assert len(street.fleet.rented) == 4
    return harness


# --- leadership ----------------------------------------------------------------------------------


def test_candidate_with_lease_and_caught_up_log_becomes_leader() -> None:
    provisioner = Provisioner("p1", SETTINGS)

    assert provisioner.on(Tick(), T0) == (do.AskProvisioningLease(),)
    assert provisioner.on(LeaseAnswered(held=True), T0) == ()  # it has read nothing yet
    provisioner.on(events.PlansRead(((0, lead(-1, "old")),), caught_up=True), T0)
    stand = provisioner.on(LeaseAnswered(held=True), T0 + 1)
    assert stand == (do.AppendPlan(ProvisionerLead(0, "p1#1", T0 + 1)),)
    assert not provisioner.is_leader
    began = provisioner.on(events.PlansRead(((1, ProvisionerLead(0, "p1#1", T0 + 1)),)), T0 + 1)
    assert began == (do.BecameLeader(1), do.PollMachines(), do.PollPrices())
    assert provisioner.is_leader


def test_only_the_leader_reports_its_machines(street: Street) -> None:
    harness = at_work(street)
    standby = ProviderThread(street, name="p2")
    standby.holds_lease = False
    standby.run(1)

    report = harness.provisioner.report(street.clock())
    assert report is not None
    assert sum(report.running.values()) == 4
    assert report.updates == report.records == 0
    assert standby.provisioner.report(street.clock()) is None


def test_slower_of_two_candidates_waits_and_retries() -> None:
    provisioner = Provisioner("p1", SETTINGS)
    provisioner.on(events.PlansRead((), caught_up=True), T0)
    (stand,) = provisioner.on(LeaseAnswered(held=True), T0)
    assert isinstance(stand, do.AppendPlan)

    records = ((0, lead(-1, "p2#1")), (1, stand.record))
    assert provisioner.on(events.PlansRead(records), T0) == (
        do.StopProvisioning("another candidate was first"),
    )
    again = provisioner.on(LeaseAnswered(held=True), T0 + 1)
    assert again == (do.AppendPlan(ProvisionerLead(0, "p1#2", T0 + 1)),)


def test_candidacy_that_is_not_read_back_times_out() -> None:
    provisioner = Provisioner("p1", SETTINGS)
    provisioner.on(events.PlansRead((), caught_up=True), T0)
    provisioner.on(LeaseAnswered(held=True), T0)

    commands = provisioner.on(Tick(), T0 + CANDIDACY_S + 1)

    assert commands == (
        do.StopProvisioning("its candidacy was not confirmed in time"),
        do.AskProvisioningLease(),
    )


def test_leader_without_the_lease_steps_down(street: Street) -> None:
    harness = at_work(street)
    harness.holds_lease = False
    harness.run(10)

    assert harness.did(do.StopProvisioning) == [do.StopProvisioning("the lease is held by another")]
    assert not harness.provisioner.is_leader


def test_leader_that_reads_a_later_lead_steps_down(street: Street) -> None:
    harness = at_work(street)
    street.append(ProvisionerLead(harness.provisioner.ledger.term, "p2#1", T0))
    harness.holds_lease = False
    done = len(harness.done)
    street.fleet.preempt(1, 2)
    harness.run(30)

    assert harness.did(do.StopProvisioning)[0].reason == "p2#1 provisions from offset " + str(
        harness.provisioner.ledger.term
    )
    assert {type(command) for command in harness.done[done:]} == {
        do.StopProvisioning,
        do.AskProvisioningLease,
    }


def test_leader_whose_records_are_not_read_back_steps_down(street: Street) -> None:
    harness = at_work(street)
    harness.reads = False
    street.fleet.preempt(1)
    harness.run(UNREAD_S + 10)

    assert harness.did(do.StopProvisioning) == [
        do.StopProvisioning("its records were not read back in time")
    ]


# --- orders --------------------------------------------------------------------------------------


def test_order_is_sent_only_after_it_was_read_back(street: Street) -> None:
    harness = at_work(street)
    street.fleet.preempt(1, 3)
    harness.run(5)

    offsets = {
        record.launch: offset
        for offset, record in enumerate(street.records)
        if isinstance(record, LaunchRequested)
    }
    assert [launch for launch, _ in harness.launched] == [1, 2, 3, 4, 5, 6]
    assert all(offsets[launch] < read for launch, read in harness.launched)


def test_provisioner_does_not_decide_while_its_records_are_in_flight(street: Street) -> None:
    harness = at_work(street)
    harness.reads = False
    street.fleet.preempt(1)
    harness.run(5)
    street.fleet.preempt(2)
    written = len(street.log)
    harness.run(10)

    assert len(street.log) == written
    harness.reads = True
    harness.run(5)
    assert {record.launch for record in street.written(Ended)} == {1, 2}
    assert len(harness.provisioner.ledger.running) == 4


def test_first_plan_is_carried_out(street: Street) -> None:
    at_work(street)

    (plan,) = street.written(Planned)
    assert plan.why.startswith("first plan; not measured yet")
    assert [record.slot for record in street.written(LaunchRequested)] == [0, 1, 2, 3]
    assert [record.worker for record in street.written(LaunchRequested)] == [
        f"digits-w{slot}-{slot + 1}" for slot in range(4)
    ]
    assert len(street.written(Started)) == 4


def test_workers_of_a_slot_keep_their_name_with_held_streams(street: Street) -> None:
    harness = ProviderThread(street, replace(SETTINGS, on_preemption="hold"))
    harness.run(10)
    street.fleet.preempt(2)
    harness.run(10)

    names = [record.worker for record in street.written(LaunchRequested)]
    assert names == ["digits-w0", "digits-w1", "digits-w2", "digits-w3", "digits-w1"]


def test_preempted_machine_is_replaced(street: Street) -> None:
    harness = at_work(street)
    street.fleet.preempt(3)
    harness.run(5)

    assert [(record.launch, record.cause) for record in street.written(Ended)] == [(3, "preempted")]
    assert [m.slot for m in street.fleet.rented if m.state == "running"] == [0, 1, 3, 2]


def test_orders_to_a_refusing_pool_back_off(street: Street) -> None:
    harness = at_work(street)
    street.fleet.faults.without.add("spot")
    street.fleet.preempt(3)
    harness.run(40)

    asked = [record.at_s for record in street.written(LaunchRequested)][4:]
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps == [1, 2, 4, 8, 16]
    street.fleet.faults.without.discard("spot")
    harness.run(60)
    assert len(harness.provisioner.ledger.running) == 4


@pytest.mark.parametrize("given", [(), (1,), (1, 2, 3, 4)])
def test_restarted_provisioner_launches_nothing_twice(
    street: Street, given: tuple[int, ...]
) -> None:
    # The predecessor died when its orders were in the log, and some of them were launched.
    orders = [ordered(n, slot=n - 1) for n in (1, 2, 3, 4)]
    street.append(lead(-1, "old"))
    street.append(priced())
    street.append(planned(places=(1, 1, 1, 1)))
    for order in orders:
        street.append(order)
    for order in orders:
        token = client_token("digits", order.launch)
        if order.launch in given:
            request = LaunchRequest(order.launch, token, order.slot, order.pool, order.worker)
            street.fleet.launch([request])

    harness = ProviderThread(street, name="p2")
    harness.run(20)

    assert [machine.launch for machine in street.fleet.rented] == [1, 2, 3, 4]
    assert len(harness.provisioner.ledger.running) == 4


def test_orders_of_a_frozen_former_leader_have_no_effect(street: Street) -> None:
    ghost = at_work(street)
    orders = [order for command in ghost.did(do.Launch) for order in command.orders]
    successor = ProviderThread(street, name="p2")
    street.append(
        ProvisionerLead(ghost.provisioner.ledger.term, "p0#1", T0)
    )  # ends the ghost's term
    successor.run(10)
    street.fleet.preempt(1)
    successor.run(5)

    street.fleet.launch(orders)
    street.append(ordered(6, term=ghost.provisioner.ledger.term))
    successor.run(5)

    assert [machine.launch for machine in street.fleet.rented] == [1, 2, 3, 4, 5]
    assert successor.provisioner.ledger.launches == 5


# --- changes by users ----------------------------------------------------------------------------


def test_paused_job_releases_its_machines_and_resumes_with_new_ones(street: Street) -> None:
    harness = at_work(street)
    harness.on(events.ProvisioningWanted("paused"))
    harness.run(10)
    assert not harness.provisioner.ledger.open
    assert {record.cause for record in street.written(Ended)} == {"released"}

    harness.on(events.ProvisioningWanted("running"))
    harness.run(10)
    assert len(harness.provisioner.ledger.running) == 4


def test_stopped_job_is_settled_once_its_machines_ended(street: Street) -> None:
    harness = at_work(street)
    harness.on(events.ProvisioningWanted("stopped", "1000 updates applied"))
    assert not street.written(Settled)
    harness.run(10)

    (settled,) = street.written(Settled)
    assert settled.why == "1000 updates applied"
    assert settled.spent_usd == pytest.approx(harness.provisioner.ledger.spent_usd(settled.at_s))
    assert settled.predicted_usd == street.written(Planned)[-1].predicted_usd
    assert harness.did(do.ReleaseProvisioningLease)
    assert harness.did(do.FinishProvisioning) == [do.FinishProvisioning("1000 updates applied")]
    assert harness.provisioner.finished
    assert harness.provisioner.due() == float("inf")
    assert harness.provisioner.on(Tick(), T0) == ()


def test_standby_finishes_when_it_reads_the_settlement(street: Street) -> None:
    harness, standby = at_work(street), ProviderThread(street, name="p2")
    standby.holds_lease = False
    for one in (harness, standby):
        one.on(events.ProvisioningWanted("stopped", "done"))
    harness.run(10)
    standby.run(1)

    assert standby.provisioner.finished
    assert len(street.written(Settled)) == 1


def test_resumed_job_is_provisioned_again(street: Street) -> None:
    harness = at_work(street)
    harness.on(events.ProvisioningWanted("stopped", "by its owner"))
    harness.run(10)

    again = ProviderThread(street, name="p2")
    again.run(20)

    assert len(again.provisioner.ledger.running) == 4
    assert again.provisioner.ledger.settled is None


def test_job_is_not_settled_before_the_provider_answers(street: Street) -> None:
    harness = ProviderThread(street)
    street.fleet.go_away()
    harness.on(events.ProvisioningWanted("stopped", "done"))
    harness.run(30)
    assert not street.written(Settled)

    street.fleet.come_back()
    harness.run(10)
    assert harness.provisioner.finished


def test_successor_carries_out_the_previous_plan(street: Street) -> None:
    street.append(lead(-1, "old"))
    street.append(planned(places=(0, 1, -1, -1)))
    harness = ProviderThread(street)
    # The provider of prices is unavailable.
    street.prices.away = True
    harness.run(10)

    assert [(m.slot, m.pool) for m in street.fleet.rented] == [(0, "on-demand"), (1, "spot")]


# --- number of machines chosen by the tuner ------------------------------------------------------


BALANCED = replace(SETTINGS, balanced=True, updates=None, deadline_at_s=None)


def make_updates(harness: ProviderThread) -> None:
    """Make one update per second with gradients of 0.1 s: messages take most of the time."""
    for version in range(1, 31):
        harness.run(1)
        made = UpdateApplied(0, version, (batch(version),), 40, 1.0, gradient_s=0.1)
        harness.on(events.UpdateRecordsRead(((version, made),)))


def sizes(street: Street) -> list[int]:
    return [len(plan.places) for plan in street.written(Planned)]


def test_balanced_tuner_releases_machines_that_cost_more_than_they_save(street: Street) -> None:
    harness = ProviderThread(street, BALANCED)
    harness.run(10)
    harness.on(events.UpdateRecordsRead(((0, Leads(-1, GENESIS, "c", 0)),)))
    harness.on(events.RecordsCounted(1_000_000))  # records that wait

    make_updates(harness)
    # Gradients take 0.1 s of each second. The rest seems to be messages between four workers.
    assert sizes(street)[-1] == 1
    assert street.written(Planned)[-1].why.startswith("workers from 4 to 1")
    assert [machine.ended_s is None for machine in street.fleet.rented].count(True) == 1

    harness.on(events.ProvisioningChanged(replace(BALANCED, probability=0.9)))
    # The job's owner changed another setting, so the number of machines stays.
    assert sizes(street)[-1] == 1

    successor = ProviderThread(street, BALANCED, "p2")
    harness.holds_lease = False
    harness.run(10)
    successor.run(30)
    assert successor.provisioner.is_leader
    assert sizes(street)[-1] == 1


def test_fleet_size_stays_without_a_backlog_or_tuner(street: Street) -> None:
    for settings, waits in ((BALANCED, 0), (replace(BALANCED, balanced=False), 1_000_000)):
        street = Street()
        harness = ProviderThread(street, settings)
        harness.run(10)
        harness.on(events.UpdateRecordsRead(((0, Leads(-1, GENESIS, "c", 0)),)))
        harness.on(events.RecordsCounted(waits))
        make_updates(harness)
        assert set(sizes(street)) == {4}


def test_change_of_workers_applies_until_the_tuner_measured_it(
    street: Street,
) -> None:
    harness = ProviderThread(street, BALANCED)
    harness.run(10)
    harness.on(events.UpdateRecordsRead(((0, Leads(-1, GENESIS, "c", 0)),)))
    harness.on(events.RecordsCounted(1_000_000))
    make_updates(harness)
    assert sizes(street)[-1] == 1
    harness.on(events.ProvisioningChanged(replace(BALANCED, workers=6)))
    harness.run(5)
    assert sizes(street)[-1] == 6


def test_machine_record_has_type_and_zone_which_set_its_price(street: Street) -> None:
    street.fleet = MemoryFleet(street.clock, offers={"spot": (Offer("spot", "c5.large", "1a"),)})
    street.prices.set("spot", 0.4, "c5.large", "1a")
    harness = ProviderThread(street)
    harness.run(20.0)

    (priced, *_) = street.written(Priced)
    assert priced.offers == (OfferPrice("spot", "c5.large", "1a", 0.4),)
    kinds = {(each.pool, each.type, each.zone) for each in harness.provisioner.ledger.running}
    assert ("spot", "c5.large", "1a") in kinds
    assert harness.provisioner.ledger.paid_usd_per_hour["spot"] == pytest.approx(0.4)


# --- counted machines ----------------------------------------------------------------------------


# A preempted slot holds its streams. Two slots, on machines that start up in 3 s.
HOLDING = replace(
    SETTINGS,
    on_preemption="hold",
    workers=2,
    pools=tuple(replace(pool, start_up_s=3.0) for pool in SETTINGS.pools),
)


@pytest.fixture
def spares(street: Street, monkeypatch: pytest.MonkeyPatch) -> ProviderThread:
    """Return a leading provisioner with three spot machines and one on demand, for two slots."""
    policy = Counting(({Offer("spot"): 3, Offer("on-demand"): 1}, {Offer("spot"): 2}), 100.0)
    monkeypatch.setattr(policy_runner, "policy_of", lambda *_, **__: policy)
    harness = ProviderThread(street, HOLDING)
    harness.run(10)
    return harness


def test_spare_takes_over_a_lost_stream_and_is_replaced(
    street: Street, spares: ProviderThread
) -> None:
    first = street.written(LaunchRequested)
    assert [(each.slot, each.pool, each.worker) for each in first] == [
        *((None, "spot", f"digits-m{n}") for n in (1, 2, 3)),
        (None, "on-demand", "digits-m4"),
    ]
    begun = street.written(SlotAssigned)
    assert [(each.slot, each.launch, each.worker) for each in begun] == [
        (0, 1, "digits-w0"),
        (1, 2, "digits-w1"),
    ]
    assert all(each.at_s >= street.written(Started)[0].at_s + 3 for each in begun)

    street.fleet.preempt(2)
    spares.run(3)

    (passed,) = street.written(SlotAssigned)[2:]
    assert (passed.slot, passed.launch) == (1, 3)
    assert passed.at_s <= street.written(Ended)[0].at_s + 2.0
    assert [each.pool for each in street.written(LaunchRequested)[4:]] == ["spot"]
    assert len(spares.provisioner.ledger.running) == 4


def test_successor_knows_assigned_slots_and_orders_nothing_twice(
    street: Street, spares: ProviderThread
) -> None:
    written = len(street.written(LaunchRequested))
    spares.holds_lease = False
    spares.run(2)
    successor = ProviderThread(street, HOLDING, name="p2")
    successor.run(10)

    assert successor.provisioner.is_leader
    assert len(street.written(LaunchRequested)) == written
    assert len(street.written(SlotAssigned)) == 2
    slots = {each.launch: each.slot for each in successor.provisioner.ledger.open}
    assert slots == {1: 0, 2: 1, 3: None, 4: None}


def test_spares_are_released_when_fewer_machines_are_wanted(spares: ProviderThread) -> None:
    spares.run(100)
    running = [(each.pool, each.slot) for each in spares.provisioner.ledger.running]
    assert running == [("spot", 0), ("spot", 1)]


def test_policy_sees_running_and_starting_machines(street: Street, spares: ProviderThread) -> None:
    street.fleet.faults.without.add("spot")
    street.fleet.preempt(1, 2, 3)
    spares.run(4)

    record = street.written(Planned)[-1]
    assert (record.spot, record.on_demand, record.places) == (3, 1, ())
    term = spares.provisioner._term  # noqa: SLF001 -- no public access to a policy's situation
    assert term is not None
    situation = term._policy.situation(street.clock())  # noqa: SLF001 -- as above
    assert situation.machines == {Offer("on-demand"): (1, 0)}
    assert situation.up.tolist() == [True, False]
    assert situation.lag_s is not None
    assert (situation.lag_s > 0).tolist() == [False, True]


def test_reassigned_machines_are_ready_at_their_first_heartbeat(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The market file gives a start-up of 60 s, but the first heartbeats of the three spot machines
    # come a few seconds after their start.
    counting = Counting(({Offer("spot"): 3, Offer("on-demand"): 1},), 100.0)
    monkeypatch.setattr(policy_runner, "policy_of", lambda *_, **__: counting)
    pools = tuple(replace(pool, start_up_s=60.0) for pool in SETTINGS.pools)
    harness = ProviderThread(street, replace(SETTINGS, pools=pools))

    def situation() -> Situation:
        term = harness.provisioner._term  # noqa: SLF001 -- no public access to a policy's situation
        assert term is not None
        return term._policy.situation(street.clock())  # noqa: SLF001 -- as above

    for _ in range(5):
        harness.run(1)
        harness.on(events.HeartbeatsSeen(frozenset(), street.clock()))
    assert situation().machines == {Offer("spot"): (0, 3), Offer("on-demand"): (0, 1)}
    assert {pool.start_up_s for pool in situation().pools} == {60.0}

    harness.run(1)
    spot = [each for each in harness.provisioner.ledger.running if each.pool == "spot"]
    members = frozenset(each.member for each in spot)
    harness.on(events.HeartbeatsSeen(members, street.clock()))

    assert situation().machines == {Offer("spot"): (3, 0), Offer("on-demand"): (0, 1)}
    on_demand, learnt = situation().pools
    assert on_demand.start_up_s == 60.0
    assert learnt.start_up_s == pytest.approx(
        street.clock() - street.written(Started)[0].at_s, abs=0.5
    )


def test_spare_does_not_count_towards_stability(street: Street, spares: ProviderThread) -> None:
    spares.run(30)
    (review, *_) = street.written(Reviewed)[::-1]
    assert review.running == 4
    arrivals = review.believed["arrivals_per_s"].value
    term = spares.provisioner._term  # noqa: SLF001 -- as above
    assert term is not None
    situation = term._policy.situation(street.clock())  # noqa: SLF001 -- as above
    assert situation.work.records_per_s == pytest.approx(arrivals, rel=0.1)
    assert review.stability == pytest.approx(stability_of_fleet(2, situation).ratio, rel=0.1)


def test_slot_is_reassigned_when_heartbeats_of_its_worker_end(
    street: Street, spares: ProviderThread
) -> None:
    # Worker w1 sends heartbeats alone, then w0, too, and then w1 alone again. A worker has not left
    # before its first heartbeat.
    def heartbeats(*slots: int) -> None:
        members = frozenset(f"digits-w{slot}" for slot in slots)
        spares.on(events.HeartbeatsSeen(members, street.clock()))
        spares.run(1)

    for _ in range(20):
        heartbeats(1)
    heartbeats(0, 1)
    for _ in range(14):
        heartbeats(1)
        # No worker has a heartbeat after Redis restarted empty.
        heartbeats()
        heartbeats(0, 1)
    assert street.written(Left) == []
    for _ in range(17):
        heartbeats(1)

    (left,) = street.written(Left)
    passed = street.written(SlotAssigned)[-1]
    assert (left.launch, passed.slot, passed.launch) == (1, 0, 3)
    assert [each.pool for each in street.written(LaunchRequested)[4:]] == ["spot"]
    running = [each.launch for each in spares.provisioner.ledger.running]
    # Machine 1 is released later if it does not end by itself.
    assert running == [1, 2, 3, 4, 5]
    spares.run(150)
    assert 1 not in [each.launch for each in spares.provisioner.ledger.running]
