"""Elections: the updates topic alone decides who leads, and a successor resumes from a snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import pytest

from common.core import commands as do
from common.core import events
from common.core.audit import audit
from common.core.coordinator import AGAIN_S, CANDIDACY_S, SEARCH_S
from common.core.history import History
from common.core.messages import (
    GENESIS,
    CheckpointStored,
    Failed,
    Lead,
    ModelId,
    Quarantined,
    Requeued,
    UpdateApplied,
)
from common.core.snapshot_publishing import LOOKS
from common.core.snapshot_search import SEARCH_AGAIN_S
from common.core.snapshots import Snapshot, genesis
from common.core.spans import LogPosition
from tests.unit.core.bench import QUIET, Bench
from tests.unit.core.examples import FIRST, A, B, P, answer, batch, of_kind, the

if TYPE_CHECKING:
    from common.core.commands import CoordinatorCommand
    from common.core.messages import AuditRecord
    from common.core.settings import CoordinatorSettings

HELD = events.LeaseAnswered(held=True)
NOT_HELD = events.LeaseAnswered(held=False)


def two(settings: CoordinatorSettings = QUIET) -> tuple[Bench, Bench]:
    """Return two replicas of one job."""
    one = Bench(settings)
    return one, Bench(settings, updates=one.updates, control=one.control, name="c2")


def effective(updates: list[AuditRecord | None]) -> tuple[ModelId, ...]:
    """Return the updates that count."""
    history = History()
    for offset, record in enumerate(updates):
        history.feed(offset, record)
    return history.path


# --- election --------------------------------------------------------------------------------


def test_candidate_with_lease_loads_snapshot_then_appends_lead() -> None:
    # tick: ask   held: find   found: restore   restored: append Lead   read back as valid: begin
    bench = Bench()
    assert bench.tick(0.0) == (do.AskLease(1.0),)
    assert bench.feed(NOT_HELD) == ()
    assert bench.feed(HELD) == (do.FindSnapshots("hot"),)
    assert bench.feed(HELD) == ()  # a renewal, while it searches
    assert bench.find("hot") == (do.FindSnapshots("all"),)  # no leader before
    assert bench.find("all") == (do.FindSnapshots("genesis"),)
    assert bench.find("genesis") == (do.RestoreSnapshot(genesis(FIRST)),)
    assert bench.feed(events.SnapshotRestored(0)) == (do.AppendAudit(Lead(-1, GENESIS, "c1#1", 0)),)
    assert bench.feed(HELD) == ()  # still a candidate
    assert bench.machine.leader is None
    assert the(bench.read_updates(), do.Begin).epoch == 0
    assert bench.machine.leader is not None


def test_lease_is_renewed_three_times_within_its_ttl() -> None:
    bench = Bench(replace(QUIET, lease_ttl_s=3.0))
    halves = [half / 2 for half in range(8)]
    assert [now for now in halves if do.AskLease(3.0) in bench.tick(now)] == [0.0, 1.0, 2.0, 3.0]
    assert bench.machine.due() == 4.0


def test_slower_of_two_candidates_steps_down_and_retries() -> None:
    # updates   0: Lead(-1) of c2   1: Lead(-1) of c1, void
    one, other = two()
    one.stand()
    one.updates.clear()  # its Lead is in flight
    other.stand()
    one.updates.append(Lead(-1, GENESIS, "c1#1", 0))
    said = one.read_updates()
    assert said == (do.StepDown("another coordinator was elected"), do.ReleaseLease())
    assert other.read_updates(1)[0] == do.Begin(0, genesis(FIRST))
    assert other.read_updates() == ()  # a void Lead deposes no leader
    assert other.machine.leader is not None
    assert one.feed(HELD) == (do.FindSnapshots("hot"),)  # tries again


def test_candidate_that_reads_a_lead_while_loading_steps_down() -> None:
    one, other = two()
    one.feed(HELD)
    one.find("hot")
    one.find("all")
    one.find("genesis")
    other.lead()
    assert one.read_updates() == (do.StepDown("another coordinator was elected"), do.ReleaseLease())
    assert one.feed(events.SnapshotRestored(0)) == ()


def test_later_valid_lead_deposes_the_leader() -> None:
    # updates   0: Lead(-1) of c1   1: Lead(0) of c2
    one, other = two()
    one.lead()
    other.lead()
    assert other.epoch == 2
    said = one.read_updates()
    assert said == (do.StepDown("c2#1 leads with epoch 2"), do.ReleaseLease())
    assert one.machine.leader is None


def test_leader_that_loses_its_lease_steps_down() -> None:
    bench = Bench()
    bench.lead()
    assert bench.feed(NOT_HELD)[0] == do.StepDown("another coordinator has the lease")
    # The replies were meant for its earlier leadership.
    assert bench.feed(events.RepliesRead(())) == ()
    assert bench.feed(NOT_HELD) == ()


def poll_streams(bench: Bench, times: int) -> list[do.StepDown]:
    """Let Kafka answer a leader's polls of the streams; return its resignations."""
    answers = [bench.feed(events.StreamsSeen({P: "id"}, number=9)) for _ in range(times)]
    return [each for said in answers for each in of_kind(said, do.StepDown)]


