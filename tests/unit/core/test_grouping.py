"""The grouping rule against a naive reference: members of the next group, and their order."""

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.grouping import Grouper
from common.core.messages import Batch, WorkerId
from common.core.spans import Span
from common.core.weighted_turns import FLOOR
from tests.unit.core.examples import A, B, C, batch


def test_second_batch_of_a_worker_waits_behind_first_batches_of_others() -> None:
    # control offset   0  1  2  3
    # worker           a  a  b  c
    # rank             0  1  0  0    -> K = 3 takes 0 2 3, leaves 1
    grouper = Grouper(batch(offset, worker) for offset, worker in enumerate([A, A, B, C]))

    assert [taken.offset for taken in grouper.take(3)] == [0, 2, 3]
    assert [waiting.offset for waiting in grouper.batches] == [1]


def test_batch_put_back_leads_the_next_group() -> None:
    grouper = Grouper([batch(5, A), batch(6, B)])
    grouper.add(batch(1, A))

    assert grouper.oldest == 1
    assert [taken.offset for taken in grouper.take(2)] == [1, 6]


def test_adding_a_waiting_batch_again_is_refused() -> None:
    grouper = Grouper([batch(0)])

    with pytest.raises(ValueError, match="batch 0 waits already"):
        grouper.add(batch(0))


def test_removing_a_batch_that_does_not_wait_returns_none() -> None:
    grouper = Grouper([batch(0)])

    assert grouper.remove(0) == batch(0)
    assert grouper.remove(0) is None
    assert (len(grouper), grouper.oldest, grouper.take(1)) == (0, None, ())


