"""A candidate's search for its snapshot: the places it reads, and when it waits."""

from __future__ import annotations

from msgspec.structs import replace

from common.core import events
from common.core.commands import FindSnapshots
from common.core.messages import GENESIS, CheckpointStored, Lead, ModelId
from common.core.snapshot_search import (
    LATE,
    SEARCH_AGAIN_S,
    TORN_S,
    Chosen,
    Lost,
    Missing,
    SnapshotSearch,
    Wait,
)
from common.core.snapshots import Snapshot, genesis
from common.core.spans import LogPosition
from tests.unit.core.examples import FIRST
from tests.unit.core.leaders import Topic, update

TTL_S = 1.0
# offset           0                        1             2             3
LED: Topic = [Lead(-1, GENESIS, "c1", 0), update(0, 1), update(0, 2), update(0, 3)]


RUNNING = events.WantedChanged("running")
SHORT = "the updates topic lost records: it ends at 2"


def judge(
    search: SnapshotSearch,
    found: events.SnapshotsFound,
    now: float,
    request: events.WantedChanged = RUNNING,
) -> object:
    return search.found(found, request, now)


def snapshot(by: int, version: int, updates_position: int) -> Snapshot:
    return Snapshot(by, ModelId(by, version), updates_position, 0, FIRST)


def found(source: events.Source, topic: Topic, *snapshots: Snapshot) -> events.SnapshotsFound:
    return events.SnapshotsFound(source, snapshots, tuple(enumerate(topic)), len(topic))


def test_search_without_earlier_leader_starts_at_genesis() -> None:
    search = SnapshotSearch(TTL_S)
    assert search.begin() == FindSnapshots("hot")
    assert judge(search, found("hot", []), 0.0) == FindSnapshots("all")
    assert judge(search, found("all", []), 0.0) == FindSnapshots("genesis")
    chosen = judge(search, found("genesis", [], genesis(FIRST)), 0.0)
    assert isinstance(chosen, Chosen)
    assert chosen.snapshot == genesis(FIRST)


def test_hot_snapshot_of_current_leader_is_used_without_reading_storage() -> None:
    search = SnapshotSearch(TTL_S)
    search.begin()
    hot = snapshot(by=0, version=2, updates_position=3)
    chosen = judge(search, found("hot", LED, hot), 0.0)
    assert isinstance(chosen, Chosen)
    assert (chosen.snapshot, chosen.history.epoch) == (hot, 0)
    assert chosen.history.head == ModelId(0, 3)


def test_current_leader_without_snapshot_has_a_lease_lifetime_to_return() -> None:
    # at     0.0                    0.5                       1.0
    # Redis  empty: wait            empty: still waiting      empty: leader is dead, search storage
    search = SnapshotSearch(TTL_S)
    for now in (0.0, 0.5):
        search.begin()
        assert judge(search, found("hot", LED), now) == Wait()
    search.begin()
    assert judge(search, found("hot", LED), TTL_S) == FindSnapshots("all")
    old = snapshot(by=0, version=1, updates_position=2)
    chosen = judge(search, found("all", LED, old), TTL_S)
    assert isinstance(chosen, Chosen)
    assert chosen.snapshot == old


def test_hot_snapshot_of_an_earlier_leader_does_not_end_the_wait() -> None:
    search = SnapshotSearch(TTL_S)
    search.begin()
    topic: Topic = [*LED, Lead(0, ModelId(0, 2), "c2", 4)]
    assert judge(search, found("hot", topic, snapshot(0, 2, 3)), 0.0) == Wait()


def test_search_of_group_job_accepts_snapshot_of_any_age() -> None:
    search = SnapshotSearch(TTL_S, rolls=True)
    search.begin()
    topic: Topic = [*LED, Lead(0, ModelId(0, 3), "c2", 4, exact=True, slices=0)]
    chosen = judge(search, found("hot", topic, snapshot(0, 2, 3)), 0.0)
    assert isinstance(chosen, Chosen)
    assert (chosen.snapshot.made, chosen.history.head) == (ModelId(0, 2), ModelId(0, 3))
    search.begin()
    assert judge(search, found("hot", topic), 0.0) == FindSnapshots("all")


def test_wait_from_long_ago_does_not_count() -> None:
    search = SnapshotSearch(TTL_S)
    search.begin()
    assert judge(search, found("hot", LED), 0.0) == Wait()
    search.begin()
    assert judge(search, found("hot", LED), (LATE + 1) * TTL_S + 0.1) == Wait()


def test_search_without_valid_checkpoint_starts_at_genesis() -> None:
    search = SnapshotSearch(TTL_S)
    search.begin()
    judge(search, found("hot", LED), 0.0)
    search.begin()
    judge(search, found("hot", LED), TTL_S)
    taken_back = snapshot(by=0, version=3, updates_position=4)
    topic: Topic = [*LED, Lead(0, GENESIS, "c2", 4)]
    assert judge(search, found("all", topic, taken_back), TTL_S) == FindSnapshots("genesis")


