"""Some findings fail a chaos run, others do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.core.audit import Audit, Flaw
from load.faults.fleet import UnexpectedExit
from load.faults.report import Outcome, Pace
from load.harness.counting import Unlearned

PROOF = Audit((), (), (), (), (), (), 0, 0, 0, 0, 0, {}, ())
WELL = Outcome(
    carried_out=(),
    seen_s=(0.0, 8.0),
    # There is no outage, but a pause of 8 s.
    applied_s=(0.0, 8.0),
    events=(),
    workers=4,
    coordinators=2,
    pace=None,
    leads=1,
    resumed=0,
    produced=0,
    drained_s=10.0,
    behind="",
    proof=PROOF,
    unlearned=(),
    unexpected=(),
    overran=0,
)


def test_run_that_meets_every_limit_does_not_fail() -> None:
    assert WELL.failures() == []
    assert replace(WELL, pace=Pace(100.0, 70.0, 0.9)).failures() == []


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (replace(WELL, drained_s=None, behind="3 batches waiting"), "3 batches waiting"),
        (replace(WELL, unlearned=[Unlearned(7, -2.0)]), "1 weights are wrong: 7: -2"),
        (replace(WELL, proof=replace(PROOF, flaws=(Flaw("gap", "a/0"),))), "gap: a/0"),
        (replace(WELL, switching=True), "in another mode"),
        (replace(WELL, unread="no snapshot of 3-41"), "compared: no snapshot of 3-41"),
        (replace(WELL, unexpected=[UnexpectedExit(1.0, "w2", 3, "")]), "w2 with 3"),
    ],
)
def test_incorrect_result_fails_a_run_on_any_machine(found: Outcome, expected: str) -> None:
    (failure,) = found.failures()
    assert expected in failure
    assert found.slow() == []
    assert found.as_data()["failures"] == [failure]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (replace(WELL, applied_s=(0.0, 8.1)), "longest pause: 8.10 s, expected at most 8 s"),
        (replace(WELL, drained_s=10.1), "drained after 10.1 s, expected at most 10 s"),
        (
            replace(WELL, pace=Pace(100.0, 69.0, 0.75)),
            "expected at least 0.7; without the missing processes at most 0.75 was possible",
        ),
        (replace(WELL, pace=Pace(0.0, 69.0, 0.75)), "0.00 of the throughput"),
        (replace(WELL, burn=2, applied_s=(0.0, 20.1)), "expected at most 20 s"),
        (replace(WELL, burn=2, drained_s=20.1), "expected at most 20 s"),
    ],
)
def test_missed_time_limit_fails_a_run(found: Outcome, expected: str) -> None:
    (failure,) = found.failures()
    assert expected in failure
    assert found.as_data()["slow"] == [failure]


def test_pause_limits_are_longer_with_processor_load() -> None:
    assert replace(WELL, burn=2, applied_s=(0.0, 20.0), drained_s=20.0).failures() == []
