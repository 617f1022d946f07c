"""Claims on records: whatever arrives, in whatever order, each record has one owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.ledger import Decision, Ledger
from common.core.messages import Batch, BatchReady, Claim, Skipped, SpanExpired
from common.core.spans import Partition, address_of
from tests.unit.core.examples import FIRST, A, B, C, P, Q, ready, span

if TYPE_CHECKING:
    from collections.abc import Iterable

ELSEWHERE = Partition("t", 0)
BEGIN = {P: 0, Q: 5}  # a job need not begin where its partitions do


def test_whoever_claims_first_at_the_frontier_has_the_records() -> None:
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
    assert decisions[1].reason == "s[0]@0:10 starts elsewhere than 10"


def test_an_accepted_batch_is_the_claim_under_its_control_offset() -> None:
    bad = (Skipped("s", 0, 3, "no label"),)
    claim = BatchReady(A, (span(P, 0, 10),), 9, bad)
    decision = Ledger(FIRST, position=40).decide(41, claim)
    assert decision == Decision(accepted=True, reason="", batch=Batch(41, A, claim.address, 9, bad))


def test_one_wrong_span_refuses_the_whole_claim() -> None:
    ledger = Ledger(FIRST)
    assert not ledger.decide(0, ready(A, span(P, 0, 10), span(Q, 1, 10))).accepted
    assert ledger.claimed == FIRST
    assert ledger.decide(1, ready(B, span(P, 0, 5), span(Q, 0, 5))).accepted
    assert ledger.claimed == {P: 5, Q: 5}


@pytest.mark.parametrize(
    "claim", [ready(A, span(P, 0, 10), samples=0), SpanExpired(A, (span(P, 0, 10),))]
)
def test_what_holds_no_samples_settles_without_waiting(claim: Claim) -> None:
    ledger = Ledger(FIRST)
    assert ledger.decide(0, claim) == Decision(accepted=True, reason="", batch=None)
    assert ledger.claimed[P] == 10


def test_what_is_not_of_this_job_changes_nothing() -> None:
    ledger = Ledger(FIRST)
    assert ledger.decide(0, None).reason == "does not parse"
    foreign = ledger.decide(1, ready(A, span(P, 0, 10), span(ELSEWHERE, 0, 10)))
    assert (foreign.accepted, foreign.reason) == (False, "t[0] is not of this job")
    assert ledger.claimed == FIRST
    assert ledger.position == 2


def test_deciding_an_offset_twice_raises() -> None:
    ledger = Ledger(FIRST)
    ledger.decide(7, None)  # offsets may have holes
    for offset in (7, 3):
        with pytest.raises(ValueError, match=f"control record {offset} comes after 7"):
            ledger.decide(offset, ready(A, span(P, 0, 10)))
    assert ledger.claimed == FIRST


def test_the_frontier_given_out_is_a_copy() -> None:
    ledger = Ledger(FIRST)
    ledger.claimed[P] = 99
    assert ledger.claimed == FIRST


@st.composite
def control_topics(draw: st.DrawFn) -> list[tuple[int, Claim | None]]:
    """Claims of workers that know the frontier more or less, twins, ghosts and garbage."""
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


def decide_all(ledger: Ledger, topic: Iterable[tuple[int, Claim | None]]) -> list[Decision]:
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
        assert ledger.claimed == end  # a claim counts with all of its spans or with none
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