def test_torn_snapshot_is_never_chosen_again() -> None:
    search = SnapshotSearch(TTL_S)
    search.begin()
    hot = snapshot(by=0, version=2, updates_position=3)
    search.leave_out(hot)
    assert judge(search, found("hot", LED, hot), 0.0) == Wait()
    search.begin()
    judge(search, found("hot", LED, hot), TTL_S)
    search.leave_out(hot)
    old = snapshot(by=0, version=1, updates_position=2)
    chosen = judge(search, found("all", LED, hot, old), TTL_S)
    assert isinstance(chosen, Chosen)
    assert chosen.snapshot == old


# --- what Kafka has lost -------------------------------------------------------------------------

CUT: Topic = LED[:2]  # its last two records are gone
AHEAD = replace(snapshot(by=0, version=3, updates_position=4), samples=3000)
COVERED = replace(snapshot(by=0, version=1, updates_position=2), samples=1000)


def after_a_loss(
    request: events.WantedChanged = RUNNING, topic: Topic = CUT, *others: Snapshot
) -> object:
    """Search Redis, then storage, with one snapshot ahead of the updates topic."""
    search = SnapshotSearch(TTL_S)
    search.begin()
    lost = {AHEAD.rank: SHORT}
    hot = replace(found("hot", topic, AHEAD), lost=lost)
    assert judge(search, hot, 0.0, request) == FindSnapshots("all")  # waits for no leader
    answer = judge(search, replace(found("all", topic, AHEAD, *others), lost=lost), 0.0, request)
    if answer == FindSnapshots("genesis"):
        answer = judge(search, found("genesis", topic, genesis(FIRST)), 0.0, request)
    return answer


def test_snapshot_with_lost_records_holds_the_job_and_states_the_cost() -> None:
    answer = after_a_loss(RUNNING, CUT, COVERED)

    assert isinstance(answer, Lost)
    assert answer.reason == (
        f"{SHORT}; `doll job resume --after-loss` continues from version 1 (instead of 3), the best"
        " that both topics cover: 2,000 records are trained again if the topics still have them"
    )


def test_resume_request_takes_the_best_covered_snapshot() -> None:
    answer = after_a_loss(events.WantedChanged("running", after_loss=1), CUT, COVERED)

    assert isinstance(answer, Chosen)
    assert (answer.snapshot, answer.above, answer.loss) == (COVERED, 0, f"version 3: {SHORT}")


def test_resume_request_counts_for_one_lead_only() -> None:
    request = events.WantedChanged("running", after_loss=1)
    carried_out = replace(COVERED, after_loss=1)

    assert isinstance(after_a_loss(request, CUT, carried_out), Lost)
    again = events.WantedChanged("running", after_loss=2)
    assert isinstance(after_a_loss(again, CUT, carried_out), Chosen)


def test_loss_skipped_by_an_earlier_lead_does_not_hold_the_job_again() -> None:
    topic: Topic = [*CUT, Lead(0, ModelId(0, 1), "c2", 70, 1), update(70, 2)]
    answer = after_a_loss(events.WantedChanged("running", after_loss=1), topic, COVERED)

    assert isinstance(answer, Chosen)
    assert (answer.snapshot, answer.history.head, answer.loss) == (COVERED, ModelId(70, 2), "")


def test_restart_at_version_0_needs_from_start() -> None:
    request = events.WantedChanged("running", after_loss=1)
    answer = after_a_loss(request, [])
    assert isinstance(answer, Lost)
    assert (
        "`doll job resume --after-loss --from-start` starts again from version 0" in answer.reason
    )

    answer = after_a_loss(replace(request, from_start=True), [])
    assert isinstance(answer, Chosen)
    assert answer.snapshot == genesis(FIRST)


UNREADABLE = (
    "there are checkpoints, but none can be used to continue (3-50: manifest.json is missing)"
)


def test_unreadable_checkpoints_are_skipped_only_on_request() -> None:
    def search_all(request: events.WantedChanged) -> object:
        search = SnapshotSearch(TTL_S)
        search.begin()
        assert judge(search, found("hot", []), 0.0, request) == FindSnapshots("all")
        assert judge(search, found("all", []), 0.0, request) == FindSnapshots("genesis")
        nothing = replace(found("genesis", CUT, genesis(FIRST)), unreadable=UNREADABLE)
        return judge(search, nothing, 0.0, request)

    request = events.WantedChanged("running", after_loss=1)
    for short in (RUNNING, request, events.WantedChanged("running", from_start=True)):
        answer = search_all(short)
        assert isinstance(answer, Lost)
        assert answer.reason.startswith(f"{UNREADABLE}: restore them")
        assert "`doll job resume --after-loss --from-start` starts again" in answer.reason

    chosen = search_all(replace(request, from_start=True))
    assert isinstance(chosen, Chosen)
    assert (chosen.snapshot, chosen.loss) == (genesis(FIRST), UNREADABLE)