@pytest.mark.parametrize("operator", [False, True])
def test_leader_whose_last_record_was_lost_steps_down(*, operator: bool) -> None:
    # updates   0: Lead   1: J=1, lost before it was read   1: in one case, an operator's record
    bench = Bench()
    bench.lead()
    bench.see(A, B)
    bench.announce(A, B)
    the(bench.compute(), do.Apply)
    bench.updates.pop()
    bench.updates += [Requeued(batch(7), "ada", 1.0)] * operator
    bench.read_updates()
    assert poll_streams(bench, LOOKS - 1) == []
    assert poll_streams(bench, 2) == [
        do.StepDown("Kafka does not return the records that this leader wrote")
    ]
    bench.lead()
    bench.see(A, B)
    bench.read_control()
    assert the(bench.compute(), do.Apply).update.version == 1
    assert effective(bench.updates) == (GENESIS, bench.model)


def test_records_read_back_late_do_not_depose_the_leader() -> None:
    bench = Bench()
    bench.lead()
    bench.see(A, B)
    for version in range(1, 4):
        bench.announce(A, B)
        bench.compute()
        assert poll_streams(bench, LOOKS - 1) == []
        bench.read_updates()
        assert poll_streams(bench, 2 * LOOKS) == []  # nothing is awaited
        assert bench.model.version == version


def test_leader_deposed_for_slowness_requests_a_longer_lease() -> None:
    bench = Bench(replace(QUIET, lease_ttl_s=1.0))
    asked = []
    for deposed in range(4):
        bench.lead()
        bench.feed(NOT_HELD)
        # This refusal reaches a standby. It does not count as another slow leadership.
        bench.feed(NOT_HELD)
        asked += of_kind(bench.tick(100.0 * (deposed + 1)), do.AskLease)
    assert [each.ttl_s for each in asked] == [2.0, 4.0, 4.0, 4.0]


def test_candidate_whose_lead_does_not_come_back_retries() -> None:
    bench = Bench()
    bench.stand()
    assert of_kind(bench.tick(CANDIDACY_S), do.StepDown) == []
    said = bench.tick(CANDIDACY_S + 0.1)
    assert of_kind(said, do.StepDown) == [
        do.StepDown("this coordinator stood for election and was not elected in time")
    ]
    (lead,) = of_kind(bench.stand(), do.AppendAudit)
    # The candidate's first Lead was in the topic all along, so the next one follows it.
    assert lead.record == Lead(0, GENESIS, "c1#2", 2)
    assert the(bench.read_updates(), do.Begin).epoch == 2


def test_candidacy_times_out_from_delivery_of_its_lead() -> None:
    # at   0: loads the weights   50: has them, and appends its Lead   100: the Lead is delivered
    #      160.1: has not read the Lead back, and steps down
    bench = Bench()
    bench.feed(HELD)
    bench.find("hot")
    bench.find("all")
    bench.find("genesis")
    bench.now = 50.0
    bench.feed(events.SnapshotRestored(0))
    bench.now = 90.0
    # A report on an earlier candidacy changes nothing.
    bench.feed(events.LeadDelivered("c1#0"))
    assert of_kind(bench.tick(100.0), do.StepDown) == []
    bench.feed(events.LeadDelivered("c1#1"))
    assert of_kind(bench.tick(100.0 + CANDIDACY_S), do.StepDown) == []
    assert of_kind(bench.tick(100.1 + CANDIDACY_S), do.StepDown)


@pytest.mark.parametrize("how_far", ["has no weights yet", "stands", "leads"])
def test_failed_attempt_is_abandoned_at_once_and_retried_later(
    how_far: str,
) -> None:
    bench = Bench()
    bench.feed(HELD)
    bench.find("hot")
    bench.find("all")
    bench.find("genesis")
    if how_far != "has no weights yet":
        bench.feed(events.SnapshotRestored(0))
    if how_far == "leads":
        bench.read_updates()
        assert bench.machine.leader is not None

    said = bench.feed(events.AttemptFailed("the topic is full"))

    assert said == (do.StepDown("the topic is full"), do.ReleaseLease())
    assert bench.feed(events.AttemptFailed("again")) == ()
    assert bench.feed(HELD) == ()
    bench.now += AGAIN_S + 0.1
    assert bench.feed(HELD) == (do.FindSnapshots("hot"),)