def next_group(waiting: list[Batch], count: int) -> list[Batch]:
    """Apply the rule literally: by rank within one's worker, then by age."""
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
def test_oldest_batch_is_always_in_next_group_and_none_is_used_twice(
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


# --- several streams -----------------------------------------------------------------------------


def of_streams(offset: int, worker: WorkerId, **records: int) -> Batch:
    """Return a batch with this many records of each of these streams."""
    spans = [Span(stream, 0, offset * 100, offset * 100 + n) for stream, n in records.items()]
    return Batch(offset, worker, tuple(sorted(spans)), sum(records.values()))


def named(batches: Iterable[Batch]) -> str:
    """Return the first stream of each batch, in order."""
    return "".join(batch.address[0].topic for batch in batches)


def test_streams_take_turns_regardless_of_age() -> None:
    waiting = [of_streams(o, A, **{"a" if o < 20 else "b": 10}) for o in range(40)]
    grouper = Grouper(waiting)

    for _ in range(5):
        group = grouper.take(8)
        assert Counter(named(group)) == {"a": 4, "b": 4}
        assert named(group)[0] == "a"  # the oldest of all


def test_oldest_leads_within_a_stream_and_workers_rank_before_streams() -> None:
    # control offset   0  1  2  3  4
    # worker           a  a  b  b  c      rank 0: one each of a, b, c
    # stream           x  x  x  y  x
    streams = "xxxyx"
    workers = [A, A, B, B, C]
    grouper = Grouper(of_streams(o, workers[o], **{streams[o]: 10}) for o in range(5))

    assert [taken.offset for taken in grouper.take(3)] == [0, 3, 4]


def test_refill_continues_the_stream_mix_of_its_group() -> None:
    # Without the batches that the group has, each refill would take the oldest: all of stream a.
    grouper = Grouper(of_streams(o, A, **{"a" if o < 20 else "b": 10}) for o in range(40))
    group = list(grouper.take(1))
    while len(group) < 20:
        group += grouper.take(1, group)

    assert Counter(named(group)) == {"a": 10, "b": 10}


def test_refill_prefers_workers_with_fewest_batches_in_the_group() -> None:
    grouper = Grouper([batch(0, A), batch(1, A), batch(2, B)])

    assert [taken.offset for taken in grouper.take(1, [batch(9, A)])] == [2]


def test_worker_with_least_load_is_first_after_the_oldest_batch() -> None:
    grouper = Grouper([batch(0, A), batch(1, A), batch(2, B), batch(3, C)])

    assert [b.offset for b in grouper.take(3, loads={A: 1, B: 2})] == [0, 3, 1]


def test_group_for_one_worker_takes_orphans_then_its_own_then_the_oldest() -> None:
    # control offset   0  1  2  3  4  5
    # worker           b  a  c  a  b  c      c is gone
    workers = [B, A, C, A, B, C]
    grouper = Grouper(batch(offset, worker) for offset, worker in enumerate(workers))
    assert (grouper.waiting_of(A), grouper.is_for([A], [A, B]), grouper.is_for([], [A])) == (
        2,
        True,
        False,
    )

    assert [each.offset for each in grouper.take_for(A, {A, B}, 5)] == [2, 5, 1, 3, 0]
    # The waiting batch is B's.
    assert not grouper.is_for([A], [A, B])


def test_overdue_batch_leads_a_group_for_one_worker() -> None:
    grouper = Grouper([batch(0, C), batch(1, A), batch(2, B)])

    assert [each.offset for each in grouper.take_for(A, {A, B}, 2, first=2)] == [2, 0]


def test_streams_take_turns_in_a_group_for_one_worker() -> None:
    waiting = [of_streams(o, A, **{"a" if o < 20 else "b": 10}) for o in range(40)]
    grouper = Grouper(waiting)

    for _ in range(5):
        assert Counter(named(grouper.take_for(A, {A}, 8))) == {"a": 4, "b": 4}


def test_batch_of_several_streams_counts_for_each_by_its_share() -> None:
    # Half of each mixed batch already counts for b, so b's own batches come half as often.
    mixed = [of_streams(o, A, a=51, b=49) for o in range(100)]
    grouper = Grouper([*mixed, *(of_streams(o, A, b=100) for o in range(100, 200))])

    group = [len(each.address) for each in grouper.take(90)]

    assert 30 <= group.count(2) <= 60


@given(st.randoms(use_true_random=False), st.integers(1, 8), st.integers(2, 5))
def test_slow_stream_gets_its_minimum_share_and_oldest_batch_is_always_in(
    random: object, group_size: int, streams: int
) -> None:
    choose = random.choice  # type: ignore[attr-defined]  # a Random: hypothesis does not say so
    grouper, offset, groups = Grouper(), 0, list[tuple[Batch, ...]]()
    late = f"s{streams}"
    for _ in range(30):
        # Once the queue is full of other batches, one batch of the slow stream arrives.
        while len(grouper) < 6 * group_size:
            busy = f"s{choose(range(streams))}"
            grouper.add(of_streams(offset, choose([A, B, C]), **{busy: 10}))
            offset += 1
        grouper.add(of_streams(offset, choose([A, B, C]), **{late: 10}))
        offset += 1
        oldest = grouper.oldest
        groups.append(grouper.take(group_size))
        assert groups[-1][0].offset == oldest
        assert len(groups[-1]) == group_size

    trickle = sum(each.address[0].topic == late for group in groups for each in group)
    fair = FLOOR / (streams + 1) * group_size * len(groups)
    assert trickle >= min(fair / 2, len(groups) / 2) - 4


def naive(waiting: Sequence[Batch], ranks: Counter[WorkerId], stream: str | None) -> Batch:
    """Return the oldest batch, of one stream or of all, of the workers with the lowest rank."""
    least = min(ranks[each.worker] for each in waiting)
    here = [each for each in waiting if ranks[each.worker] == least]
    return min(
        (each for each in here if stream in {None, each.address[0].topic}), key=lambda b: b.offset
    )


@given(
    st.lists(st.tuples(st.sampled_from([A, B, C]), st.sampled_from("xyz")), max_size=40),
    st.integers(1, 12),
    st.integers(0, 3),
)
def test_taken_batch_matches_the_naive_rule(
    batches: list[tuple[WorkerId, str]], count: int, had: int
) -> None:
    waiting = [of_streams(o, w, **{s: 10}) for o, (w, s) in enumerate(batches)]
    having, waiting = waiting[:had], waiting[had:]
    ranks = Counter(each.worker for each in having)

    for number, taken in enumerate(Grouper(waiting).take(count, having)):
        stream = taken.address[0].topic if number or having else None
        expected = min(waiting, key=lambda b: b.offset) if stream is None else None
        assert taken == (expected or naive(waiting, ranks, stream))
        ranks[taken.worker] += 1
        waiting.remove(taken)
