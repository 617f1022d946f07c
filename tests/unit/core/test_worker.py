"""The stream side of a worker: its positions, its claims, and its pauses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core import worker_messages as do
from common.core import worker_messages as events
from common.core.batching import DecodedRun
from common.core.commands import PostTrigger
from common.core.events import RepliesRead
from common.core.ledger import Ledger
from common.core.liveness import ALIVE, TOO_FEW
from common.core.messages import (
    BatchReady,
    Claim,
    Failed,
    LeaderStatus,
    Opened,
    SpanExpired,
    Unsettled,
)
from common.core.settings import WorkerSettings
from common.core.spans import LogPosition, Partition, Span
from common.core.worker_reading import COMMIT_S, LOST_S, UNDECIDED_S, Worker
from tests.unit.core.bench import Bench
from tests.unit.core.examples import FIRST, SAMPLES, A, B, P, Q, of_kind, ready, span, the

if TYPE_CHECKING:
    from common.core.worker_messages import WorkerCommand

SETTINGS = WorkerSettings(batch_size=SAMPLES, bound=3)
READ_ON = do.SetReading(reading=True, reason="")


class _Stream(Worker):
    """A worker's stream side with partitions, fed by short calls."""

    def __init__(self, *own: Partition, settings: WorkerSettings = SETTINGS) -> None:
        super().__init__(A, settings)
        self.on(events.Assigned(own or (P,)), 0.0)

    def read(
        self, start: int, end: int, partition: Partition = P, now: float = 0.0
    ) -> tuple[WorkerCommand, ...]:
        return self.on(events.Decoded(DecodedRun(partition, range(start, end), (), 0.0, 0.0)), now)

    def deliver(self, **offsets: int) -> None:
        """Report the control offset of each claim, by the claim's number: `_1=4, _2=7`."""
        for number, offset in offsets.items():
            self.on(events.Delivered(int(number[1:]), offset), 0.0)

    def stand(
        self,
        control_position: int,
        p: int = 0,
        *,
        oldest_unsettled: int = 0,
        waiting: int = 0,
        live: int = 1,
        now: float = 0.0,
    ) -> tuple[WorkerCommand, ...]:
        """Report a status in which P is claimed up to `p`; return the commands except commits."""
        leader_status = LeaderStatus(
            0, control_position, {P: p, Q: 0}, oldest_unsettled, waiting, live, {}
        )
        commands = self.on(events.LeaderStatusSeen(leader_status), now)
        return tuple(each for each in commands if not isinstance(each, do.Commit))


def place(position: int, partition: Partition = P) -> do.Place:
    """Return the command to read from this position, in a log with unknown epochs."""
    return do.Place({partition: LogPosition(position)})


def claims(commands: tuple[WorkerCommand, ...]) -> list[Claim]:
    return [announced.claim for announced in of_kind(commands, do.Announce)]


# --- positions -------------------------------------------------------------------------------


def test_stream_reads_nothing_without_a_leader_status() -> None:
    stream = _Stream()
    assert stream.on(events.LeaderStatusSeen(None), 0.0) == ()
    assert stream.read(0, 10) == (do.Unplace(P),)
    assert stream.stand(0, p=40) == (place(40), READ_ON)
    assert stream.position(P) == 40


def test_stream_reads_on_while_claimed_is_the_end_of_its_own_claims() -> None:
    # announced  [0:10] at 4   [10:20] at 7   [20:25
    # status     control=5 claimed=10     control=8 claimed=20
    stream = _Stream()
    stream.stand(0)
    assert claims(stream.read(0, 25)) == [ready(A, span(P, 0, 10)), ready(A, span(P, 10, 20))]
    stream.deliver(_1=4, _2=7)
    assert stream.stand(5, p=10, waiting=1) == ()
    assert stream.stand(8, p=20, waiting=2) == ()
    assert stream.position(P) == 25


def test_partition_that_another_claimed_is_placed_again_once_all_claims_are_decided() -> None:
    # announced  [0:10] at 4   [10:20] at 7   [20:25
    # status     5, claimed=15: place lost   7: claims undecided   8, claimed=35: reads from 35
    stream = _Stream()
    stream.stand(0)
    stream.read(0, 25)
    stream.deliver(_1=4, _2=7)
    assert stream.stand(5, p=15) == (do.Unplace(P),)
    assert stream.read(25, 30) == (do.Unplace(P),)
    assert stream.stand(7, p=35) == ()
    assert stream.stand(8, p=35) == (place(35),)
    assert claims(stream.read(35, 45)) == [ready(A, span(P, 35, 45))]  # [20:25] was dropped