def test_failed_search_is_repeated_soon_and_unanswered_one_later() -> None:
    bench = Bench()
    assert bench.feed(HELD) == (do.FindSnapshots("hot"),)
    assert bench.feed(events.AttemptFailed("Redis is unavailable")) == ()
    assert bench.feed(HELD) == ()
    bench.now += AGAIN_S + 0.1
    assert bench.feed(HELD) == (do.FindSnapshots("hot"),)
    bench.now += AGAIN_S + 0.1
    assert bench.feed(HELD) == ()
    bench.now += SEARCH_S
    assert bench.feed(HELD) == (do.FindSnapshots("hot"),)


def test_late_failure_does_not_delay_later_search() -> None:
    bench = Bench()
    bench.feed(HELD)
    bench.feed(NOT_HELD)
    bench.feed(events.AttemptFailed("Redis is unavailable"))
    assert bench.feed(HELD) == (do.FindSnapshots("hot"),)


# --- a checkpoint that is not found ----------------------------------------------------------


def test_leader_appends_a_checkpoint_that_was_read_back() -> None:
    bench = Bench()
    assert bench.feed(events.CheckpointVerified(ModelId(0, 0))) == ()
    bench.lead()

    name = ModelId(bench.epoch, 0)
    said = bench.feed(events.CheckpointVerified(name))
    assert said == (do.AppendAudit(CheckpointStored(*name)),)
    assert bench.feed(events.CheckpointVerified(ModelId(bench.epoch - 1, 0))) == ()


def missing() -> Bench:
    """Return a candidate that finds no snapshot although the history names a checkpoint."""
    update = UpdateApplied(0, 1, (batch(0),), 10, 1.0)
    bench = Bench(updates=[Lead(-1, GENESIS, "c0", 0), update, CheckpointStored(0, 1)])
    bench.feed(HELD)
    bench.find("hot")
    bench.now += bench.lease_ttl_s
    bench.feed(HELD)
    bench.find("hot")
    bench.find("all")
    return bench


def test_candidate_without_the_named_checkpoint_waits_and_searches_again() -> None:
    bench = missing()
    awaited, released = bench.find("genesis")

    assert isinstance(awaited, do.AwaitCheckpoint)
    assert "a checkpoint is missing: 0-1, but " in awaited.reason
    assert released == do.ReleaseLease()
    assert bench.machine.due() == pytest.approx(bench.now + SEARCH_AGAIN_S)
    assert bench.tick(bench.now + SEARCH_AGAIN_S) == (do.AskLease(1.0),)
    assert bench.feed(HELD) == (do.FindSnapshots("hot"),)


def test_candidate_waiting_for_checkpoint_searches_at_once_when_owner_decides() -> None:
    bench = missing()
    bench.find("genesis")

    bench.feed(events.WantedChanged("running", after_loss=1, from_start=True))
    assert bench.machine.due() <= bench.now
    assert bench.tick(bench.now) == (do.AskLease(1.0),)
    bench.feed(HELD)
    bench.find("hot")
    bench.find("all")
    assert bench.find("genesis") == (do.RestoreSnapshot(genesis(FIRST)),)


def test_job_that_waits_for_a_checkpoint_can_be_stopped() -> None:
    bench = missing()
    bench.feed(events.WantedChanged("stopped"))
    said = bench.find("genesis")

    assert the(said, do.Finish).stopped
    assert bench.machine.finished


# --- pace ------------------------------------------------------------------------------------


def woken(bench: Bench, seconds: float) -> list[tuple[CoordinatorCommand, ...]]:
    """Return the commands at each due time within this many seconds."""
    end = bench.now + seconds
    said = [bench.tick(bench.now)]
    while (due := bench.machine.due()) <= end:
        said.append(bench.tick(due))
    return said


def test_leader_without_workers_wakes_only_to_renew_its_lease() -> None:
    bench = Bench(replace(QUIET, hot_every_s=1.0, lease_ttl_s=1.0, idle_s=0.5))
    bench.lead()

    said = woken(bench, 10.0)

    assert len(said) == pytest.approx(30, abs=1)
    assert all(of_kind(each, do.AskLease) for each in said)
    polls = sum(len(of_kind(each, do.ReadHeartbeats)) for each in said)
    leader_statuses = sum(len(of_kind(each, do.PutLeaderStatus)) for each in said)
    assert polls == leader_statuses == pytest.approx(15, abs=1)  # the renewal after idle_s


