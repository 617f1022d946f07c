"""Choice of slice owners by the machines that are there."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.members.stages import MemberMachine, servers_of, stage_of, wanted_owners
from common.core.messages import Member, WorkerId
from common.core.settings import SliceSettings

if TYPE_CHECKING:
    from common.core.settings import Stage


ROOMS = (0, 3, 2, 9, 9)


def machines(reliable: int, spot: int) -> list[MemberMachine]:
    """Return machines; the first spot machine has run longest."""
    return [
        MemberMachine(
            Member(WorkerId(f"w{number}"), number),
            "reliable" if number < reliable else "spot",
            float(number),
        )
        for number in range(reliable + spot)
    ]


def lives(members: tuple[Member, ...]) -> list[int]:
    return [member.life for member in members]


@pytest.mark.parametrize(
    ("reliable", "spot", "before", "stage"),
    [
        (4, 4, None, 1),
        (4, 5, None, 2),
        (2, 30, None, 2),
        (2, 31, None, 3),
        (0, 3, None, 3),
        (3, 0, None, 1),
        # A job leaves a stage only when the ratio is a fifth beyond the stage's limit.
        (5, 6, 1, 1),
        (5, 7, 1, 2),
        (9, 8, 2, 2),
        (6, 4, 2, 1),
        (1, 18, 2, 2),
        (1, 19, 2, 3),
        (1, 13, 3, 3),
        (1, 11, 3, 2),
    ],
)
def test_stage_depends_on_ratio_of_spot_to_reliable_machines(
    reliable: int, spot: int, before: Stage | None, stage: Stage
) -> None:
    assert stage_of(machines(reliable, spot), before) == stage


def test_owners_are_reliable_machines_or_the_longest_running_half_of_spot() -> None:
    there, one = machines(3, 6), SliceSettings(8, owners=1)
    assert lives(servers_of(there, 1, one)) == [0, 1, 2]
    assert lives(servers_of(there, 2, one)) == [3, 4, 5]
    assert lives(servers_of(there, 3, SliceSettings(8, owners=1, servers=2))) == [3, 4]


def test_second_owner_is_found_among_others_if_there_are_too_few() -> None:
    assert lives(servers_of(machines(2, 1), 2, SliceSettings(8, owners=2))) == [0, 2]
    assert lives(servers_of(machines(0, 1), 2, SliceSettings(8, owners=2))) == [0]


@given(st.sets(st.integers(0, 1000), min_size=1, max_size=12), st.integers(1, 64), st.data())
def test_slices_are_shared_evenly_and_reassigned_when_an_owner_leaves(
    there: set[int], count: int, data: st.DataObject
) -> None:
    settings = SliceSettings(count, owners=2)
    servers = tuple(sorted(Member(WorkerId(f"w{life}"), life) for life in there))
    owners = wanted_owners(servers, settings)
    firsts = [each[0] for each in owners]
    assert all(len(set(each)) == len(each) == min(2, len(servers)) for each in owners)
    assert max(firsts.count(each) for each in servers) <= -(-count // len(servers))

    if len(servers) > 1:
        gone = data.draw(st.sampled_from(servers))
        later = wanted_owners(tuple(m for m in servers if m != gone), settings)
        assert all(gone not in each for each in later)


def test_machine_owns_at_most_the_slices_it_has_memory_for() -> None:
    settings = SliceSettings(8, owners=2)
    there = [each._replace(room=room) for each, room in zip(machines(0, 5), ROOMS, strict=True)]
    servers = servers_of(there, 2, settings)
    # Only the necessary number of machines with memory.
    assert lives(servers) == [1, 2, 3]
    rooms = {each.member: each.room for each in there}
    owners = wanted_owners(servers, settings, tuple(rooms[each] for each in servers))
    load = Counter(member.life for each in owners for member in each)
    assert load[1] <= 3
    assert load[2] <= 2
    assert load[3] <= 9
    # Every machine gets one slice before any gets two.
    assert all(owners)
    assert sum(load.values()) == 3 + 2 + 8


def test_slices_that_fit_no_machine_have_no_owner() -> None:
    settings = SliceSettings(8, owners=2)
    servers = servers_of(machines(0, 2), 2, settings)
    assert sum(map(bool, wanted_owners(servers, settings, (3, 2)))) == 5
    assert wanted_owners((), settings) == ((),) * 8