def test_claim_without_delivery_report_may_still_be_decided() -> None:
    stream = _Stream()
    stream.stand(0)
    stream.read(0, 10)
    # The claim is the worker's own, and only its report is late.
    assert stream.stand(9, p=10) == ()
    assert stream.stand(10, p=30) == (do.Unplace(P),)
    assert stream.stand(11, p=30) == ()
    stream.deliver(_1=8)
    assert stream.stand(11, p=30) == (place(30),)


def test_older_status_of_the_leader_is_believed_again_after_a_forged_one() -> None:
    #   time    0      1         2     4.1
    #  control  8      2^40      8     8
    #           seen   seen      -     seen: P is read from 20 again
    stream = _Stream()
    stream.stand(8, 20)
    assert of_kind(stream.stand(2**40, 2**40, now=1.0), do.Place) == [place(2**40)]
    assert stream.stand(8, 20, now=2.0) == ()
    assert of_kind(stream.stand(8, 20, now=4.1), do.Place) == [place(20)]


def test_older_leader_status_is_ignored() -> None:
    stream = _Stream()
    stream.stand(8, p=20)
    assert stream.stand(7, p=10, waiting=100) == ()
    assert stream.position(P) == 20


def test_loss_of_one_partition_keeps_open_records_of_others() -> None:
    stream = _Stream(P, Q)
    stream.stand(0)
    stream.read(0, 5, P)
    stream.read(0, 3, Q)
    assert stream.stand(1, p=50) == (do.Unplace(P), place(50))
    assert claims(stream.read(3, 10, Q)) == [ready(A, span(Q, 0, 10))]


def test_returning_partition_waits_until_earlier_claims_are_decided() -> None:
    stream = _Stream()
    stream.stand(0)
    stream.read(0, 15)
    stream.deliver(_1=4)
    assert stream.on(events.Revoked((P,)), 0.0) == (do.Unplace(P),)
    stream.on(events.Assigned((P,)), 0.0)
    assert stream.stand(4, p=0) == ()
    assert stream.stand(5, p=10) == (place(10),)


steps = st.lists(
    st.sampled_from(["read", "append", "report", "decide", "stand", "steal", "rebalance"]),
    max_size=60,
)


@given(steps)
def test_stream_is_placed_once_all_its_claims_are_decided(
    steps: list[str],
) -> None:
    stream, ledger, control = _Stream(), Ledger(FIRST), list[Claim]()
    sent, appended, reported = list[do.Announce](), dict[int, int](), set[int]()
    drain = ["append", "report", "decide"] * len(steps) + ["stand"]
    for step in [*steps, *drain]:
        commands: tuple[WorkerCommand, ...] = ()
        match step:
            case "read":
                start = stream.position(P) or 0
                commands = stream.read(start, start + 7)
            case "append" if len(appended) < len(sent):
                announced = sent[len(appended)]
                appended[announced.number] = len(control)
                control.append(announced.claim)
            case "report" if len(reported) < len(appended):
                reported.add(len(reported) + 1)
                stream.deliver(**{f"_{len(reported)}": appended[len(reported)]})
            case "decide" if ledger.position < len(control):
                ledger.decide(ledger.position, control[ledger.position])
            case "stand":
                commands = stream.stand(ledger.position, p=ledger.claimed[P])
                for _ in of_kind(commands, do.Place):
                    assert len(reported) == len(sent)
                    assert all(offset < ledger.position for offset in appended.values())
            case "steal":
                start = ledger.claimed[P]
                control.append(ready(B, span(P, start, start + 4)))
            case "rebalance":
                stream.on(events.Revoked((P,)), 0.0)
                stream.on(events.Assigned((P,)), 0.0)
        sent += of_kind(commands, do.Announce)
    position = stream.position(P)
    assert position is not None
    (claim,) = claims(stream.read(position, position + SAMPLES))[:1]
    assert ledger.decide(len(control), claim).accepted


# --- pace ------------------------------------------------------------------------------------