def test_loss_above_the_best_snapshot_does_not_hold_the_job() -> None:
    topic: Topic = [*CUT, Lead(0, ModelId(0, 1), "c2", 70), update(70, 2)]
    better = snapshot(by=70, version=2, updates_position=4)

    answer = after_a_loss(RUNNING, topic, better)

    assert isinstance(answer, Chosen)
    assert answer.snapshot == better


# --- a checkpoint that the history names ---------------------------------------------------------

# offset            4: the leader has read the checkpoint 0-2 back
NAMED: Topic = [*LED, CheckpointStored(0, 2)]
STORED = snapshot(by=0, version=2, updates_position=3)
BEFORE = snapshot(by=0, version=1, updates_position=2)
EMPTY = "s3://models/ lists no checkpoint of this job"


def search_storage(
    *there: Snapshot,
    request: events.WantedChanged = RUNNING,
    topic: Topic = NAMED,
    search: SnapshotSearch | None = None,
    now: float = TTL_S,
    **more: object,
) -> object:
    """Search for a candidate that finds nothing in Redis."""
    search = search or SnapshotSearch(0.0)
    search.begin()
    assert judge(search, found("hot", topic), now, request) == FindSnapshots("all")
    stored = replace(found("all", topic, *there), storage=EMPTY, **more)
    answer = judge(search, stored, now, request)
    if answer == FindSnapshots("genesis"):
        answer = judge(search, found("genesis", topic, genesis(FIRST)), now, request)
    return answer


def test_job_whose_named_checkpoint_is_not_listed_waits_instead_of_starting_below() -> None:
    for there, version, option in (((), 0, " --from-start"), ((BEFORE,), 1, "")):
        assert search_storage(*there) == Missing(
            f"a checkpoint is missing: 0-2, but {EMPTY}; a coordinator searches again every 10 s;"
            f" `doll job resume --after-loss{option}` continues without it, from version {version}"
        )


def test_job_continues_once_its_named_checkpoint_is_listed() -> None:
    chosen = search_storage(BEFORE, STORED)

    assert isinstance(chosen, Chosen)
    assert (chosen.snapshot, chosen.history.checkpoint) == (STORED, ModelId(0, 2))


def test_snapshot_better_than_the_named_checkpoint_is_enough() -> None:
    search = SnapshotSearch(TTL_S)
    search.begin()
    hot = snapshot(by=0, version=3, updates_position=4)

    assert isinstance(judge(search, found("hot", NAMED, hot), 0.0), Chosen)


def test_stale_hot_snapshot_below_the_named_checkpoint_is_not_used() -> None:
    # Redis     failed over to a stale replica, which has only a snapshot of version 1
    # history   names checkpoint 0-2; version 3 is the newest
    search = SnapshotSearch(TTL_S)
    search.begin()

    assert judge(search, found("hot", NAMED, BEFORE), 0.0) == FindSnapshots("all")
    stored = replace(found("all", NAMED, BEFORE), storage=EMPTY)
    assert isinstance(judge(search, stored, 0.0), Missing)


def test_history_that_names_no_checkpoint_starts_at_version_0() -> None:
    for topic in (LED, [*NAMED, Lead(0, ModelId(0, 1), "c2", 70)]):
        chosen = search_storage(topic=topic)
        assert isinstance(chosen, Chosen)
        assert chosen.snapshot == genesis(FIRST)


def test_owner_may_continue_without_the_named_checkpoint() -> None:
    request = events.WantedChanged("running", after_loss=1)

    chosen = search_storage(BEFORE, request=request)
    assert isinstance(chosen, Chosen)
    assert (chosen.snapshot, chosen.loss) == (BEFORE, f"a checkpoint is missing: 0-2, but {EMPTY}")
    assert isinstance(search_storage(request=request), Missing)
    chosen = search_storage(request=replace(request, from_start=True))
    assert isinstance(chosen, Chosen)
    assert chosen.snapshot == genesis(FIRST)


def test_request_that_a_lead_carried_out_does_not_count_for_a_checkpoint() -> None:
    topic: Topic = [*LED, Lead(0, ModelId(0, 3), "c2", 70, 1), CheckpointStored(70, 3)]
    request = events.WantedChanged("running", after_loss=1, from_start=True)

    assert isinstance(search_storage(request=request, topic=topic), Missing)


