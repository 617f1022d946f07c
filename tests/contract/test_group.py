"""The contract of groups: threads in memory, and gloo in real processes that are killed."""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import GroupError
from tests.contract.group_fixtures import LONG_S

if TYPE_CHECKING:
    from tests.contract.group_fixtures import Answers, Fleet, Together

pytest_plugins = ["tests.redis_servers", "tests.contract.group_fixtures"]

ALL = ("m0", "m1", "m2", "m3")
# Time that members wait for a silent member.
SHORT_S = 1.0
# Each collective call, with the arguments of one of four members.
CALLS: dict[str, tuple[object, ...]] = {
    "all_reduce": ([1.0] * 1000,),
    "exchange": ([1.0] * 1000, [250] * 4, [250] * 4),
    "gather": ([1.0] * 1000, [250] * 4),
}
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def results(answers: Answers) -> dict[str, Any]:
    return {member: answer.result(LONG_S) for member, answer in answers.items()}


def broken(answers: Answers) -> dict[str, list[str]]:
    """Return the members that each one could not reach."""
    found = dict[str, list[str]]()
    for member, answer in answers.items():
        with pytest.raises(GroupError) as caught:
            answer.result(LONG_S)
        found[member] = sorted(caught.value.unreachable)
        assert all(each in str(caught.value) for each in found[member])
    return found


def answers_or_first_calls(together: Together, name: str, forming: Answers) -> Answers:
    """Return each member's failure to form the group, or its answer to a first call in it."""
    formed = [member for member, answer in forming.items() if answer.exception(LONG_S) is None]
    return forming | together.begin("all_reduce", name, dict.fromkeys(formed, ([1.0] * 1000,)))


def test_all_reduce_sums_vectors_and_counters(together: Together, name: str) -> None:
    together.form(name, ALL)

    for _ in range(3):
        # Each member adds a number of samples and a 1 to its vector. The ones count the members.
        added = together.begin(
            "all_reduce",
            name,
            {m: ([0.1 * n] * 1000 + [10.0**n, 1.0],) for n, m in enumerate(ALL)},
        )
        found = results(added)

    assert found["m0"] == pytest.approx([0.6] * 1000 + [1111, 4], rel=1e-6)
    assert all(found[m].tobytes() == found["m0"].tobytes() for m in ALL)


@DTYPES
def test_exchange_moves_parts_of_any_length(together: Together, name: str, dtype: str) -> None:
    members = ALL[:3]
    together.form(name, members)
    # Lengths that each member sends to ranks 0, 1 and 2, so rank 1 gets nothing.
    sent = [3, 0, 2]

    found = results(
        together.begin(
            "exchange",
            name,
            {
                m: ([10.0 * n + k for k in range(5)], sent, [sent[n]] * 3, dtype)
                for n, m in enumerate(members)
            },
        )
    )

    assert found["m0"].tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert found["m1"].tolist() == []
    assert found["m2"].tolist() == [3, 4, 13, 14, 23, 24]


@DTYPES
def test_gather_returns_all_parts_to_every_member(
    together: Together, name: str, dtype: str
) -> None:
    members = ALL[:3]
    together.form(name, members)
    lengths = [2, 0, 3]

    found = results(
        together.begin(
            "gather", name, {m: ([float(n)] * 5, lengths, dtype) for n, m in enumerate(members)}
        )
    )

    assert {tuple(vector) for vector in found.values()} == {(0, 0, 2, 2, 2)}


def test_single_member_forms_a_group(together: Together, name: str) -> None:
    together.form(name, ALL[:1])

    assert results(together.begin("all_reduce", name, {"m0": ([1.0, 2.0],)}))["m0"].tolist() == [
        1,
        2,
    ]
    assert results(together.begin("copy", name, {"m0": ([1.0],)}))["m0"] == [[1.0]]


@pytest.mark.parametrize("call", CALLS)
def test_death_during_a_call_is_reported_and_survivors_form_a_new_group(
    fleet: Fleet, together: Together, name: str, call: str
) -> None:
    # The neighbours of the dead member notice and leave, and then the others do.
    together.form(name, ALL)
    left = ("m0", "m2", "m3")
    calling = together.begin(call, name, dict.fromkeys(left, CALLS[call]))

    fleet.kill("m1")

    assert broken(calling) == {each: ["m1"] for each in left}
    together.form(name + "-next", left)
    again = results(together.begin("all_reduce", name + "-next", dict.fromkeys(left, ([1.0],))))
    assert [vector.tolist() for vector in again.values()] == [[3.0]] * 3


@pytest.mark.parametrize("call", CALLS)
def test_call_with_frozen_member_times_out_and_blames_no_member(
    fleet: Fleet, together: Together, name: str, call: str
) -> None:
    together.form(name, ALL, SHORT_S)
    fleet.freeze("m1")

    calling = together.begin(call, name, dict.fromkeys(("m0", "m2", "m3"), CALLS[call]))

    # The machine of a frozen process still answers, so no member looks unreachable.
    assert broken(calling) == {"m0": [], "m2": [], "m3": []}