def test_bound_pauses_reading_until_batches_are_settled() -> None:
    stream = _Stream()
    stream.stand(0)
    assert stream.room == 30
    assert the(stream.read(0, 30), do.SetReading).reason == "enough of this worker's batches wait"
    assert stream.room == 0
    stream.deliver(_1=0, _2=1, _3=2)
    assert stream.stand(3, p=30, waiting=3) == ()
    gone = do.Forget(((span(P, 0, 10),),))  # below the horizon
    assert stream.stand(3, p=30, waiting=2, oldest_unsettled=1) == (gone, READ_ON)


def test_batches_are_forgotten_although_control_offsets_restarted() -> None:
    # control    at 7: [0:10]   recreated      at 0: [10:20], which is settled; [0:10] never is
    stream = _Stream()
    stream.stand(0)
    stream.read(0, 2 * SAMPLES)
    stream.deliver(_1=7)
    stream.deliver(_2=0)
    gone = do.Forget(((span(P, 10, 20),),))
    assert gone in stream.stand(1, p=20, oldest_unsettled=1)


def test_refused_batches_do_not_fill_the_bound() -> None:
    stream = _Stream()
    stream.stand(0)
    stream.read(0, 30)
    stream.deliver(_1=1, _2=2, _3=3)
    stolen = stream.stand(4, p=5, waiting=1)
    assert stolen == (do.Unplace(P), place(5), READ_ON)


def test_stream_pauses_while_more_waits_than_live_workers_can_have() -> None:
    stream = _Stream()
    stream.stand(0)
    assert stream.stand(1, waiting=6, live=1) == ()
    paused = do.SetReading(reading=False, reason="enough batches of the job wait")
    assert stream.stand(2, waiting=7, live=1) == (paused,)
    assert stream.stand(3, waiting=7, live=2) == (READ_ON,)


def test_expired_records_are_claimed_after_the_records_read() -> None:
    # Reads 0 to 4. Retention deletes up to 40: claims [0:5], then [5:40] as expired; reads from 40.
    stream = _Stream()
    assert stream.on(events.FellBehind(P, 40), 0.0) == ()  # not placed
    stream.stand(0)
    stream.read(0, 5)
    assert stream.on(events.FellBehind(P, 5), 0.0) == (place(5),)  # nothing is missing
    assert stream.on(events.FellBehind(P, 40), 0.0) == (
        do.Announce(1, BatchReady(A, (span(P, 0, 5),), 5), (5,)),
        do.Announce(2, SpanExpired(A, (Span(*P, 5, 40, known=5),)), (0,)),
        place(40),
    )
    stream.deliver(_1=0, _2=1)
    assert stream.stand(2, p=40, waiting=1) == ()


def test_rest_below_min_batch_waits_for_a_record_and_the_heartbeat_says_so() -> None:
    # Record 0 is read; its linger ends without a claim. Record 1 is read: both are claimed.
    stream = _Stream(settings=replace(SETTINGS, batch_linger_s=1.0, min_batch=2))
    stream.stand(0)
    stream.read(0, 1)
    before = stream.on(events.Tick(), 0.5)
    said = stream.on(events.Tick(), 2.0)
    assert (claims(before), claims(said)) == ([], [])
    assert the(before, do.SendHeartbeat) == do.SendHeartbeat(ALIVE)
    assert the(said, do.SendHeartbeat) == do.SendHeartbeat(TOO_FEW)

    stream.read(1, 2, now=3.0)
    said = stream.on(events.Tick(), 3.0)
    assert claims(said) == [BatchReady(A, (span(P, 0, 2),), 2)]
    assert the(said, do.SendHeartbeat) == do.SendHeartbeat(ALIVE)


def test_rest_below_min_batch_expires_with_records_that_retention_deleted() -> None:
    # Record 0 is read, but not claimed. Retention deletes it and all others below 40.
    stream = _Stream(settings=replace(SETTINGS, min_batch=2))
    stream.stand(0)
    stream.read(0, 1)
    assert stream.on(events.FellBehind(P, 40), 0.0) == (
        do.Announce(1, SpanExpired(A, (Span(*P, 0, 40, known=1),)), (0,)),
        place(40),
    )


