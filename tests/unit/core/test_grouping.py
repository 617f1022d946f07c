"""The grouping rule against a naive reference: who is in the next group, and in which order."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.grouping import Grouper
from common.core.messages import Batch, WorkerId
from tests.unit.core.examples import A, B, C, batch


def test_a_workers_second_batch_waits_behind_everyone_elses_first() -> None:
    # control offset   0  1  2  3
    # worker           a  a  b  c
    # rank             0  1  0  0    -> K = 3 takes 0 2 3, leaves 1
    grouper = Grouper(batch(offset, worker) for offset, worker in enumerate([A, A, B, C]))

    assert [taken.offset for taken in grouper.take(3)] == [0, 2, 3]
    assert [waiting.offset for waiting in grouper.batches] == [1]


def test_a_batch_put_back_leads_the_next_group() -> None:
    grouper = Grouper([batch(5, A), batch(6, B)])
    grouper.add(batch(1, A))

    assert grouper.oldest == 1
    assert [taken.offset for taken in grouper.take(2)] == [1, 6]


def test_a_batch_waits_once() -> None:
    grouper = Grouper([batch(0)])

    with pytest.raises(ValueError, match="batch 0 waits already"):
        grouper.add(batch(0))


def test_a_batch_that_does_not_wait_cannot_be_removed() -> None:
    grouper = Grouper([batch(0)])

    assert grouper.remove(0) == batch(0)
    assert grouper.remove(0) is None
    assert (len(grouper), grouper.oldest, grouper.take(1)) == (0, None, ())


def next_group(waiting: list[Batch], count: int) -> list[Batch]:
    """The rule, as one would explain it: by rank within one's worker, then by age."""
    ranks = Counter[WorkerId]()
    ranked = list[tuple[int, int]]()
    for one in sorted(waiting, key=lambda b: b.offset):
        ranked.append((ranks[one.worker], one.offset))
        ranks[one.worker] += 1
    by_offset = {one.offset: one for one in waiting}
    return [by_offset[offset] for _, offset in sorted(ranked)[:count]]


steps = st.lists(
    st.tuples(st.sampled_from("+++-g"), st.sampled_from([A, B, C]), st.integers(0, 60)), max_size=60
)


@given(steps, st.integers(1, 5))
def test_no_batch_is_used_twice_and_the_oldest_is_always_in_the_next_group(
    steps: list[tuple[str, WorkerId, int]], group_size: int
) -> None:
    grouper, waiting = Grouper(), list[Batch]()
    for step, worker, offset in steps:
        there = [one for one in waiting if one.offset == offset]
        if step == "+" and not there:
            waiting.append(batch(offset, worker))
            grouper.add(waiting[-1])
        elif step == "-":
            assert grouper.remove(offset) == (there[0] if there else None)
            waiting = [one for one in waiting if one not in there]
        elif step == "g":
            expected = next_group(waiting, group_size)
            group = list(grouper.take(group_size))
            assert group == expected
            if waiting:
                assert group[0] == min(waiting, key=lambda one: one.offset)  # none starves
            waiting = [one for one in waiting if one not in group]
        assert list(grouper.batches) == sorted(waiting, key=lambda one: one.offset)
        assert len(grouper) == len(waiting)
