"""Claims on records: in every order of arrival, each record has exactly one owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.ledger import ClaimOutcome, Ledger
from common.core.messages import Batch, BatchReady, Claim, Opened, Skipped, SpanExpired
from common.core.spans import LogPosition, Partition, Span, address_of
from tests.unit.core.examples import FIRST, A, B, C, P, Q, ready, span

if TYPE_CHECKING:
    from collections.abc import Iterable

ELSEWHERE = Partition("t", 0)
# A job may begin behind the start of a partition.
BEGIN = {P: 0, Q: 5}


def test_first_claim_at_the_frontier_wins_its_records() -> None:
    # offset   0       1       2       3       4           5       6
    # claim    A 0:10  B 0:10  B 5:15  C 12:20 A 10:15     A again B 15:25
    # decided  yes     claimed overlap gap     yes         claimed yes
    ledger = Ledger(FIRST)
    claims = [
        ready(A, span(P, 0, 10)),
        ready(B, span(P, 0, 10)),
        ready(B, span(P, 5, 15)),
        ready(C, span(P, 12, 20)),
        ready(A, span(P, 10, 15)),
        ready(A, span(P, 10, 15)),
        ready(B, span(P, 15, 25)),
    ]
    decisions = [ledger.decide(offset, claim) for offset, claim in enumerate(claims)]

    assert [n for n, decision in enumerate(decisions) if decision.accepted] == [0, 4, 6]
    assert ledger.claimed == {P: 25, Q: 0}
    assert ledger.position == 7
    assert decisions[1].reason == "s[0]@0:10 must start at offset 10"


def test_accepted_batch_is_identified_by_its_control_offset() -> None:
    bad = (Skipped("s", 0, 3, "no label"),)
    claim = BatchReady(A, (span(P, 0, 10),), 9, bad)
    decision = Ledger(FIRST, position=40).decide(41, claim)
    assert decision == ClaimOutcome(
        accepted=True, reason="", batch=Batch(41, A, claim.address, 9, bad)
    )


def test_one_wrong_span_refuses_the_entire_claim() -> None:
    ledger = Ledger(FIRST)
    assert not ledger.decide(0, ready(A, span(P, 0, 10), span(Q, 1, 10))).accepted
    assert ledger.claimed == FIRST
    assert ledger.decide(1, ready(B, span(P, 0, 5), span(Q, 0, 5))).accepted
    assert ledger.claimed == {P: 5, Q: 5}


@pytest.mark.parametrize(
    "claim", [ready(A, span(P, 0, 10), samples=0), SpanExpired(A, (span(P, 0, 10),))]
)
def test_claim_without_samples_settles_without_waiting(claim: Claim) -> None:
    ledger = Ledger(FIRST)
    assert ledger.decide(0, claim) == ClaimOutcome(accepted=True, reason="", batch=None)
    assert ledger.claimed[P] == 10


def test_foreign_or_invalid_claim_changes_nothing() -> None:
    ledger = Ledger(FIRST)
    assert ledger.decide(0, None).reason == "does not parse"
    foreign = ledger.decide(1, ready(A, span(P, 0, 10), span(ELSEWHERE, 0, 10)))
    assert (foreign.accepted, foreign.reason) == (False, "t[0] is no partition of this job")
    assert ledger.claimed == FIRST
    assert ledger.position == 2


def test_deciding_an_offset_twice_raises() -> None:
    ledger = Ledger(FIRST)
    ledger.decide(7, None)  # offsets may have holes
    for offset in (7, 3):
        with pytest.raises(ValueError, match=f"control record {offset} comes after 7"):
            ledger.decide(offset, ready(A, span(P, 0, 10)))
    assert ledger.claimed == FIRST


def test_claimed_returns_a_copy() -> None:
    ledger = Ledger(FIRST)
    ledger.claimed[P] = 99
    assert ledger.claimed == FIRST


@st.composite
def control_topics(draw: st.DrawFn) -> list[tuple[int, Claim | None]]:
    """Draw claims of workers that roughly know the frontier, duplicates, zombies and garbage."""
    frontier = Ledger(BEGIN)
    topic = list[tuple[int, Claim | None]]()
    for _ in range(draw(st.integers(0, 30))):
        kind = draw(st.sampled_from(["claim", "claim", "claim", "expired", "twin", "garbage"]))
        claim: Claim | None = None
        if kind == "twin" and topic:
            claim = draw(st.sampled_from(topic))[1]
        elif kind != "garbage":
            places = draw(st.sets(st.sampled_from([P, P, Q, Q, ELSEWHERE]), min_size=1))
            spans = []
            for place in places:
                behind = draw(st.sampled_from([0, 0, 0, 0, -1, 1, 3]))  # or ahead
                start = max(frontier.claimed.get(place, 0) - behind, 0)
                spans.append(span(place, start, start + draw(st.integers(1, 4))))
            worker = draw(st.sampled_from([A, B, C]))
            claim = SpanExpired(worker, address_of(spans))
            if kind == "claim":
                claim = ready(worker, *spans, samples=draw(st.integers(0, 3)))
        offset = frontier.position + draw(st.sampled_from([0, 0, 0, 2]))  # transaction markers
        topic.append((offset, claim))
        frontier.decide(offset, claim)
    return topic


def decide_all(ledger: Ledger, topic: Iterable[tuple[int, Claim | None]]) -> list[ClaimOutcome]:
    return [ledger.decide(offset, claim) for offset, claim in topic]


@given(control_topics())
def test_accepted_spans_tile_every_partition(topic: list[tuple[int, Claim | None]]) -> None:
    ledger, end = Ledger(BEGIN), dict(BEGIN)
    for offset, claim in topic:
        decision = ledger.decide(offset, claim)
        assert decision.accepted == (not decision.reason)
        if decision.accepted and claim is not None:
            for each in claim.address:
                assert each.start == end[each.place]  # neither a gap nor an overlap
                end[each.place] = each.end
        # A claim counts with all of its spans or not at all.
        assert ledger.claimed == end
        if decision.batch is not None:
            assert decision.batch.offset == offset
            assert decision.batch.samples > 0


@given(control_topics(), st.data())
def test_every_replay_decides_the_same(
    topic: list[tuple[int, Claim | None]], data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, len(topic)))
    ledger = Ledger(BEGIN)
    before = decide_all(ledger, topic[:begin])
    stored = Ledger(ledger.claimed, ledger.position)
    after = decide_all(ledger, topic[begin:])

    assert decide_all(stored, topic[begin:]) == after
    assert stored.claimed == ledger.claimed
    assert decide_all(Ledger(BEGIN), topic) == before + after


# --- generations -----------------------------------------------------------------------------

# The job did not have this partition at first.
R = Partition("s", 2)
ADDED = Opened(R, None, 7, "id", 0, -1)


def decide(ledger: Ledger, *records: Claim | Opened) -> list[bool]:
    """Decide the records in order; return for each if it counted."""
    return [ledger.decide(ledger.position, record).accepted for record in records]


def known(
    partition: Partition, start: int, end: int, *epochs: int, generation: int = 0
) -> BatchReady:
    """Return a claim. epochs: leader epochs of the record before it and of its last record."""
    before, epoch = epochs
    return ready(A, Span(*partition, start, end, generation, before, end, epoch))


def test_added_partition_is_opened_once_and_claimed_from_its_beginning() -> None:
    # record    claim  opened 7  opened 7  opened 8  claim of generation 0  claim of generation 7
    # decided   no     yes       no        no        no                     yes
    ledger = Ledger(FIRST)
    own = Span(*R, 0, 10, generation=7, known=10)
    another = Opened(R, None, 8, "id", 0, -1)
    records = (ready(A, own), ADDED, ADDED, another, ready(A, span(R, 0, 10)), ready(A, own))
    assert decide(ledger, *records) == [False, True, False, False, False, True]
    assert ledger.claimed == {**FIRST, R: 10}
    assert ledger.generation(R) == 7
    assert ledger.opened == {R: (ADDED,)}
    assert ledger.known == {R: LogPosition(10, "id", -1)}


def test_partition_of_another_topic_cannot_be_opened() -> None:
    ledger = Ledger(FIRST)
    assert decide(ledger, Opened(ELSEWHERE, None, 7, "id", 0, -1)) == [False]
    assert ledger.generation(ELSEWHERE) is None


def test_claims_of_earlier_generations_are_refused_after_an_opening() -> None:
    # p  [0:10)  [10:20)  cut at 15: opened  [20:30) of 0: void  [15:25) of 0: void  [15:25) of 9
    ledger = Ledger(FIRST)
    opened = Opened(P, 0, 9, "", 15, 2)
    claims = (known(P, 0, 10, -1, 1), known(P, 10, 20, 1, 2), opened, known(P, 20, 30, 2, 2))
    assert decide(ledger, *claims) == [True, True, True, False]
    assert decide(ledger, known(P, 15, 25, 2, 3)) == [False]
    assert decide(ledger, opened) == [False]  # a repeated record
    assert decide(ledger, known(P, 15, 25, 2, 3, generation=9)) == [True]
    assert ledger.known[P] == LogPosition(25, "", 3)


def test_claim_must_follow_leader_epoch_of_the_previous_claim() -> None:
    # The log lost 7 and 8, and has new ones. A's old [7:8) counts; B, who read the new 7 and 8,
    # has its [7:8) refused. Its [8:9) must be refused, too, or the new 7 would never be trained.
    ledger = Ledger({P: 7})
    old, new = known(P, 7, 8, 0, 0), known(P, 7, 8, 0, 1)
    assert decide(ledger, old, new, known(P, 8, 9, 1, 1)) == [True, False, False]
    # A claim with unknown leader epochs is accepted without that check.
    assert decide(ledger, ready(A, span(P, 8, 9))) == [True]


def test_opening_of_the_same_topic_cannot_skip_unclaimed_records() -> None:
    ledger = Ledger({P: 5}, known={P: LogPosition(5, "old", 0)})
    assert decide(ledger, Opened(P, 0, 9, "old", 6, 0)) == [False]
    # The operator chose this start.
    assert decide(ledger, Opened(P, 0, 9, "new", 6, 0)) == [True]


def test_span_above_the_cut_of_its_generation_is_lost() -> None:
    below, above = Span(*P, 0, 10, known=10), Span(*P, 10, 20, known=18)
    ledger = Ledger({P: 20}, opened={}, known={P: LogPosition(18, "id", 0)})
    assert not ledger.is_gone(above)
    assert decide(ledger, Opened(P, 0, 9, "id", 18, 0)) == [True]
    # Only offsets without records were lost.
    assert not ledger.is_gone(above)
    assert decide(ledger, Opened(P, 9, 11, "id", 15, 0)) == [True]
    assert ledger.is_gone(above)
    assert not ledger.is_gone(below)
    later = Span(*P, 15, 25, 11, 0, 25, 1)
    assert decide(ledger, ready(A, later), Opened(P, 11, 12, "new", 90, -1)) == [True, True]
    assert ledger.is_gone(later)  # another topic of that name


def test_span_of_topic_without_known_id_is_lost_after_recreation() -> None:
    # topic    ?         cut: "id"     recreated: "new", from its end
    ledger = Ledger({P: 0})
    first = Span(*P, 0, 10, known=10)
    cut, anew = Opened(P, 0, 9, "id", 10, 0), Opened(P, 9, 11, "new", 10, -1)
    assert decide(ledger, ready(A, first), cut) == [True, True]
    assert not ledger.is_gone(first)
    assert decide(ledger, anew) == [True]
    assert ledger.is_gone(first)


def test_span_belongs_to_the_topic_of_its_generation() -> None:
    ledger = Ledger({P: 0})
    first, later = Span(*P, 0, 10, known=10), Span(*P, 0, 10, 11, known=10)
    assert ledger.topic_ids((first,)) == {}
    assert (
        decide(ledger, Opened(P, 0, 9, "id", 10, 0), Opened(P, 9, 11, "new", 0, -1)) == [True] * 2
    )
    assert ledger.topic_ids((later,)) == {P: "new"}
    assert ledger.topic_ids((later._replace(generation=9),)) == {P: "id"}


def test_ledger_continues_from_its_stored_state() -> None:
    ledger = Ledger(FIRST)
    assert decide(ledger, ADDED, known(P, 0, 10, -1, 1)) == [True, True]
    stored = Ledger(ledger.claimed, ledger.position, ledger.opened, ledger.known)
    more = (ADDED, known(P, 10, 20, 0, 1), known(P, 10, 20, 1, 1), known(R, 0, 5, -1, 0))
    assert decide(stored, *more) == decide(ledger, *more) == [False, False, True, False]
    assert (stored.claimed, stored.known) == (ledger.claimed, ledger.known)