def test_storage_that_gives_no_list_is_waited_for_if_there_are_updates() -> None:
    answer = search_storage(topic=LED, storage_failed=True)
    assert isinstance(answer, Missing)
    assert answer.reason.startswith(
        f"a checkpoint is missing: one of version 3 or below, but {EMPTY}"
    )

    young = search_storage(topic=LED[:1], storage_failed=True)
    assert isinstance(young, Chosen)
    assert young.snapshot == genesis(FIRST)


def test_torn_checkpoint_is_read_again_for_a_minute_then_the_one_before_is_used() -> None:
    # at     1 s, 11 s, ..., 51 s: torn    61 s: torn for a minute
    # answer wait                          version 1
    search, now = SnapshotSearch(0.0), TTL_S
    torn = {ModelId(0, 2): "manifest.json does not parse"}
    while now < TTL_S + TORN_S:
        answer = search_storage(BEFORE, search=search, now=now, torn=torn)
        assert isinstance(answer, Missing)
        assert "missing: 0-2, but manifest.json does not parse" in answer.reason
        now += SEARCH_AGAIN_S
    chosen = search_storage(BEFORE, search=search, now=now, torn=torn)

    assert isinstance(chosen, Chosen)
    assert chosen.snapshot == BEFORE


def test_checkpoint_with_torn_weights_is_read_again_for_a_minute() -> None:
    search, now = SnapshotSearch(0.0), TTL_S
    while now < TTL_S + TORN_S:
        chosen = search_storage(BEFORE, STORED, search=search, now=now)
        assert isinstance(chosen, Chosen)
        assert chosen.snapshot == STORED  # read once more
        search.leave_out(STORED)
        answer = search_storage(BEFORE, STORED, search=search, now=now)
        assert isinstance(answer, Missing)
        assert "its weights are damaged" in answer.reason
        now += SEARCH_AGAIN_S
    search_storage(BEFORE, STORED, search=search, now=now)
    search.leave_out(STORED)
    chosen = search_storage(BEFORE, STORED, search=search, now=now)

    assert isinstance(chosen, Chosen)
    assert chosen.snapshot == BEFORE


def test_minute_of_a_torn_checkpoint_starts_again_after_another_time() -> None:
    search, torn = SnapshotSearch(0.0), {ModelId(0, 2): "torn"}
    for now in (TTL_S, TTL_S + 10 * TORN_S):
        assert isinstance(search_storage(BEFORE, search=search, now=now, torn=torn), Missing)


def test_named_checkpoint_with_records_lost_by_kafka_holds_the_job() -> None:
    # The control topic lost records that 0-2 contains, the updates topic none.
    answer = search_storage(BEFORE, STORED, lost={STORED.rank: SHORT})

    assert isinstance(answer, Lost)
    assert answer.reason.startswith(SHORT)


# --- identity of the topics ----------------------------------------------------------------------


def test_candidate_records_ids_of_the_topics_it_read() -> None:
    # found    control "c1", updates "u1"; a topic under the same name later is another one
    search = SnapshotSearch(TTL_S)
    search.begin()
    hot = snapshot(by=0, version=2, updates_position=3)
    seen = replace(found("hot", LED, hot), control_topic_id="c1", updates_topic_id="u1")
    chosen = judge(search, seen, 0.0)

    assert isinstance(chosen, Chosen)
    assert chosen.snapshot.control == LogPosition(0, "c1")
    assert chosen.history.log.topic_id == "u1"


def test_topic_ids_of_snapshot_are_kept_if_kafka_has_none() -> None:
    search = SnapshotSearch(TTL_S)
    search.begin()
    hot = replace(snapshot(0, 2, 3), control_topic_id="c1", updates_topic_id="u1", control_epoch=4)
    chosen = judge(search, found("hot", LED, hot), 0.0)

    assert isinstance(chosen, Chosen)
    assert chosen.snapshot.control == LogPosition(0, "c1", 4)
    assert chosen.history.log.topic_id == "u1"


def test_genesis_is_valid_although_the_base_of_a_lead_was_lost() -> None:
    # updates   0: Lead   1: J=1   2: J=2, both lost   1: Lead 70, base J=2, in flight at the loss
    topic: Topic = [LED[0], Lead(0, ModelId(0, 2), "c2", 70)]
    search = SnapshotSearch(TTL_S)
    search.begin()
    judge(search, found("hot", topic), 0.0)
    search.begin()
    judge(search, found("hot", topic), TTL_S)
    assert judge(search, found("all", topic), TTL_S) == FindSnapshots("genesis")
    chosen = judge(search, found("genesis", topic, genesis(FIRST)), TTL_S)

    assert isinstance(chosen, Chosen)
    chosen.history.feed(2, Lead(70, GENESIS, "c3", 80))
    assert chosen.history.path == (GENESIS,)