def test_end_of_a_log_without_records_is_claimed_as_an_empty_batch() -> None:
    # records [0:10], offset 10 holds none; nothing follows for a second: [10:11] of no samples
    stream = _Stream()
    stream.on(events.Tick(), 0.0)
    stream.on(events.EndReached(P, 11), 0.0)  # not placed
    stream.stand(0)
    stream.read(0, 10)
    assert stream.on(events.EndReached(P, 10), 0.5) == ()  # nothing is missing
    assert stream.on(events.EndReached(P, 11), 0.5) == ()
    assert stream.due() <= 1.5
    assert claims(stream.on(events.Tick(), 1.4)) == []
    end = Span(*P, 10, 11, known=10)
    assert claims(stream.on(events.Tick(), 1.5)) == [ready(A, end, samples=0)]
    assert claims(stream.on(events.Tick(), 9.0)) == []
    assert stream.position(P) == 11
    stream.deliver(_1=0, _2=1)
    assert stream.stand(2, p=11, waiting=1) == ()  # nothing is lost
    assert claims(stream.read(11, 21)) == [ready(A, span(P, 11, 21))]


def test_records_after_an_empty_end_are_claimed_with_it() -> None:
    # Offset 10 holds no record. Records [11:20] arrive within a second: the next batch is [10:20].
    stream = _Stream()
    stream.on(events.Tick(), 0.0)
    stream.stand(0)
    stream.read(0, 10)
    stream.on(events.EndReached(P, 11), 0.5)
    assert claims(stream.read(11, 21, now=1.0)) == [ready(A, span(P, 10, 21))]
    assert claims(stream.on(events.Tick(), 9.0)) == []


def test_empty_end_is_claimed_with_the_open_batch_of_its_partition() -> None:
    stream = _Stream(settings=replace(SETTINGS, batch_linger_s=5.0))
    stream.on(events.Tick(), 0.0)
    stream.stand(0)
    stream.read(0, 4)
    stream.on(events.EndReached(P, 5), 0.5)
    whole = Span(*P, 0, 5, known=4)
    assert claims(stream.on(events.Tick(), 5.0)) == [ready(A, whole, samples=4)]


@pytest.mark.parametrize(
    "gone",
    [events.Revoked((P,)), events.LeaderStatusSeen(LeaderStatus(0, 1, {P: 5, Q: 0}, 0, 0, 1, {}))],
    ids=["revoked", "place lost"],
)
def test_empty_end_of_a_revoked_or_lost_partition_is_not_claimed(gone: events.WorkerEvent) -> None:
    stream = _Stream()
    stream.on(events.Tick(), 0.0)
    stream.stand(0)
    stream.on(events.EndReached(P, 3), 0.5)
    stream.on(gone, 0.6)
    assert claims(stream.on(events.Tick(), 9.0)) == []


def test_partial_batch_is_claimed_after_its_linger_but_not_when_leaving() -> None:
    stream = _Stream(settings=replace(SETTINGS, batch_linger_s=0.05))
    stream.on(events.Tick(), 0.0)
    stream.stand(0)
    stream.read(0, 4)
    assert stream.due() == 0.05
    assert stream.on(events.Tick(), 0.04) == ()
    assert claims(stream.on(events.Tick(), 0.05)) == [ready(A, span(P, 0, 4), samples=4)]

    stream.read(4, 8, now=0.06)
    stream.on(events.Leaving(), 0.06)
    assert claims(stream.on(events.Tick(), 1.0)) == []
    assert stream.due() > 1.0


def test_leaving_stops_reading_and_continues_heartbeats() -> None:
    stream = _Stream()
    stream.stand(0)
    paused = do.SetReading(reading=False, reason="leaving")
    assert stream.on(events.Leaving(), 0.0)[1:] == (do.SendHeartbeat("leaving"), paused)
    assert stream.on(events.Tick(), 0.0) == (do.SendHeartbeat("leaving"), do.ReadLeaderStatus())


def test_leader_status_is_read_often_while_unplaced_and_rarely_while_reading() -> None:
    stream = _Stream()
    assert stream.on(events.Tick(), 1.0) == (do.SendHeartbeat("alive"), do.ReadLeaderStatus())
    assert stream.due() == pytest.approx(1.0 + SETTINGS.leader_status_hungry_s)
    stream.stand(0)
    assert stream.due() == pytest.approx(1.0 + SETTINGS.leader_status_s)


# --- commits for lag tools -------------------------------------------------------------------


def committed(
    stream: Worker, now: float, control: int, p: int, oldest: int, epoch: int = 0
) -> list[do.Commit]:
    """Let a worker see a status that decided claims below `control`; return its commits."""
    status = LeaderStatus(epoch, control, {P: p, Q: 70}, oldest, 0, 1, settled={})
    return of_kind(stream.on(events.LeaderStatusSeen(status), now), do.Commit)


