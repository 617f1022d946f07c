"""The end of a demo: every produced record is found once, or reported as missing.

Another process prints the result of the model's test, which is read from its output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.audit import Audit, audit
from common.core.messages import (
    GENESIS,
    Batch,
    BatchReady,
    Claim,
    Lead,
    Quarantined,
    Skipped,
    SpanExpired,
    UpdateApplied,
    WorkerId,
)
from common.core.spans import Partition, Span
from common.errors import DollError
from services.cli.demo.judge import account, result_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.core.messages import AuditRecord

RESULT = '{"loss":0.053,"accuracy":0.986}'
W = WorkerId("w1")
A, B = Partition("a", 0), Partition("b", 0)
FIRST = {A: 10, B: 0}


def span(place: Partition, start: int, end: int) -> Span:
    return Span(*place, start, end)


def folded(claims: Sequence[Claim], *decided: AuditRecord) -> Audit:
    return audit(FIRST, enumerate(claims), enumerate((Lead(-1, GENESIS, "c1", 0), *decided)))


def ready(*spans: Span, skipped: tuple[Skipped, ...] = ()) -> BatchReady:
    samples = sum(each.end - each.start for each in spans) - len(skipped)
    return BatchReady(W, spans, samples, skipped)


def batch(offset: int, claim: BatchReady) -> Batch:
    return Batch(offset, W, claim.address, claim.samples, claim.skipped)


def update(version: int, *batches: Batch) -> UpdateApplied:
    return UpdateApplied(0, version, batches, sum(each.samples for each in batches), 0.5)


def test_trained_skipped_expired_and_quarantined_records_are_not_lost() -> None:
    bad = Skipped("a", 0, 12, "too short")
    claims = (
        ready(span(A, 10, 14), span(B, 0, 4), skipped=(bad,)),
        SpanExpired(W, (span(A, 14, 17),)),
        ready(span(B, 4, 6)),
    )
    poison = Quarantined(0, batch(2, ready(span(B, 4, 6))), "poison: raised")
    found = account(
        folded(claims, update(1, batch(0, claims[0])), poison), FIRST, ends={A: 17, B: 6}
    )
    assert (found.produced, found.trained, found.skipped) == (13, 7, 1)
    assert (found.expired, found.quarantined) == (3, 2)
    assert (found.lost, found.duplicated) == (0, 0)


def test_unclaimed_records_are_lost() -> None:
    claim = ready(span(A, 10, 14))
    found = account(folded([claim], update(1, batch(0, claim))), FIRST, ends={A: 20, B: 1})
    assert found.lost == 7


def test_claimed_but_unused_records_are_lost() -> None:
    claims = (ready(span(A, 10, 14)), ready(span(A, 14, 20)))
    found = account(folded(claims, update(1, batch(0, claims[0]))), FIRST, ends={A: 20, B: 0})
    assert found.lost == 6


@given(st.integers(0, 9), st.integers(1, 10))
def test_records_in_two_updates_are_counted_as_duplicates(start: int, length: int) -> None:
    whole, again = ready(span(A, 10, 20)), ready(span(A, 10 + start, 10 + start + length))
    audited = folded([whole], update(1, batch(0, whole)), update(2, batch(1, again)))
    found = account(audited, FIRST, ends={A: 20 + max(0, start + length - 10), B: 0})
    assert found.duplicated == min(length, 10 - start)
    assert found.lost == 0


def test_duplicate_records_do_not_hide_lost_ones() -> None:
    claim = ready(span(A, 10, 15))
    audited = folded([claim], update(1, batch(0, claim)), update(2, batch(0, claim)))
    found = account(audited, FIRST, ends={A: 20, B: 0})
    assert (found.lost, found.duplicated) == (5, 5)


@pytest.mark.parametrize(
    "said", [RESULT, f"UserWarning: slow\n{RESULT}", f"{RESULT}\nException ignored in: a thread"]
)
def test_result_is_found_among_warnings_of_libraries(said: str) -> None:
    assert result_of(0, said) == {"loss": 0.053, "accuracy": 0.986}


@pytest.mark.parametrize(
    ("exit_code", "said"), [(1, RESULT), (-9, "it wrote no output"), (0, "it wrote no output")]
)
def test_failed_or_empty_test_run_is_an_error_with_its_output(exit_code: int, said: str) -> None:
    with pytest.raises(DollError) as failed:
        result_of(exit_code, said)
    assert str(failed.value) == (
        f"the last model could not be tested (exit code {exit_code}): {said}"
    )
