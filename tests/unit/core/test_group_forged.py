"""Messages forged by someone who may write to Redis delay a group for at most ten seconds.

Each case forges one message. The forger's name also has a heartbeat for the whole test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from common.core import commands as do
from common.core import events
from common.core.members.leading import SILENT
from common.core.members.state_reports import LIFETIME_S
from common.core.messages import (
    GENESIS,
    Broken,
    GradientReady,
    ModelId,
    Reduced,
    StateReport,
    Stored,
    TriggerId,
    WorkerId,
)
from tests.unit.core.examples import SAMPLES, A, B, C, of_kind
from tests.unit.core.test_group import DIGEST, OWN, Group, Process, begun

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.messages import GroupReply

FORGER = WorkerId("forger")
WITHIN_S = 10.0
STEP_S = 0.1


def state(group: Group, **changes: object) -> StateReport:
    """Return a report in the name of a worker that the job does not have."""
    model = group.bench.model
    newest = of_kind(group.bench.said, do.PostTrigger)[-1].trigger.id
    report = StateReport(FORGER, model, 99, newest, None, address="127.0.0.1:1", numbers=10)
    return replace(report, **changes)


def own(group: Group) -> ModelId:
    made = group.of[A].replica.made
    assert made is not None
    return made


def attempt_of(group: Group, worker: WorkerId) -> Reduced:
    """Return a member's report on the attempt that it has entered."""
    entered = group.of[worker].entered
    assert entered is not None
    attempt = entered.reduce.attempt
    model = ModelId(attempt.epoch, attempt.version - 1)
    return Reduced(worker, model, group.of[worker].member.life, attempt, DIGEST + 1)


def broken(said: Reduced) -> Broken:
    return Broken(said.worker, said.model, said.life, said.attempt, "not_finite")


def await_updates(group: Group, more: int) -> None:
    """Let the group work until it has more updates, for at most ten seconds."""
    bench, before = group.bench, len(group.updates)
    until = bench.now + WITHIN_S
    # The values keep the objects alive, so that no later object gets the id of an earlier one.
    entered = {id(each.entered): each.entered for each in group.of.values()}
    while len(group.updates) < before + more:
        assert bench.now < until, f"no update: {bench.leader_status.group}"
        assert of_kind(bench.said, do.Hold) == []
        bench.announce(*group.of)
        bench.see(*group.of, FORGER, digest=OWN)
        bench.tick(bench.now + STEP_S)
        group.settle()
        new = {w: each for w, each in group.of.items() if id(each.entered) not in entered}
        strangers = {
            member
            for each in new.values()
            if each.entered is not None
            for member in each.entered.membership.members
            if member not in {process.member for process in group.of.values()}
        }
        entered |= {id(each.entered): each.entered for each in new.values()}
        for worker, process in new.items():
            if process.entered is not None and strangers:  # unreachable
                attempt = process.entered.reduce.attempt
                group.carry_out(process, process.replica.failed(attempt, "left", tuple(strangers)))
            else:
                group.finish(worker)
        group.read_back()