def test_first_worker_or_claim_restores_the_fast_pace() -> None:
    bench = Bench(QUIET)
    bench.lead()
    bench.see(A)
    assert bench.machine.due() <= bench.now + QUIET.alive_s
    assert of_kind(bench.tick(bench.now + QUIET.alive_s), do.ReadHeartbeats)

    alone = Bench(QUIET)
    alone.lead()
    # A round begins, and a worker for it may come at any moment.
    alone.announce(A, B)
    assert alone.machine.due() <= alone.now + QUIET.alive_s


def test_lost_search_answer_is_requested_again() -> None:
    bench = Bench()
    assert bench.feed(HELD) == (do.FindSnapshots("hot"),)
    bench.now = SEARCH_S + 0.1
    assert bench.feed(HELD) == (do.FindSnapshots("hot"),)


def test_answer_after_loss_of_the_lease_is_ignored() -> None:
    bench = Bench()
    bench.feed(HELD)
    assert bench.feed(NOT_HELD) == ()
    assert bench.find("hot") == ()
    assert bench.feed(HELD) == (do.FindSnapshots("hot"),)


def test_leader_obeys_pause_requested_before_it_led() -> None:
    bench = Bench()
    bench.feed(events.WantedChanged("paused"))
    bench.lead()
    bench.see(A, B)
    assert of_kind(bench.announce(A, B), do.PostTrigger) == []


# --- takeovers -------------------------------------------------------------------------------


def test_successor_takes_back_updates_above_its_snapshot() -> None:
    # one   Lead  J=1 of a0 b1 (published)  J=2 of a2 b3       J=3: too late, void
    # two                                              Lead(0) base J=1      J=2' of a2 b3
    one, other = two(replace(QUIET, hot_every_updates=1))
    one.lead()
    one.see(A, B)
    one.announce(A, B, A, B, A, B)
    one.compute()
    one.read_updates()
    one.compute()
    (snapshot,) = one.published

    other.lead(snapshot)
    one.compute()  # it does not know yet
    assert one.updates[3] == Lead(0, ModelId(0, 1), "c2#1", 4)
    assert other.model == ModelId(4, 1)

    other.see(A, B)
    other.read_control()
    assert other.leader_status.waiting == 4
    update = the(other.compute(), do.Apply).update
    assert (update.version, {b.offset for b in update.batches}) == (2, {2, 3})
    assert effective(one.updates) == (GENESIS, ModelId(0, 1), ModelId(4, 2))
    assert the(one.read_updates(), do.StepDown).reason == "c2#1 leads with epoch 4"


def test_successor_without_snapshot_starts_from_genesis() -> None:
    one, other = two()
    one.lead()
    one.see(A, B)
    one.announce(A, B)
    one.compute()
    other.lead()
    other.see(A, B)
    other.read_control()
    assert other.leader_status.claimed[P] == 20
    other.compute()
    assert effective(one.updates) == (GENESIS, ModelId(3, 1))
    assert audit(FIRST, enumerate(one.control), enumerate(one.updates)).flaws == ()


def test_snapshot_taken_back_by_later_lead_is_not_used() -> None:
    # one   Lead J=1 (snapshot s)      two   Lead(0) from the genesis, without having seen s
    one, other = two(replace(QUIET, hot_every_updates=1))
    one.lead()
    one.see(A, B)
    one.announce(A, B)
    one.compute()
    one.read_updates()
    other.lead()
    third = Bench(updates=one.updates, control=one.control, name="c3")
    begin = the(third.lead(*one.published), do.Begin)
    assert begin.snapshot.made == GENESIS


def test_quarantine_survives_takeover_and_dead_letter_is_rewritten() -> None:
    one, other = two()
    one.lead()
    one.see(A, B)
    one.announce(A, B)
    one.feed(events.RepliesRead((Failed(B, one.model, (1,), "expired"),)))
    said = other.lead()
    assert the(said, do.DeadLetterBatch).record.batch == batch(1, B)
    other.see(A, B)
    other.read_control()
    assert other.leader_status.waiting == 1


