"""Hand-over of the weights while a job runs: the new owner starts from what is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import UNSET

from common.core import commands as do
from common.core import events
from common.core.messages import GENESIS, Lead, ModelId
from common.core.settings import AggregationSettings, SliceSettings
from common.core.snapshots import Snapshot
from tests.unit.core.bench import QUIET, Bench, changed
from tests.unit.core.examples import A, B, P, of_kind, the
from tests.unit.core.leaders import update
from tests.unit.core.test_group import GROUP, begun

if TYPE_CHECKING:
    from msgspec import UnsetType

    from common.core.settings import CoordinatorSettings
    from tests.unit.core.leaders import Topic

BOARD = changed(GROUP, aggregation=None, revision=1)
MEMBERS = changed(QUIET, aggregation=AggregationSettings(), revision=1)
SLICED = changed(GROUP, aggregation=AggregationSettings(slices=SliceSettings(2)), revision=1)
MADE = ModelId(0, 1)


def led() -> Bench:
    """Return a leader that holds the weights, after its first update."""
    bench = Bench()
    bench.lead()
    bench.see(A, B)
    bench.announce(A, B)
    bench.compute()
    bench.read_updates()
    return bench


def ordered(bench: Bench, since: int) -> list[int]:
    """Return the batches requested since that number of commands."""
    triggers = [each.trigger for each in of_kind(bench.said[since:], do.PostTrigger)]
    return [b.offset for trigger in triggers for order in trigger.orders for b in order.batches]


def test_leader_stores_newest_version_for_members_and_stands_again() -> None:
    # J=1 of 0, 1   2, 3 in flight: put back   J=1 stored, in a snapshot   Lead(base J=1), members
    bench = led()
    bench.announce(A, B)
    said = bench.feed(events.SettingsChanged(MEMBERS))
    published = the(said, do.PublishSnapshot)
    assert (published.snapshot.made, published.checkpoint, published.state) == (MADE, True, True)
    assert [each.offset for each in published.snapshot.waiting] == [2, 3]
    since = len(bench.said)
    bench.announce(A, B)
    assert ordered(bench, since) == []

    said = bench.feed(events.StateStored(MADE))
    stored = the(said, do.PublishSnapshot).snapshot
    assert (stored.made, stored.stored) == (MADE, (MADE,))
    assert [type(each) for each in said[-2:]] == [do.StepDown, do.FindSnapshots]
    bench.find("hot", stored)
    assert of_kind(bench.said, do.RestoreSnapshot)[-1].members
    bench.feed(events.SnapshotRestored(5))
    lead = bench.updates[-1]
    assert isinstance(lead, Lead)
    assert (lead.base, lead.exact, lead.slices) == (MADE, True, 0)
    bench.read_updates()
    bench.see(A, B)
    orders = of_kind(bench.said, do.PostTrigger)[-1].trigger.group
    assert orders is not UNSET
    assert (orders.made, orders.slices) == (MADE, 0)


def test_members_store_newest_version_and_coordinator_starts_with_it() -> None:
    group = begun(A, B)
    group.finish(A, B)
    group.read_back()
    group.bench.announce(A, B, A)
    # Members have entered the next update, which has these batches.
    group.settle()
    group.bench.feed(events.SettingsChanged(BOARD))
    group.settle()
    assert len(group.stores) == 1
    assert of_kind(group.bench.said, do.StepDown)
    stored = group.bench.published[-1]
    assert (stored.made, stored.in_storage) == (ModelId(0, 1), True)
    assert [each.offset for each in stored.waiting] == [3, 4, 5]
    bench = group.bench
    bench.find("hot", stored)
    restored = of_kind(bench.said, do.RestoreSnapshot)[-1]
    assert (restored.snapshot.made, restored.members) == (MADE, False)
    bench.feed(events.SnapshotRestored(5))
    lead = bench.updates[-1]
    assert isinstance(lead, Lead)
    assert (lead.base, lead.exact, lead.slices) == (MADE, True, UNSET)
    bench.read_updates()
    assert bench.machine.leader is not None


def test_handover_before_first_update_stores_nothing() -> None:
    bench = Bench()
    bench.lead()
    said = bench.feed(events.SettingsChanged(MEMBERS))
    assert not of_kind(said, do.PublishSnapshot)
    assert [type(each) for each in said[-2:]] == [do.StepDown, do.FindSnapshots]


def test_handover_reverted_before_it_is_stored_changes_nothing() -> None:
    bench = led()
    bench.announce(A, B)
    bench.feed(events.SettingsChanged(MEMBERS))
    since = len(bench.said)
    bench.feed(events.SettingsChanged(changed(QUIET, revision=2)))
    assert ordered(bench, since) == [2, 3]
    bench.feed(events.StateStored(MADE))  # too late to count
    assert not of_kind(bench.said, do.StepDown)


def test_handover_needs_the_newest_version_in_storage() -> None:
    bench = led()
    bench.feed(events.SettingsChanged(MEMBERS))
    bench.feed(events.StateStored(GENESIS))
    assert not of_kind(bench.said, do.StepDown)


def test_change_of_slices_needs_no_new_lead() -> None:
    one = AggregationSettings(slices=SliceSettings(2, owners=1))
    group = begun(A, B, bench=Bench(SLICED))
    assert all(len(owners) == 2 for owners in group.owners())
    group.finish(A, B)
    group.read_back()
    group.bench.feed(events.SettingsChanged(changed(SLICED, aggregation=one, revision=2)))
    group.see()
    group.settle()
    assert all(len(owners) == 1 for owners in group.owners())
    assert not of_kind(group.bench.said, do.StepDown)


@pytest.mark.parametrize(
    ("settings", "in_force", "stored", "leads"),
    [
        # Only members have the weights, so they store them first.
        (BOARD, 0, (), 0),
        (BOARD, 0, (MADE,), UNSET),
        (BOARD, 2, (), 2),
        (SLICED, 0, (), 0),
        (SLICED, 0, (MADE,), 2),
        # The coordinator stores the weights first.
        (MEMBERS, UNSET, (), UNSET),
        (MEMBERS, UNSET, (MADE,), 0),
        (MEMBERS, 0, (), 0),
    ],
)
def test_candidate_uses_the_mode_of_its_job_only_if_it_can_have_the_newest_update(
    settings: CoordinatorSettings,
    in_force: int | UnsetType,
    stored: tuple[ModelId, ...],
    leads: int | UnsetType,
) -> None:
    topic: Topic = [Lead(-1, GENESIS, "c0", 0, slices=in_force), update(0, 1, 0, 1)]
    bench = Bench(settings, updates=topic)
    snapshot = Snapshot(*(0, MADE, 2, 2, {P: 20}), stored=stored or UNSET, slices=in_force)
    bench.stand(snapshot)
    assert isinstance(lead := bench.updates[-1], Lead)
    assert (lead.base, lead.slices) == (MADE, leads)
    assert lead.exact == (UNSET if leads is in_force is UNSET else True)


def test_update_of_members_before_a_board_lead_voids_it() -> None:
    topic: Topic = [Lead(-1, GENESIS, "c0", 0, slices=0), update(0, 1, 0, 1)]
    bench = Bench(BOARD, updates=topic)
    stored = Snapshot(0, MADE, 2, 2, {P: 20}, stored=(MADE,), slices=0)
    bench.stand(stored)
    bench.updates.insert(2, update(0, 2, 2, 3))
    assert the(bench.read_updates(), do.FindSnapshots).source == "hot"
    bench.find("hot", stored)
    bench.feed(events.SnapshotRestored(9))
    assert isinstance(lead := bench.updates[-1], Lead)
    assert (lead.base, lead.slices) == (ModelId(0, 2), 0)
    bench.read_updates()
    assert bench.machine.leader is not None
    assert bench.machine.leader.handover.requested


def test_member_snapshot_is_not_used_if_the_coordinator_led_last() -> None:
    # The members' snapshot is stale: it does not say that J=1 is stored, but the leader of epoch 0
    # stored J=1, and c1 started from it.
    topic: Topic = [
        Lead(-1, GENESIS, "c0", 0, slices=0),
        update(0, 1, 0, 1),
        Lead(0, MADE, "c1", 5, exact=True),
    ]
    bench = Bench(changed(QUIET, revision=2), updates=topic)
    members = Snapshot(0, MADE, 2, 2, {P: 20}, slices=0)
    bench.stand(members)
    assert isinstance(lead := bench.updates[-1], Lead)
    assert (lead.base, lead.slices) == (GENESIS, UNSET)
