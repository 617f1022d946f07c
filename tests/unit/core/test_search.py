"""Where a candidate looks for its snapshot, and for whom it waits."""

from __future__ import annotations

from common.core import events
from common.core.commands import FindSnapshots
from common.core.messages import GENESIS, Lead, ModelId
from common.core.search import LATE, Chosen, Search, Wait
from common.core.snapshots import Snapshot, genesis
from tests.unit.core.examples import FIRST
from tests.unit.core.leaders import Topic, update

TTL_S = 1.0
# offset           0                        1             2             3
LED: Topic = [Lead(-1, GENESIS, "c1"), update(0, 1), update(0, 2), update(0, 3)]


def snapshot(by: int, version: int, updates_position: int) -> Snapshot:
    return Snapshot(by, ModelId(by, version), updates_position, 0, FIRST)


def found(source: events.Source, topic: Topic, *snapshots: Snapshot) -> events.SnapshotsFound:
    return events.SnapshotsFound(source, snapshots, tuple(enumerate(topic)), len(topic))


def test_where_nobody_ever_led_the_job_begins() -> None:
    search = Search(TTL_S)
    assert search.begin() == FindSnapshots("hot")
    assert search.found(found("hot", []), 0.0) == FindSnapshots("genesis")
    chosen = search.found(found("genesis", [], genesis(FIRST)), 0.0)
    assert isinstance(chosen, Chosen)
    assert chosen.snapshot == genesis(FIRST)


def test_a_hot_snapshot_of_the_leader_in_force_is_taken_and_storage_never_asked() -> None:
    search = Search(TTL_S)
    search.begin()
    hot = snapshot(by=0, version=2, updates_position=3)
    chosen = search.found(found("hot", LED, hot), 0.0)
    assert isinstance(chosen, Chosen)
    assert (chosen.snapshot, chosen.history.epoch) == (hot, 0)
    assert chosen.history.head == ModelId(0, 3)


def test_where_the_leader_in_force_left_none_it_has_a_lifetime_to_come_back() -> None:
    # at     0.0                    0.5                       1.0
    # board  empty: wait            empty: still waiting      empty: it is dead, look everywhere
    search = Search(TTL_S)
    for now in (0.0, 0.5):
        search.begin()
        assert search.found(found("hot", LED), now) == Wait()
    search.begin()
    assert search.found(found("hot", LED), TTL_S) == FindSnapshots("all")
    old = snapshot(by=0, version=1, updates_position=2)
    chosen = search.found(found("all", LED, old), TTL_S)
    assert isinstance(chosen, Chosen)
    assert chosen.snapshot == old


def test_a_hot_snapshot_of_an_earlier_leader_is_no_reason_not_to_wait() -> None:
    search = Search(TTL_S)
    search.begin()
    topic: Topic = [*LED, Lead(0, ModelId(0, 2), "c2")]
    assert search.found(found("hot", topic, snapshot(0, 2, 3)), 0.0) == Wait()


def test_waiting_long_ago_does_not_count() -> None:
    search = Search(TTL_S)
    search.begin()
    assert search.found(found("hot", LED), 0.0) == Wait()
    search.begin()
    assert search.found(found("hot", LED), (LATE + 1) * TTL_S + 0.1) == Wait()


def test_where_no_checkpoint_holds_either_it_begins_anew() -> None:
    search = Search(TTL_S)
    search.begin()
    search.found(found("hot", LED), 0.0)
    search.begin()
    search.found(found("hot", LED), TTL_S)
    taken_back = snapshot(by=0, version=3, updates_position=4)
    topic: Topic = [*LED, Lead(0, GENESIS, "c2")]
    assert search.found(found("all", topic, taken_back), TTL_S) == FindSnapshots("genesis")


def test_a_torn_snapshot_is_never_chosen_again() -> None:
    search = Search(TTL_S)
    search.begin()
    hot = snapshot(by=0, version=2, updates_position=3)
    search.leave_out(hot)
    assert search.found(found("hot", LED, hot), 0.0) == Wait()
    search.begin()
    search.found(found("hot", LED, hot), TTL_S)
    old = snapshot(by=0, version=1, updates_position=2)
    chosen = search.found(found("all", LED, hot, old), TTL_S)
    assert isinstance(chosen, Chosen)
    assert chosen.snapshot == old