def test_only_positions_of_owned_partitions_are_committed() -> None:
    assert committed(_Stream(Q), 0.0, 9, 50, oldest=9) == [do.Commit({Q: 70})]


def test_settled_frontier_is_committed_every_five_seconds() -> None:
    stream = _Stream()
    assert committed(stream, 0.0, 9, 50, oldest=9) == [do.Commit({P: 50})]
    assert committed(stream, COMMIT_S - 0.1, 10, 60, oldest=10) == []
    assert committed(stream, COMMIT_S, 10, 60, oldest=10) == [do.Commit({P: 60})]


def test_position_is_committed_once_no_batch_claimed_below_it_waits() -> None:
    # control position    5    9    12    12
    # claimed             50   90   120   120
    # oldest unsettled    3    5    6     none
    # committed           -    50   50    120
    stream, times = _Stream(), iter(range(0, 100, 5))
    assert committed(stream, next(times), 5, 50, oldest=3) == []
    assert committed(stream, next(times), 9, 90, oldest=5) == [do.Commit({P: 50})]
    assert committed(stream, next(times), 12, 120, oldest=6) == [do.Commit({P: 50})]
    assert committed(stream, next(times), 12, 120, oldest=12) == [do.Commit({P: 120})]


def test_new_leader_may_move_a_commit_back() -> None:
    stream = _Stream()
    assert committed(stream, 0.0, 12, 120, oldest=12) == [do.Commit({P: 120})]
    assert committed(stream, 5.0, 9, 90, oldest=9, epoch=1) == [do.Commit({P: 90})]


def test_new_leader_status_does_not_settle_claims_seen_by_the_earlier_leader() -> None:
    # leader 0: 120 claimed below 12, some wait     leader 1: the control topic had lost a claim
    stream = _Stream()
    assert committed(stream, 0.0, 12, 120, oldest=3) == []
    assert committed(stream, 5.0, 14, 110, oldest=13, epoch=1) == []
    assert committed(stream, 10.0, 14, 110, oldest=14, epoch=1) == [do.Commit({P: 110})]


@given(st.lists(st.sampled_from(["claim", "compute", "audit", "poison"]), max_size=30))
def test_no_commit_is_above_a_waiting_batch(steps: list[str]) -> None:
    bench, stream = Bench(), _Stream()
    bench.lead()
    bench.see(A, B)
    for number, step in enumerate(steps):
        if step == "claim":
            bench.announce(A, B)
        elif step == "audit":
            bench.read_updates()
        elif not of_kind(bench.said, PostTrigger):
            continue
        elif step == "poison":
            model, orders = bench.model, bench.orders
            failed = Failed(
                orders[0].worker, model, tuple(b.offset for b in orders[0].batches), "raised"
            )
            bench.feed(RepliesRead((failed,)))
        else:
            bench.compute()
        leader = bench.machine.leader
        if leader is None:
            # Too much poison holds the job.
            return
        seen = events.LeaderStatusSeen(bench.leader_status)
        waiting = [s.start for batch in leader.batches for s in batch.address]
        for commit in of_kind(stream.on(seen, COMMIT_S * number), do.Commit):
            assert commit.positions[P] <= min([*waiting, bench.leader_status.claimed[P]])


def test_leaving_worker_commits_what_is_settled_by_then() -> None:
    stream = _Stream()
    committed(stream, 0.0, 9, 50, oldest=9)
    committed(stream, 1.0, 12, 80, oldest=12)
    assert of_kind(stream.on(events.Leaving(), 1.1), do.Commit) == [do.Commit({P: 80})]


# --- a job that is changed -------------------------------------------------------------------


def test_new_batch_size_counts_from_the_next_batch() -> None:
    stream = _Stream()
    stream.stand(0)
    stream.read(0, 4)
    assert stream.on(events.SizesChanged(batch_size=6, bound=3), 0.0) == ()
    cuts = claims(stream.read(4, 14))
    assert cuts == [ready(A, span(P, 0, 6), samples=6), ready(A, span(P, 6, 12), samples=6)]


def test_open_batch_above_the_new_batch_size_is_claimed_at_once() -> None:
    stream = _Stream()
    stream.stand(0)
    stream.read(0, 7)
    said = stream.on(events.SizesChanged(batch_size=4, bound=3), 0.0)
    assert claims(said) == [ready(A, span(P, 0, 7), samples=7)]
    assert claims(stream.read(7, 11)) == [ready(A, span(P, 7, 11), samples=4)]