def test_quarantine_survives_snapshot_taken_before_its_claim_was_replayed() -> None:
    # one     reads a0 b1, quarantines b1
    # two     begins at the genesis, reads a0 only, takes a snapshot
    # three   begins with that snapshot, so it reads no record of the quarantine; replays b1
    one, other = two(replace(QUIET, hot_every_s=1.0))
    one.lead()
    one.see(A, B)
    one.announce(A, B)
    one.feed(events.RepliesRead((Failed(B, one.model, (1,), "expired"),)))

    other.lead()
    other.feed(events.ControlRead(((0, one.control[0]),)))
    other.tick(other.now + 1.0)
    (snapshot,) = other.published
    assert (snapshot.control_position, snapshot.quarantined) == (1, (batch(1, B),))

    third = Bench(updates=one.updates, control=one.control, name="c3")
    third.lead(snapshot)
    third.read_control()
    assert third.leader_status.waiting == 1


def test_failure_counts_and_sample_count_survive_a_takeover() -> None:
    # one   J=1 of a0 b1   b3 raises: 1 failure   snapshot
    # two                                                    b3 raises: 2 > 1 failures, poison
    one, other = two(replace(QUIET, hot_every_s=1.0, max_failures=1))
    one.lead()
    one.see(A, B)
    one.announce(A, B, A, B)
    one.compute()
    one.read_updates()
    one.feed(events.RepliesRead((Failed(B, one.model, (3,), "raised"),)))
    one.tick(1.0)
    (snapshot,) = one.published
    assert (snapshot.samples, snapshot.failure_counts) == (20, {3: 1})

    other.lead(snapshot)
    other.see(A, B)
    assert [len(order.batches) for order in other.orders] == [1, 1]
    said = other.feed(events.RepliesRead((Failed(B, other.model, (3,), "raised"),)))
    assert isinstance(the(said, do.AppendAudit).record, Quarantined)


def test_batch_put_back_once_is_awaited_by_the_successor() -> None:
    # one   J=1 of a0, b1 is put back      two   group b1 a2: b1 is overdue, and awaited
    one, other = two(replace(QUIET, hot_every_updates=1, on_missing="proceed"))
    one.lead()
    one.see(A, B)
    one.announce(A, B)
    one.feed(events.RepliesRead((answer(one.orders[0], one.model),)))
    one.tick(0.5)
    one.read_updates()
    one.announce(A)

    other.lead(*one.published)
    other.see(A, B)
    other.read_control()
    mine = next(order for order in other.orders if order.worker == A)
    other.feed(events.RepliesRead((answer(mine, other.model),)))
    said = other.tick(9.0)
    assert of_kind(said, do.Apply) == []
    assert [b.offset for order in other.orders for b in order.batches] == [1]


def test_snapshot_records_positions_of_its_topics() -> None:
    # updates "u1"   0: Lead, leader epoch 2    control "c1"   0 and 1: garbage, leader epoch 5
    bench = Bench()
    bench.feed(HELD)
    for source in get_args(events.Source):
        snapshots = (genesis(FIRST),) if source == "genesis" else ()
        bench.feed(events.SnapshotsFound(source, snapshots, (), 0, {}, "c1", "u1"))
    bench.feed(events.SnapshotRestored(70))
    bench.feed(events.UpdatesRead(tuple(enumerate(bench.updates)), epoch=2))
    bench.feed(events.ControlRead(((0, None), (1, None)), epoch=5))
    bench.feed(events.BoardWiped())

    first, second = bench.published
    assert (first.updates, first.control) == (LogPosition(1, "u1", 2), LogPosition(0, "c1"))
    assert (second.updates, second.control) == (LogPosition(1, "u1", 2), LogPosition(2, "c1", 5))


def test_lead_after_a_loss_is_above_epochs_known_only_from_a_snapshot() -> None:
    # The updates topic is empty, Redis has a snapshot of epoch 500, and the clock says 70.
    # If this Lead is lost, and another candidate appends one in the same situation, both have the
    # same epoch with a probability of 1 in 4096.
    bench = Bench()
    bench.feed(events.WantedChanged("running", after_loss=1, from_start=True))
    ahead = Snapshot(500, ModelId(500, 3), 4, 0, FIRST)
    bench.feed(HELD)
    for source in get_args(events.Source):
        snapshots = (genesis(FIRST),) if source == "genesis" else (ahead,)
        bench.feed(events.SnapshotsFound(source, snapshots, (), 0, {ahead.rank: "it was cut"}))
    said = bench.feed(events.SnapshotRestored(70))

    lead = the(said, do.AppendAudit).record
    assert isinstance(lead, Lead)
    assert (lead.epoch, lead.after, lead.base, lead.after_loss) == (571, -1, GENESIS, 1)
    assert lead.loss == "version 3: it was cut"