LIFE = 99
CASES: dict[str, tuple[Callable[[Group], GroupReply], str]] = {
    "too many numbers": (
        lambda g: state(g, numbers=2**62),
        "numbers: the reported model has more than",
    ),
    "more numbers than the others have": (
        lambda g: state(g, numbers=2**39),
        "but those of most workers have 10; it runs another version",
    ),
    "a version above the newest one": (
        lambda g: state(g, made=ModelId(g.bench.epoch, 10**6)),
        "made: the report names version 1000000, but the newest is 1",
    ),
    "a trigger that was never posted": (
        lambda g: state(g, last_trigger=TriggerId(g.bench.epoch, 2**62)),
        "heard: the report names a trigger that the leader has not posted",
    ),
    "another leader's trigger": (
        lambda g: state(g, last_trigger=TriggerId(g.bench.epoch + 1, 1)),
        "heard: the report names a trigger that the leader has not posted",
    ),
    "unknown slices": (
        lambda g: state(g, slices=(99,)),
        "slices: the report names slice 99",
    ),
    "the newest version at an unknown member": (lambda g: state(g, made=own(g)), ""),
    "a report of another process under a member's name": (
        lambda g: state(g, worker=A, made=own(g)),
        "two processes run as worker a",
    ),
    "an invalid report of a member": (
        lambda g: state(g, worker=A, life=g.of[A].member.life, numbers=2**62),
        "a report in the worker's name was rejected: numbers",
    ),
    "a member that accuses all others": (
        lambda g: state(g, unreachable=tuple(each.member for each in g.of.values())),
        "",
    ),
    "a gradient of another process": (
        lambda g: GradientReady(A, g.bench.model, (4,), SAMPLES, 1.0, {}, 1e9, life=LIFE),
        "",
    ),
    "a result that the others do not have": (lambda g: attempt_of(g, A), ""),
    "a sum that is not finite": (
        lambda g: broken(attempt_of(g, A)),
        "",
    ),
    "a stored version that was not requested": (
        lambda g: Stored(FORGER, g.bench.model, LIFE, own(g)),
        "",
    ),
    "a repeated old report": (
        lambda g: state(
            g, worker=A, life=g.of[A].member.life, last_trigger=TriggerId(g.bench.epoch, 1)
        ),
        "",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_updates_continue_despite_any_forged_message_and_status_reports_it(case: str) -> None:
    make, expected = CASES[case]
    group = begun(A, B, C)
    group.finish(A, B, C)
    group.read_back()
    group.bench.announce(A, B, C)
    group.settle()
    forged = make(group)
    group.bench.see(*group.of, FORGER, digest=OWN)
    group.bench.feed(events.RepliesRead((forged,)))
    group.bench.tick(group.bench.now + STEP_S)

    status = group.bench.leader_status.group
    assert status is not UNSET
    assert expected in status.left_out.get(forged.worker, "")
    assert all(seconds <= WITHIN_S for seconds in status.waits.values())
    await_updates(group, 3)
    assert {A, B, C} == set(group.of)


def test_forged_version_0_is_abandoned_for_one_that_a_member_makes() -> None:
    group = Group(A, B)
    group.bench.lead()
    group.bench.see(*group.of, FORGER, digest=OWN)
    group.bench.feed(events.RepliesRead((state(group, made=GENESIS, origin=1),)))
    await_updates(group, 2)


def test_worker_that_never_answers_is_left_out_with_a_reason() -> None:
    group = begun(A, B)
    group.finish(A, B)
    group.read_back()
    group.bench.see(*group.of, FORGER, digest=OWN)
    group.bench.feed(events.RepliesRead((state(group),)))
    for _ in range(int(2 * LIFETIME_S / STEP_S)):
        group.bench.see(*group.of, FORGER, digest=OWN)
        group.bench.tick(group.bench.now + STEP_S)
        group.settle()
    status = group.bench.leader_status.group
    assert status is not UNSET
    assert status.left_out == {FORGER: SILENT}
    assert status.waits == {}


def test_second_process_of_a_name_is_left_out_until_the_first_is_gone() -> None:
    #   life 1   ██████████████████ killed
    #   life 9        ░░░░░░░░░░░░░░░░░░░░░░░██████
    group = begun(A, B)
    group.finish(A, B)
    group.read_back()
    first, second = group.of[A], Process(A, 9)
    for _ in range(3):
        group.others = [second]
        await_updates(group, 2)
        status = group.bench.leader_status.group
        assert status is not UNSET
        assert status.members == (A, B)
        assert status.left_out[A].startswith(
            "two processes run as worker a, and the leader accepts only the first"
        )
        assert second.replica.made is None

    group.of[A], group.others = second, []
    since = group.bench.now
    while second.weights is None:
        await_updates(group, 1)
    assert group.bench.now < since + WITHIN_S
    assert first.weights is not None
    assert group.of[A].weights == group.of[B].weights