def test_bound_follows_k_in_both_directions() -> None:
    stream = _Stream()
    stream.stand(0)
    stream.read(0, 30)  # three batches: the bound
    assert stream.on(events.SizesChanged(SAMPLES, bound=5), 0.0) == (READ_ON,)
    assert stream.room == 2 * SAMPLES
    (paused,) = stream.on(events.SizesChanged(SAMPLES, bound=2), 0.0)
    assert paused == do.SetReading(reading=False, reason="enough of this worker's batches wait")
    assert stream.room == 0


def test_leaving_worker_ignores_new_sizes() -> None:
    stream = _Stream()
    stream.stand(0)
    stream.read(0, 7)
    stream.on(events.Leaving(), 0.0)
    assert stream.on(events.SizesChanged(batch_size=4, bound=3), 0.0) == ()


# --- generations -----------------------------------------------------------------------------


def test_partition_of_a_new_generation_is_read_and_claimed_again() -> None:
    # status     claimed[p]=40 of generation 0   opened at 40 as generation 9, after epoch 2
    stream = _Stream()
    assert stream.stand(0, p=40) == (place(40), READ_ON)
    stream.read(40, 44)
    leader_status = LeaderStatus(
        0,
        1,
        {P: 40, Q: 0},
        1,
        0,
        1,
        {},
        opened={P: (Opened(P, 0, 9, "id", 40, 2),)},
        known={P: LogPosition(39, "id", 2)},
    )
    seen = events.LeaderStatusSeen(leader_status)
    assert stream.on(seen, 0.0) == (do.Unplace(P), do.Place({P: LogPosition(39, "id", 2)}))
    commands = stream.on(events.Decoded(DecodedRun(P, range(40, 55), (), 0.0, 0.0, epoch=3)), 0.0)
    (claim,) = claims(commands)
    assert claim.address == (Span(*P, 40, 50, 9, 2, 50, 3),)
    # Retention deletes the records after the one that was read last.
    first, second = claims(stream.on(events.FellBehind(P, 70), 0.0))
    assert first.address == (Span(*P, 50, 55, 9, 3, 55, 3),)
    assert second == SpanExpired(A, (Span(*P, 55, 70, 9, 3, 55, 3),))


def test_added_partition_is_read_once_the_job_has_opened_it() -> None:
    added = Partition("s", 2)
    stream = _Stream(added)
    assert stream.stand(0) == (READ_ON,)
    opened = Opened(added, None, 9, "id", 0, -1)
    claimed = {**FIRST, added: 0}
    leader_status = LeaderStatus(0, 1, claimed, 1, 0, 1, {}, opened={added: (opened,)})
    said = stream.on(events.LeaderStatusSeen(leader_status), 0.0)
    assert said == (place(0, added), do.Commit({added: 0}))


# --- logs that changed ----------------------------------------------------------------------------


def of_log(
    claimed: int,
    known: LogPosition,
    generation: int = 0,
    *,
    epoch: int = 0,
    control_position: int = 0,
) -> events.LeaderStatusSeen:
    """Return a leader's status of a partition whose log is known up to there."""
    opened = Opened(P, None, generation, known.topic_id, claimed, known.epoch)
    return events.LeaderStatusSeen(
        LeaderStatus(
            epoch,
            control_position,
            {P: claimed, Q: 0},
            control_position,
            0,
            1,
            {},
            opened={P: (opened,)},
            known={P: known},
        )
    )


@pytest.mark.parametrize(("recreated", "again_at"), [(False, LOST_S), (True, None)])
def test_changed_log_is_not_read_until_the_leader_status_changes(
    recreated: bool,  # noqa: FBT001 -- a parameter of the test
    again_at: float | None,
) -> None:
    # status     claimed[p]=40 of generation 0          ...          opened at 30 as generation 9
    # reader     reads 40 to 44    truncated                         reads from 30
    stream = _Stream()
    here = LogPosition(40, "id", 2)
    assert of_kind(stream.on(of_log(40, here), 0.0), do.Place) == [do.Place({P: here})]
    stream.read(40, 44)

    assert stream.on(events.Truncated(P, recreated), 0.0) == (do.Unplace(P),)

    assert stream.read(44, 50) == (do.Unplace(P),)
    assert of_kind(stream.on(of_log(40, here), LOST_S - 1), do.Place) == []
    late = of_kind(stream.on(of_log(40, here), 100.0), do.Place)
    assert late == ([] if again_at is None else [do.Place({P: here})])
    there = LogPosition(30, "other" if recreated else "id", 2)
    placed = of_kind(stream.on(of_log(30, there, 9), 100.0), do.Place)
    assert placed == [do.Place({P: there})]