def test_abort_from_another_thread_breaks_call_and_leaves_group(
    together: Together, name: str
) -> None:
    together.form(name, ALL[:3])
    adding = together.begin("all_reduce", name, dict.fromkeys(("m0", "m1"), ([1.0] * 1000,)))

    results(together.begin("abort", name, {"m0": (), "m1": ()}))

    assert broken(adding) == {"m0": [], "m1": []}
    assert broken(together.begin("all_reduce", name, {"m2": ([1.0] * 1000,)})) == {"m2": []}
    assert broken(together.begin("all_reduce", name, {"m0": ([1.0] * 1000,)})) == {"m0": []}


def test_member_that_dies_while_group_forms_is_reported(
    fleet: Fleet, together: Together, name: str
) -> None:
    together.make(name, ALL[:3])
    fleet.kill("m2")

    forming = together.begin("form", name, {"m0": (), "m1": ()})

    assert broken(forming) == {"m0": ["m2"], "m1": ["m2"]}


def test_forming_with_absent_member_times_out(fleet: Fleet, together: Together, name: str) -> None:
    together.make(name, ALL[:3], SHORT_S)
    fleet.freeze("m2")

    assert broken(together.begin("form", name, {"m0": (), "m1": ()})) == {"m0": [], "m1": []}


def test_forming_with_member_that_freezes_times_out(
    fleet: Fleet, together: Together, name: str
) -> None:
    together.make(name, ALL[:3], SHORT_S)
    together.begin("form", name, {"m2": ()})
    fleet.await_word(name)
    fleet.freeze("m2")
    forming = together.begin("form", name, {"m0": (), "m1": ()})
    _, going_on = wait(forming.values(), 3 * SHORT_S)  # gloo itself may take five

    assert not going_on
    assert broken(answers_or_first_calls(together, name, forming)) == {"m0": [], "m1": []}


def test_forming_can_be_aborted_before_and_after_it_begins(together: Together, name: str) -> None:
    together.make(name, ALL[:2])
    forming = together.begin("form", name, {"m0": ()})
    results(together.begin("abort", name, {"m0": (), "m1": ()}))

    assert broken(forming) == {"m0": []}
    assert broken(together.begin("form", name, {"m1": ()})) == {"m1": []}


@pytest.mark.parametrize("call", CALLS)
def test_member_that_dies_before_first_call_is_reported(
    fleet: Fleet, together: Together, name: str, call: str
) -> None:
    together.form(name, ALL)
    fleet.kill("m3")

    calling = together.begin(call, name, dict.fromkeys(ALL[:3], CALLS[call]))

    assert broken(calling) == {each: ["m3"] for each in ALL[:3]}


def test_members_that_cannot_reach_each_other_report_each_other(
    fleet: Fleet, together: Together, name: str
) -> None:
    # m1 reaches both. It may have formed its part before the others give up.
    fleet.cut("m0", "m2")
    together.make(name, ALL[:3], SHORT_S)
    forming = together.begin("form", name, dict.fromkeys(ALL[:3], ()))

    middle = {"m1": forming.pop("m1")}
    assert broken(forming) == {"m0": ["m2"], "m2": ["m0"]}
    assert broken(answers_or_first_calls(together, name, middle)) == {"m1": []}


def test_group_name_cannot_be_used_twice(together: Together, name: str) -> None:
    together.form(name, ALL[:2])
    together.make(name, ALL[:2])

    answers = together.begin("form", name, dict.fromkeys(ALL[:2], ()))

    assert broken(answers) == {"m0": [], "m1": []}
    assert all("used before" in str(answer.exception()) for answer in answers.values())


def test_copy_runs_beside_calls_of_another_group(together: Together, name: str) -> None:
    together.form(name, ALL[:3])
    together.form(name + "-copy", ("m1", "m3"))
    state: list[list[float]] = [[2.0] * 3000, [], [7.0]]
    lacking: list[list[float]] = [[0.0] * 3000, [], [0.0]]

    copying = together.begin("copy", name + "-copy", {"m1": tuple(state)})  # waits for m3
    for _ in range(3):
        results(together.begin("all_reduce", name, dict.fromkeys(ALL[:3], ([1.0],))))
    copying |= together.begin("copy", name + "-copy", {"m3": tuple(lacking)})

    assert [vector.tolist() for vector in results(copying)["m3"]] == state


def test_broken_copy_leaves_other_groups_intact(
    fleet: Fleet, together: Together, name: str
) -> None:
    together.form(name, ALL[:2])
    together.form(name + "-copy", ("m1", "m3"))
    copying = together.begin("copy", name + "-copy", {"m1": ([2.0] * 3_000_000,)})

    fleet.kill("m3")

    assert broken(copying) == {"m1": ["m3"]}
    found = results(together.begin("all_reduce", name, dict.fromkeys(ALL[:2], ([1.0],))))
    assert found["m0"].tolist() == [2.0]
