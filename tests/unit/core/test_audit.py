"""The audit of a job's two topics finds every flaw, and none in a sound history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.core.audit import Audit, Flaw, Restart, audit
from common.core.messages import (
    GENESIS,
    Batch,
    BatchReady,
    Lead,
    ModelId,
    Opened,
    Quarantined,
    Replayed,
    Requeued,
    Skipped,
    SpanExpired,
    Synchrony,
    UpdateApplied,
)
from common.core.spans import LogPosition, Partition, Span
from tests.unit.core.examples import FIRST, SAMPLES, A, B, P, Q, batch, ready, span

if TYPE_CHECKING:
    from common.core.messages import AuditRecord, Claim, ControlRecord, Positions

LEAD = Lead(-1, GENESIS, "c1", 0)  # at offset 0 of each topic


def claims(count: int) -> list[Claim | None]:
    """Return consecutive claims on P: `batch(n)` is the n-th."""
    return [ready(A, *batch(n).address) for n in range(count)]


def update(version: int, *batches: Batch, epoch: int = 0) -> UpdateApplied:
    return UpdateApplied(epoch, version, batches, sum(b.samples for b in batches), 0.5)


def audit_of(
    control: list[Claim | None], *updates: AuditRecord | None, starts: Positions | None = None
) -> Audit:
    return audit(FIRST, enumerate(control), enumerate(updates), starts)


def test_lead_to_version_0_above_updates_in_force_is_reported() -> None:
    # updates   0: Lead   1: J=1   2: Lead, base 1   3: Lead, base 0   4: J=1
    again = Lead(2, GENESIS, "c3", 70, 1, "a checkpoint is missing: 0-1, but the list is empty")
    known: list[Claim | None] = [ready(A, span(P, 0, 10))]
    one = Batch(0, A, (span(P, 0, 10),), 10)
    audited = audit_of(
        known,
        LEAD,
        update(1, one),
        Lead(0, ModelId(0, 1), "c2", 2),
        again,
        update(1, one, epoch=70),
        Lead(70, ModelId(70, 1), "c4", 80),
    )
    assert audited.restarts == (Restart(70, 1, again.loss),)
    assert audited.flaws == ()


def test_audit_of_sound_topics_has_no_flaw() -> None:
    # control  0       1        2       3       4        5        6         7
    # claim    A 0:10  B 0:10   B Q0:5  P10:20  garbage  P20:30   P30:40    P40:50
    #          J=1     refused  bad     J=1              expired  quarant.  waits
    bad = tuple(Skipped("s", 1, offset, "no label") for offset in range(5))
    control: list[Claim | None] = [
        ready(A, span(P, 0, 10)),
        ready(B, span(P, 0, 10)),
        BatchReady(B, (span(Q, 0, 5),), 0, bad),
        ready(B, span(P, 10, 20), samples=7),
        None,
        SpanExpired(A, (span(P, 20, 30),)),
        ready(A, span(P, 30, 40)),
        ready(A, span(P, 40, 50), samples=8),
    ]
    made = update(1, batch(0), Batch(3, B, (span(P, 10, 20),), 7))
    poison = Quarantined(0, Batch(6, A, (span(P, 30, 40),), SAMPLES), "poison: raised")

    assert audit_of(control, LEAD, None, made, poison) == Audit(
        updates=(made,),
        quarantined=(poison,),
        requeued=(),
        replayed=(),
        expired=(span(P, 20, 30),),
        lost=(),
        takeovers=1,
        taken_back=0,
        trained=17,
        skipped=5,
        unsettled=8,
        settled={P: 40, Q: 5},
        flaws=(),
    )


def test_audit_accepts_update_with_or_without_its_skipped_records() -> None:
    # The first update does not name the skipped records, as today. The second names them, as older
    # programs did. The third has fewer samples than its claim.
    bad = (Skipped("s", 0, 3, "torn", (1,)),)
    control: list[Claim | None] = [BatchReady(A, (span(P, 0, 10),), 8, bad)]
    plain = Batch(0, A, (span(P, 0, 10),), 8)
    for named in (plain, replace(plain, skipped=bad)):
        found = audit_of(control, LEAD, update(1, named))
        assert (found.trained, found.skipped, found.flaws) == (8, 2, ())
    found = audit_of(control, LEAD, update(1, replace(plain, samples=7)))
    assert found.flaws == (Flaw("never claimed", "batch 0 of version 1"),)


def test_audit_counts_takeovers_and_updates_taken_back() -> None:
    # offset  0     1        2           3         4           5        6
    # record  Lead  J=1 {0}  J=2 {1}     Lead(0)   J=3 of 0    J=2 {2}  Lead(0)
    #                        taken back  base J=1  comes late  counts   too late
    found = audit_of(
        claims(3),
        LEAD,
        update(1, batch(0)),
        update(2, batch(1)),
        Lead(0, ModelId(0, 1), "c2", 3),
        update(3, batch(2)),
        update(2, batch(2), epoch=3),
        Lead(0, GENESIS, "c3", 6),
    )
    assert found.updates == (update(1, batch(0)), update(2, batch(2), epoch=3))
    assert (found.takeovers, found.taken_back) == (2, 2)
    assert (found.trained, found.unsettled) == (2 * SAMPLES, SAMPLES)  # batch 1 waits again
    # Nothing behind the waiting batch is settled yet.
    assert found.settled[P] == 10
    assert found.flaws == ()


def test_batch_taken_back_may_be_used_again() -> None:
    found = audit_of(
        claims(1),
        LEAD,
        update(1, batch(0)),
        Lead(0, GENESIS, "c2", 2),
        update(1, batch(0), epoch=2),
    )
    assert (found.trained, found.flaws) == (SAMPLES, ())


def test_unsettled_tail_is_not_a_flaw() -> None:
    found = audit_of(claims(3), LEAD, update(1, batch(0)))
    assert (found.unsettled, found.settled[P], found.flaws) == (2 * SAMPLES, 10, ())


def test_audit_of_empty_topics_has_no_flaw() -> None:
    found = audit_of([])
    assert (found.trained, found.settled, found.flaws) == (0, FIRST, ())


def test_audit_reports_gap() -> None:
    # claimed  0 ---- 10 ---- 20 ---- 30
    # used     0 ---- 10   13-20 ---- 30
    short = replace(batch(1), address=(span(P, 13, 20),))
    found = audit_of(claims(3), LEAD, update(1, batch(0), short, batch(2)))
    assert found.flaws == (
        Flaw("never claimed", "batch 1 of version 1"),
        Flaw("gap", "s[0]@10:13"),
    )


def test_audit_reports_overlap() -> None:
    # claimed  0 ---- 10 ---- 20 ---- 30
    # used     0 ---- 10
    #             7 --------- 20 ---- 30
    long = replace(batch(1), address=(span(P, 7, 20),))
    found = audit_of(claims(3), LEAD, update(1, batch(0), long, batch(2)))
    assert found.flaws == (
        Flaw("never claimed", "batch 1 of version 1"),
        Flaw("overlap", "s[0]@0:10 and s[0]@7:20"),
    )


def test_audit_reports_batch_used_twice() -> None:
    in_two_updates = audit_of(claims(1), LEAD, update(1, batch(0)), update(2, batch(0)))
    assert Flaw("used twice", "batch 0 is used again in version 2") in in_two_updates.flaws

    in_one_update = audit_of(claims(1), LEAD, update(1, batch(0), batch(0)))
    assert Flaw("used twice", "batch 0 is used again in version 1") in in_one_update.flaws

    in_quarantine = audit_of(
        claims(1), LEAD, update(1, batch(0)), Quarantined(0, batch(0), "expired")
    )
    assert Flaw("used twice", "batch 0 is used again in quarantine") in in_quarantine.flaws


def test_quarantine_of_batch_with_lost_claim_settles_nothing() -> None:
    lost = replace(batch(1), address=(span(P, 10, 15),), samples=5)
    found = audit_of(claims(2), LEAD, update(1, batch(0)), Quarantined(0, lost, "poison: raised"))
    assert (found.quarantined, found.unsettled, found.flaws) == ((), SAMPLES, ())


def test_audit_reports_batch_that_was_never_claimed() -> None:
    flaw = Flaw("never claimed", "batch 1 of version 1")
    assert audit_of(claims(1), LEAD, update(1, batch(0), batch(1))).flaws == (flaw,)

    refused = [*claims(1), ready(B, span(P, 5, 20))]
    assert flaw in audit_of(refused, LEAD, update(1, batch(0), batch(1))).flaws

    other_count = replace(batch(0), samples=SAMPLES - 1)
    flaws = audit_of(claims(1), LEAD, update(1, other_count)).flaws
    assert flaws == (Flaw("never claimed", "batch 0 of version 1"),)


@given(st.permutations(range(6)), st.integers(0, 6), st.integers(1, 3))
def test_audit_settles_only_records_below_every_waiting_batch(
    order: list[int], used: int, group_size: int
) -> None:
    settled = order[:used]
    groups = [settled[n : n + group_size] for n in range(0, used, group_size)]
    updates = [update(j, *map(batch, group)) for j, group in enumerate(groups, 1)]
    found = audit_of(claims(6), LEAD, *updates)
    assert found.flaws == ()
    assert found.trained + found.unsettled == 6 * SAMPLES
    assert found.settled[P] == min(set(range(7)) - set(settled)) * SAMPLES


def test_audit_reports_update_with_wrong_sample_count() -> None:
    boasting = replace(update(1, batch(0)), samples=999)
    where = "version 1 names 999 samples, but its batches have 10"
    assert audit_of(claims(1), LEAD, boasting).flaws == (Flaw("miscounted", where),)


def test_audit_reports_update_that_is_too_stale_or_too_large() -> None:
    one, two = update(1, batch(0)), update(2, batch(1), batch(2))
    stale = replace(two, base=0, synchrony=Synchrony(2, staleness=1))
    assert audit_of(claims(3), LEAD, one, stale).flaws == ()
    wrong = replace(stale, synchrony=Synchrony(1))
    assert audit_of(claims(3), LEAD, one, wrong).flaws == (
        Flaw("too stale", "version 2 has a staleness of 1 updates, allowed 0"),
        Flaw("too many", "version 2 has 2 batches, but K was 1"),
    )
    unsaid = replace(two, base=0)
    assert [flaw.kind for flaw in audit_of(claims(3), LEAD, one, unsaid).flaws] == ["too stale"]


def test_audit_reports_batch_of_foreign_partition() -> None:
    foreign = Batch(0, A, (span(Partition("other", 0), 0, 10),), SAMPLES)
    flaws = audit_of([], LEAD, update(1, foreign)).flaws
    assert [flaw.kind for flaw in flaws] == ["never claimed", "foreign"]


def test_audit_settles_nothing_above_a_gap() -> None:
    late = Batch(0, A, (span(P, 3, 10),), 7)
    assert audit_of(claims(1), LEAD, update(1, late)).settled[P] == 0


def test_requeued_batch_is_used_once_and_replayed_batch_never() -> None:
    poison = [Quarantined(0, batch(n), "poison: raised") for n in range(3)]
    back, again = Requeued(batch(0), "ada", 1.0), Requeued(batch(0), "ada", 2.0)
    sealed = Replayed(batch(1), "ada", 1.0)

    audit = audit_of(claims(3), LEAD, *poison, back, again, sealed, sealed, update(1, batch(0)))

    assert (audit.requeued, audit.replayed, audit.flaws) == ((back,), (sealed,), ())
    assert [record.batch.offset for record in audit.quarantined] == [1, 2]
    assert (audit.trained, audit.unsettled, audit.settled[P]) == (10, 0, 30)


def test_requeued_batch_waits_until_trained() -> None:
    poison = Quarantined(0, batch(0), "poison: raised")
    audit = audit_of(claims(1), LEAD, poison, Requeued(batch(0), "ada", 1.0))

    assert (audit.flaws, audit.quarantined, audit.unsettled) == ((), (), 10)
    assert audit.settled[P] == 0


def test_audit_reports_training_of_replayed_batch() -> None:
    poison = Quarantined(0, batch(0), "poison: raised")
    audit = audit_of(claims(1), LEAD, poison, Replayed(batch(0), "ada", 1.0), update(1, batch(0)))

    assert "used twice" in {flaw.kind for flaw in audit.flaws}


def test_deleted_untrained_records_count_as_expired() -> None:
    # P  0        10         20         30       37           45
    #    | J=1    | expired  | expired  | deleted, unclaimed  | there
    #             | unread   | as batch |
    control: list[Claim | None] = [
        ready(A, span(P, 0, 10)),
        SpanExpired(A, (span(P, 10, 20),)),
        ready(A, span(P, 20, 30), samples=8),
    ]
    late = Quarantined(0, Batch(2, A, (span(P, 20, 30),), 8), "expired")

    audit = audit_of(control, LEAD, update(1, batch(0)), late, starts={P: 37, Q: 0})

    assert (audit.flaws, audit.expired) == ((), (span(P, 10, 20), Span(*P, 30, 37)))
    assert audit.expired_records == 10 + 8 + 7
    assert audit.settled == {P: 30, Q: 0}
    # Records deleted after they were claimed do not count: they are in an update, or wait for one.
    assert audit_of(control, LEAD, update(1, batch(0)), late, starts={P: 25}).expired_records == 18


def test_poison_does_not_count_as_expired() -> None:
    poison = Quarantined(0, batch(0), "poison: raised")
    assert audit_of(claims(1), LEAD, poison).expired_records == 0


def test_added_partition_is_audited_from_its_beginning() -> None:
    added = Partition("s", 2)
    spans = [Span(*added, start, start + 10, generation=7, known=start + 10) for start in (0, 10)]
    control: list[ControlRecord | None] = [Opened(added, None, 7, "id", 0, -1)]
    control += [ready(A, each) for each in spans]
    used = Batch(1, A, (spans[0],), SAMPLES)
    found = audit(FIRST, enumerate(control), enumerate([LEAD, update(1, used)]))
    assert found.flaws == ()
    assert found.settled == {**FIRST, added: 10}
    assert found.unsettled == SAMPLES


# --- streams whose logs changed ------------------------------------------------------------------

KNOWN = {P: LogPosition(FIRST[P], "id")}


def of(generation: int, start: int, end: int) -> Span:
    """Return a span of P in a generation."""
    return Span(*P, start, end, generation, known=end)


def test_audit_reports_trained_records_that_the_log_lost() -> None:
    # control  0 A 0:10   1 A 10:20   2 A 20:30   3 P opened at 15   4 A 15:25, generation 9
    #          J=1        J=1         expired                        J=2
    control: list[ControlRecord | None] = [
        ready(A, of(0, 0, 10)),
        ready(A, of(0, 10, 20)),
        ready(A, of(0, 20, 30)),
        Opened(P, 0, 9, "id", 15, 2),
        ready(A, of(9, 15, 25)),
    ]
    first, second, third = (Batch(n, A, (of(0, 10 * n, 10 * n + 10),), SAMPLES) for n in range(3))
    made = update(1, first, second)
    later = replace(update(2, Batch(4, A, (of(9, 15, 25),), SAMPLES)), number=0)

    found = audit(
        FIRST,
        enumerate(control),
        enumerate([LEAD, made, Quarantined(0, third, "expired"), later]),
        known=KNOWN,
    )

    assert found.flaws == ()
    assert found.lost == (of(0, 15, 20),)
    assert (found.lost_records, found.expired_records) == (5, SAMPLES)
    assert found.settled == {P: 25, Q: 0}


def test_log_cut_below_start_of_job_is_audited_from_the_cut() -> None:
    # The job begins at 40, the end of the log, and claims 40:50. Then the log is cut at 32. The
    # next generation begins there, and its first claim is 32:42.
    control: list[ControlRecord | None] = [
        ready(A, of(0, 40, 50)),
        Opened(P, 0, 9, "id", 32, 2),
        ready(A, of(9, 32, 42)),
    ]
    made = update(1, Batch(0, A, (of(0, 40, 50),), SAMPLES))
    again = update(2, Batch(2, A, (of(9, 32, 42),), SAMPLES))

    found = audit({P: 40, Q: 0}, enumerate(control), enumerate([LEAD, made, again]))

    assert found.flaws == ()
    assert found.lost == (of(0, 40, 50),)
    assert found.settled == {P: 42, Q: 0}


@pytest.mark.parametrize(("start", "end"), [(0, 5), (8, 12), (40, 44)])
def test_recreated_topic_is_audited_from_its_new_start(start: int, end: int) -> None:
    control: list[ControlRecord | None] = [
        ready(A, of(0, 0, 10)),
        Opened(P, 0, 9, "other", start, -1),
        ready(A, of(9, start, end)),
    ]
    made = update(1, Batch(0, A, (of(0, 0, 10),), SAMPLES))
    again = update(2, Batch(2, A, (of(9, start, end),), SAMPLES))

    found = audit(FIRST, enumerate(control), enumerate([LEAD, made, again]), known=KNOWN)

    assert found.flaws == ()
    assert found.lost == (of(0, 0, 10),)
    assert found.settled == {P: end, Q: 0}