def test_true_topic_is_read_at_once_after_a_forged_one() -> None:
    stream = _Stream()
    stream.on(of_log(40, LogPosition(40, "forged", 2)), 0.0)
    stream.on(events.Truncated(P, recreated=True), 0.0)

    true = LogPosition(40, "id", 2)
    assert of_kind(stream.on(of_log(40, true), 0.1), do.Place) == [do.Place({P: true})]


def test_reading_starts_after_the_last_known_record_and_claims_from_claimed() -> None:
    # log        ... 37:a record   38, 39: markers   | claimed up to 40
    stream = _Stream()
    known = LogPosition(38, "id", 2)
    assert of_kind(stream.on(of_log(40, known), 0.0), do.Place) == [do.Place({P: known})]

    # A record below 40 of the known leader epoch shows that the log is the same. The claim begins
    # at 40.
    assert stream.on(events.RecordBelow(P, 2), 0.0) == ()
    (claim,) = claims(
        stream.on(events.Decoded(DecodedRun(P, range(40, 50), (), 0.0, 0.0, epoch=2)), 0.0)
    )
    assert claim.address == (Span(*P, 40, 50, 0, 2, 50, 2),)


def test_record_below_the_position_with_later_leader_epoch_means_another_log() -> None:
    stream = _Stream()
    stream.on(of_log(40, LogPosition(38, "id", 2)), 0.0)
    assert stream.on(events.RecordBelow(P, 3), 0.0) == (do.Unplace(P),)
    assert stream.position(P) is None


def test_decreasing_leader_epochs_mean_another_log() -> None:
    stream = _Stream()
    stream.on(of_log(40, LogPosition(40, "id", 2)), 0.0)
    stale = events.Decoded(DecodedRun(P, range(40, 50), (), 0.0, 0.0, epoch=1))
    assert stream.on(stale, 0.0) == (do.Unplace(P),)
    assert stream.position(P) is None


def test_expired_records_below_the_position_are_skipped() -> None:
    # Retention deleted the last known record, at 37, so the log begins at 39 by now.
    stream = _Stream()
    stream.on(of_log(40, LogPosition(38, "id", 2)), 0.0)
    placed = do.Place({P: LogPosition(40, "id")})
    assert stream.on(events.FellBehind(P, 39), 0.0) == (placed,)


def test_claims_that_the_control_topic_lost_are_abandoned_after_a_timeout() -> None:
    # claims     [0:10] at 7, of leader 0
    # status     leader 1, control=5, claimed[p]=0: the topic lost its tail, no more claims
    stream = _Stream()
    here = LogPosition(0, "id", -1)
    stream.on(of_log(0, here), 0.0)
    stream.read(0, SAMPLES)
    stream.deliver(_1=7)
    stream.on(of_log(0, here, epoch=1, control_position=5), 10.0)

    waits = stream.on(of_log(0, here, epoch=1, control_position=5), 10.0 + UNDECIDED_S - 1)
    assert of_kind(waits, do.Place) == []
    begins_anew = stream.on(of_log(0, here, epoch=1, control_position=5), 10.0 + UNDECIDED_S)
    assert of_kind(begins_anew, do.Place) == [do.Place({P: here})]
    (forgotten,) = of_kind(begins_anew, do.Forget)
    assert [span.end for (span,) in forgotten.addresses] == [SAMPLES]


def test_undecided_claim_is_repeated_with_growing_delays() -> None:
    # claim      [0:10] at 7       again at 7          again
    # status     control=7 all along: the topic lost the claim, or the job has no leader
    stream = _Stream()
    here = LogPosition(0, "id", -1)
    stream.on(of_log(0, here, control_position=7), 0.0)
    waits_s = list[float]()
    now = 0.0
    for number in (1, 2, 3):
        stream.read(0, SAMPLES, now=now)
        stream.on(events.Delivered(number, 7), now)
        begun = now
        while not of_kind(stream.on(of_log(0, here, control_position=7), now), do.Place):
            now += 1.0
        waits_s.append(now - begun)
    assert waits_s == [UNDECIDED_S + 1, 2 * UNDECIDED_S + 1, 4 * UNDECIDED_S + 1]


