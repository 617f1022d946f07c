"""Choice of one snapshot among several, and what it covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.core.messages import GENESIS, Lead, ModelId
from common.core.snapshots import Snapshot, choose, genesis, roll_forward
from tests.unit.core.examples import FIRST, P, Q, batch
from tests.unit.core.leaders import Topic, read, topics, update

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.core.history import History
    from common.core.messages import AuditRecord


def after(history: History) -> Snapshot:
    """Return what the leader in force would publish after it has read this history."""
    return Snapshot(history.epoch, history.head, history.position, 0, FIRST, number=history.number)


def chosen_of(
    snapshots: Iterable[Snapshot], updates: Sequence[tuple[int, AuditRecord | None]]
) -> tuple[Snapshot, History]:
    """Return the chosen snapshot and the history; fail if there is none."""
    choice = choose(snapshots, updates)
    assert choice is not None
    return choice


def test_newest_snapshot_of_the_newest_leader_is_chosen() -> None:
    topic: Topic = [Lead(-1, GENESIS, "c1", 0), update(0, 1), update(0, 2)]
    snapshots = [genesis(FIRST), *(after(read(topic[:count])) for count in (2, 3))]

    chosen, history = chosen_of(snapshots, list(enumerate(topic)))

    assert chosen.made == ModelId(0, 2)
    assert (history.epoch, history.head) == (0, ModelId(0, 2))


def test_snapshot_that_a_later_lead_took_back_is_not_chosen() -> None:
    # offset   0         1     2     3
    # record   Lead(-1)  J=1   J=2   Lead(0) base J=1
    # found    genesis   J=1   J=2: its upload came late
    topic: Topic = [Lead(-1, GENESIS, "c1", 0), update(0, 1), update(0, 2)]
    snapshots = [genesis(FIRST), *(after(read(topic[:count])) for count in (2, 3))]
    topic.append(Lead(0, ModelId(0, 1), "c2", 3))

    chosen, history = chosen_of(snapshots, list(enumerate(topic)))

    assert chosen.made == ModelId(0, 1)
    assert (history.epoch, history.base_lost) == (3, False)


def test_genesis_is_always_valid() -> None:
    topic: Topic = [Lead(-1, GENESIS, "c1", 0), update(0, 1), Lead(0, GENESIS, "c2", 2)]

    chosen, _ = chosen_of([genesis(FIRST), after(read(topic[:2]))], list(enumerate(topic)))

    assert chosen == genesis(FIRST)


def test_choice_without_genesis_may_find_nothing() -> None:
    topic: Topic = [Lead(-1, GENESIS, "c1", 0), update(0, 1), Lead(0, GENESIS, "c2", 2)]

    assert choose([after(read(topic[:2]))], list(enumerate(topic))) is None


def test_snapshot_settles_everything_below_waiting_batches() -> None:
    # claimed of P: 40; batches 1 and 3 wait, at [10:20] and [30:40]
    snapshot = Snapshot(0, GENESIS, 0, 0, {P: 40, Q: 7}, waiting=(batch(1), batch(3)))

    assert snapshot.settled == {P: 10, Q: 7}


@dataclass(frozen=True)
class Found:
    """Snapshots and records of a topic that a candidate may find, besides the genesis."""

    topic: Topic
    snapshots: list[Snapshot]


def found(topic: Topic, points: list[int]) -> Found:
    """Draw snapshots that were published at some points; some of them are lost."""
    return Found(topic, [after(read(topic[: min(point, len(topic))])) for point in points])


@given(st.builds(found, topics, st.lists(st.integers(0, 40), max_size=6)))
def test_chosen_snapshot_is_the_best_in_the_history(found: Found) -> None:
    whole = read(found.topic)
    snapshots = [*found.snapshots, genesis(FIRST)]
    begin = min(snapshot.updates_position for snapshot in snapshots)

    chosen, history = chosen_of(snapshots, list(enumerate(found.topic))[begin:])

    assert chosen.made in whole.path
    assert (history.epoch, history.head) == (whole.epoch, whole.head)
    good = [snapshot.made.version for snapshot in snapshots if snapshot.made in whole.path]
    assert chosen.made.version == max(good)


def test_snapshot_is_rolled_forward_over_later_updates() -> None:
    # offset   0         1           2               3                   4           5
    # record   Lead(-1)  J=1: 0, 1   J=2: 3, 9       Lead(0), base J=2   J=3: 4      J=3 of 0: 5
    # snapshot J=1, control position 8, batches 3 to 5 wait                           void
    topic: Topic = [Lead(-1, GENESIS, "c1", 0), update(0, 1, 0, 1), update(0, 2, 3, 9)]
    topic += [Lead(0, ModelId(0, 2), "c2", 3, exact=True), update(3, 3, 4), update(0, 3, 5)]
    before = replace(
        after(read(topic[:2])),
        control_position=8,
        waiting=tuple(map(batch, (3, 4, 5))),
        failure_counts={4: 1, 5: 1},
        returned=(3, 5),
        samples=20,
        losses=(1.0,),
    )
    records = list(enumerate(topic))[2:]
    chosen, history = chosen_of([genesis(FIRST), before], records)

    rolled = roll_forward(chosen, history, records)
    assert rolled == replace(
        before,
        made=ModelId(3, 3),
        waiting=(batch(5),),
        failure_counts={5: 1},
        returned=(5,),
        samples=50,
        losses=(1.0, 1.0, 1.0),
        used=tuple(map(batch, (3, 9, 4))),
    )
    assert roll_forward(before, chosen_of([before], [])[1], []) == before