# --- space reported by triggers ------------------------------------------------------------------


def test_trigger_of_the_leader_frees_room_without_reading_the_status() -> None:
    # bound 3    waiting [0:10] at 4   [10:20] at 5   [20:30] at 6     full
    # trigger    4 and 5 are settled                                   room for two
    stream = _Stream()
    stream.stand(0)
    stream.read(0, 30)
    stream.deliver(_1=4, _2=5, _3=6)
    stream.stand(7, p=30, oldest_unsettled=4, waiting=3)
    assert stream.room == 0

    said = stream.on(events.RoundBegan(0, Unsettled(7, 6, 1, 1)), 0.0)
    assert the(said, do.Forget).addresses == ((span(P, 0, 10),), (span(P, 10, 20),))
    assert READ_ON in said
    assert stream.room == 2 * SAMPLES


@pytest.mark.parametrize(
    "trigger",
    [
        events.RoundBegan(0, None),  # an older program's
        # This leader's status was never seen.
        events.RoundBegan(9, Unsettled(7, 6, 0, 1)),
        events.RoundBegan(0, Unsettled(6, 6, 0, 1)),  # older than the status
    ],
)
def test_irrelevant_trigger_frees_no_room(trigger: events.RoundBegan) -> None:
    stream = _Stream()
    stream.stand(0)
    stream.read(0, 30)
    stream.deliver(_1=4, _2=5, _3=6)
    stream.stand(7, p=30, oldest_unsettled=4, waiting=3)

    assert stream.on(trigger, 0.0) == ()
    assert stream.room == 0


def test_full_stream_resumes_when_a_quarter_is_free_or_less_than_a_group_waits() -> None:
    # bound 8, K = 4    waiting  8     7     6     5
    #                            full  full  full  reads
    stream = _Stream(settings=WorkerSettings(SAMPLES, bound=8, group_size=4))
    stream.stand(0)
    stream.read(0, 80)
    stream.deliver(**{f"_{number}": number for number in range(1, 9)})
    read = [
        READ_ON in stream.on(events.RoundBegan(0, Unsettled(9, 1 + settled, 8 - settled, 1)), 0.0)
        for settled in (0, 1, 2, 3)
    ]
    assert read == [False, False, False, True]


def test_full_worker_ignores_triggers_that_free_no_room() -> None:
    # bound 8, K = 4    settled of its own    1      2      3, and it reads
    #                   or waiting anywhere   8      6      5, and it reads
    def full() -> _Stream:
        stream = _Stream(settings=WorkerSettings(SAMPLES, bound=8, group_size=4))
        stream.stand(0)
        assert stream.is_news(0, Unsettled(0, 0, 0, 1))  # it reads, and gets all reports
        stream.read(0, 80)
        stream.deliver(**{f"_{number}": number for number in range(1, 9)})
        stream.stand(9, p=80, oldest_unsettled=1, waiting=8)
        return stream

    said = [Unsettled(9, 1 + settled, 99, 50) for settled in (1, 2, 3)]
    said += [Unsettled(9, 1, waiting, 1) for waiting in (8, 6, 5)]
    reads = [READ_ON in full().on(events.RoundBegan(0, each), 0.0) for each in said]
    assert reads == [False, False, True, False, False, True]
    assert [full().is_news(0, each) for each in said] == reads


def test_full_worker_receives_triggers_of_other_leaders_and_older_programs() -> None:
    stream = _Stream()
    stream.stand(0)
    stream.read(0, 30)
    stream.deliver(_1=4, _2=5, _3=6)
    stream.stand(7, p=30, oldest_unsettled=4, waiting=3)

    assert not stream.is_news(0, Unsettled(7, 4, 3, 1))
    assert stream.is_news(1, Unsettled(7, 4, 3, 1))
    assert stream.is_news(0, None)


def test_stream_does_not_pause_while_its_own_batches_make_no_group() -> None:
    # bound 4 = K    waiting  4     3: another worker may never come
    #                         full  reads
    stream = _Stream(settings=WorkerSettings(SAMPLES, bound=4, group_size=4))
    stream.stand(0)
    stream.read(0, 40)
    stream.deliver(_1=1, _2=2, _3=3, _4=4)
    assert READ_ON in stream.on(events.RoundBegan(0, Unsettled(5, 2, 3, 1)), 0.0)
