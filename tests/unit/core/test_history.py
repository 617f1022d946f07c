"""The history is one chain of updates, even if deposed leaders continue to write."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace as with_

from common.core.history import History
from common.core.messages import (
    GENESIS,
    Batch,
    CheckpointStored,
    Lead,
    ModelId,
    Quarantined,
    Replayed,
    Requeued,
    UpdateApplied,
    unused_number,
)
from common.core.partial_history import PartialHistory
from common.core.spans import Span
from tests.unit.core.examples import batch
from tests.unit.core.leaders import Topic, read, topics, update


def test_takeover_takes_back_updates_above_its_base() -> None:
    # offset   0        1      2      3        4      5
    # record   Lead(-1) J=1    J=2    Lead(0)  J=3    J=2
    #                                 base J=1 of 0   of 3
    # path     -        1      1 2    1        1      1 2'
    topic: Topic = [
        Lead(-1, GENESIS, "c1", 0),
        update(0, 1),
        update(0, 2),
        Lead(0, ModelId(0, 1), "c2", 3),
        update(0, 3),  # c1 does not know yet
        update(3, 2),
    ]
    history = read(topic)

    assert history.epoch == 3
    assert history.path == (GENESIS, ModelId(0, 1), ModelId(3, 2))


def test_exact_lead_counts_only_for_the_newest_update() -> None:
    # Update J=2 of epoch 0 arrived between c2's poll and c2's Lead, so members hold version 2.
    topic: Topic = [
        Lead(-1, GENESIS, "c1", 0),
        update(0, 1),
        update(0, 2),
        Lead(0, ModelId(0, 1), "c2", 3, exact=True),
        Lead(0, ModelId(0, 2), "c3", 4, exact=True),
    ]
    history = read(topic)

    assert (history.epoch, history.head) == (4, ModelId(0, 2))
    assert read([*topic[:3], Lead(0, ModelId(0, 1), "c2", 3)]).head == ModelId(0, 1)


def test_exact_lead_counts_for_reader_that_starts_later() -> None:
    # Epoch 40 made no update, so the base of the next Lead is of an earlier epoch.
    trail = PartialHistory(start=7)
    assert trail.feed(7, Lead(40, ModelId(20, 5), "c9", 60, exact=True))
    assert (trail.epoch, trail.head) == (60, ModelId(20, 5))


def test_checkpoint_of_current_leader_counts_until_its_version_is_taken_back() -> None:
    # offset   0        1      2      3           4           5            6           7
    # record   Lead(-1) J=1    J=2    stored 1    stored 2    Lead(0)      stored 2    stored 9
    #          epoch 0                of 0        of 0        base 1, 70   of 0        of 70
    # named    -        -      -      0-1         0-2         0-1          void        void
    topic: Topic = [
        Lead(-1, GENESIS, "c1", 0),
        update(0, 1),
        update(0, 2),
        CheckpointStored(0, 1),
        CheckpointStored(0, 2),
        Lead(0, ModelId(0, 1), "c2", 70),
        CheckpointStored(0, 2),
        CheckpointStored(70, 9),
    ]
    named = [read(topic[:end]).checkpoint for end in range(len(topic) + 1)]

    one, two = ModelId(0, 1), ModelId(0, 2)
    assert named == [None, None, None, None, one, two, one, one, one]


def test_checkpoint_record_that_is_late_or_repeated_changes_nothing() -> None:
    topic: Topic = [
        Lead(-1, GENESIS, "c1", 0),
        update(0, 1),
        update(0, 2),
        CheckpointStored(0, 2),
    ]
    history = read(topic)
    for offset, late in enumerate((1, 2), start=len(topic)):
        assert not history.feed(offset, CheckpointStored(0, late))
        assert history.checkpoint == ModelId(0, 2)


def test_checkpoint_survives_a_lead_whose_base_contains_it() -> None:
    topic: Topic = [
        Lead(-1, GENESIS, "c1", 0),
        update(0, 1),
        update(0, 2),
        CheckpointStored(0, 1),
        Lead(0, ModelId(0, 2), "c2", 70),
    ]
    history = read(topic)
    history.forget_before(2)

    assert history.checkpoint == ModelId(0, 1)


def test_epoch_is_the_number_in_its_lead() -> None:
    # The first leader's records from offset 1 on were lost; its successor's Lead is there now.
    # offset   0        1        2         3
    # record   Lead(-1) Lead(70) J=1       J=1
    #          epoch 70 epoch 80 of 70     of 80
    topic: Topic = [
        Lead(-1, GENESIS, "c1", 70),
        Lead(70, GENESIS, "c2", 80),
        # This record was in flight when the log lost its tail.
        update(70, 1),
        update(80, 1),
    ]
    history = read(topic)

    assert history.epoch == 80
    assert history.path == (GENESIS, ModelId(80, 1))


def test_epoch_of_a_lead_without_number_is_its_offset() -> None:
    history = read([Lead(-1, GENESIS, "c1", 0), Lead(0, GENESIS, "c2", 1), update(1, 1)])

    assert (history.epoch, history.head) == (1, ModelId(1, 1))


def test_unused_numbers_increase_and_exceed_old_epochs() -> None:
    numbers = [unused_number(1767225600.001, 4095), unused_number(1767225600.002, 0)]

    assert numbers == sorted(set(numbers))
    # The epoch is above every offset that an older program used as an epoch.
    assert numbers[0] > 10**12


def test_first_of_two_leads_wins() -> None:
    history = read([Lead(-1, GENESIS, "c1", 0), Lead(-1, GENESIS, "c2", 0)])

    assert history.epoch == 0


def test_repeated_record_counts_once() -> None:
    poison = Quarantined(0, batch(7), "poison: raised")
    history = read([Lead(-1, GENESIS, "c1", 0), update(0, 1), update(0, 1)])

    assert history.path == (GENESIS, ModelId(0, 1))
    assert history.feed(3, poison)
    assert not history.feed(4, poison)
    assert history.quarantined == {7: poison}


NUMBERED = Lead(-1, GENESIS, "c1", 70)


def test_records_behind_a_lost_record_of_a_leader_do_not_count() -> None:
    # record   Lead  poison 1  (poison 2, lost)  J=1, number 3   Lead of 80   poison, number 1
    history = read([NUMBERED, Quarantined(70, batch(6), "poison: raised", 1)])

    assert not history.feed(2, with_(update(70, 1), number=3))
    assert not history.feed(3, Quarantined(70, batch(8), "poison: raised", 4))
    assert (history.head, set(history.quarantined), history.number) == (GENESIS, {6}, 1)

    assert history.feed(4, Lead(70, GENESIS, "c2", 80))
    assert history.feed(5, Quarantined(80, batch(7), "poison: raised", 1))


def test_only_lead_with_new_loss_request_accepts_earlier_losses() -> None:
    # epoch               70   80       90   100
    # resumed after loss  0    1: new   1    2: new
    after_losses = {70: 0, 80: 1, 90: 1, 100: 2}
    history, judged = History(), list[int]()
    for offset, (epoch, after_loss) in enumerate(after_losses.items()):
        assert history.feed(offset, Lead(history.epoch, GENESIS, f"c{epoch}", epoch, after_loss))
        judged.append(history.judged)

    assert judged == [-1, 80, 80, 100]


def test_repeated_quarantine_of_a_requeued_batch_is_void() -> None:
    poison = Quarantined(70, batch(7), "poison: raised", 1)
    history = read([NUMBERED, poison, REQUEUED])

    assert not history.feed(3, poison)
    assert (history.quarantined, set(history.requeued)) == ({}, {7})


def test_quarantine_identifies_a_batch_by_value() -> None:
    # The control topic lost its tail, and another batch was claimed at offset 7 since.
    lost, now = Quarantined(70, batch(7), "poison: raised", 1), Quarantined(70, OTHER, "expired", 2)
    history = read([NUMBERED, lost, now])

    assert history.quarantined == {7: now}
    assert history.poison == ()
    assert not history.feed(3, REQUEUED)


def test_quarantine_survives_updates_that_are_taken_back() -> None:
    topic: Topic = [
        Lead(-1, GENESIS, "c1", 0),
        update(0, 1),
        Quarantined(0, batch(7), "expired"),
        # Takes version 1 back, but not the quarantine.
        Lead(0, GENESIS, "c2", 3),
    ]
    history = read(topic)

    assert history.head == GENESIS
    assert set(history.quarantined) == {7}


POISON = Quarantined(0, batch(7), "poison: raised")
REQUEUED, REPLAYED = Requeued(batch(7), "ada", 1.0), Replayed(batch(7), "bob", 2.0)


def test_requeue_survives_later_leads() -> None:
    assert read([Lead(-1, GENESIS, "c1", 0), POISON]).poison == (batch(7),)

    history = read([Lead(-1, GENESIS, "c1", 0), POISON, REQUEUED, Lead(0, GENESIS, "c2", 3)])
    assert (history.epoch, history.quarantined, history.poison) == (3, {}, ())
    assert history.requeued == {7: batch(7)}


def test_requeued_batch_may_be_quarantined_and_requeued_again() -> None:
    history = read([Lead(-1, GENESIS, "c1", 0), POISON, REQUEUED])

    assert history.feed(3, POISON)
    assert (set(history.quarantined), history.requeued) == ({7}, {})
    assert history.feed(4, REQUEUED)
    assert (history.quarantined, set(history.requeued)) == ({}, {7})


@pytest.mark.parametrize(
    ("first", "second"), [(REQUEUED, REPLAYED), (REPLAYED, REQUEUED), (REPLAYED, REPLAYED)]
)
def test_only_first_of_requeue_and_replay_counts(
    first: Requeued | Replayed, second: Requeued | Replayed
) -> None:
    history = read([Lead(-1, GENESIS, "c1", 0), POISON])

    assert history.feed(2, first)
    assert not history.feed(3, second)
    assert not history.feed(4, REQUEUED)
    assert set(history.quarantined) == (set() if first == REQUEUED else {7})


OTHER = Batch(7, batch(7).worker, (Span("s", 0, 70, 79),), 9)


@pytest.mark.parametrize(
    "record", [Requeued(batch(8), "ada", 1.0), Requeued(OTHER, "ada", 1.0), Replayed(OTHER, "b", 1)]
)
def test_requeue_of_a_batch_that_differs_from_quarantine_is_void(
    record: Requeued | Replayed,
) -> None:
    history = read([Lead(-1, GENESIS, "c1", 0), POISON])

    assert not history.feed(2, record)
    assert (set(history.quarantined), history.requeued) == ({7}, {})


def test_expired_batch_cannot_be_requeued_or_replayed() -> None:
    history = read([Lead(-1, GENESIS, "c1", 0), Quarantined(0, batch(7), "expired")])

    assert not history.feed(2, REQUEUED)
    assert not history.feed(3, REPLAYED)
    assert history.poison == ()


def test_reader_learns_that_its_base_was_taken_back() -> None:
    reader = History(epoch=0, base=ModelId(0, 5), position=6)
    reader.feed(6, Lead(0, ModelId(0, 3), "c2", 6))

    assert reader.base_lost
    assert reader.head == ModelId(0, 3)


def test_reader_learns_that_its_base_is_of_another_chain() -> None:
    reader = History(epoch=70, base=ModelId(70, 5), position=6)
    reader.feed(6, Lead(70, ModelId(60, 5), "c2", 80))

    assert reader.base_lost
    assert reader.head == ModelId(60, 5)


def test_feeding_a_record_twice_is_refused() -> None:
    history = History(position=4)

    with pytest.raises(ValueError, match="audit record 3 comes after 3 was fed"):
        history.feed(3, None)


# Kinds of records that count under every leader.
OPERATORS = (Requeued, Replayed)


def effective(topic: Topic) -> tuple[int, list[ModelId]]:
    """Return epoch and path by the definition: each record is judged by all records before it."""
    in_force, path = -1, [GENESIS]
    for record in topic:
        match record:
            case Lead(after, base) if after == in_force:
                in_force = record.epoch
                path = [model for model in path if model.version <= base.version]
            case UpdateApplied(epoch, version) if epoch == in_force:
                if version == path[-1].version + 1:
                    path.append(ModelId(epoch, version))
            case _:
                pass
    return in_force, path


@given(topics)
def test_history_matches_its_definition(topic: Topic) -> None:
    history = read(topic)

    assert (history.epoch, list(history.path)) == effective(topic)
    versions = [model.version for model in history.path]
    assert versions == list(range(len(versions)))  # one chain, without gaps


@given(topics)
def test_quarantine_of_each_batch_follows_its_last_valid_record(
    topic: Topic,
) -> None:
    history, last = History(), dict[int, Quarantined | Requeued | Replayed]()
    # First quarantine of each batch since its last requeue.
    first = dict[int, Quarantined]()
    for offset, record in enumerate(topic):
        if history.feed(offset, record) and isinstance(record, Quarantined | Requeued | Replayed):
            before = last.get(record.batch.offset)
            if isinstance(record, Quarantined):
                assert before is None or isinstance(before, Requeued)
                first[record.batch.offset] = record
            else:
                assert isinstance(before, Quarantined)
                assert not before.expired
            last[record.batch.offset] = record

    back = {offset for offset, record in last.items() if isinstance(record, Requeued)}
    assert set(history.requeued) == back
    assert history.quarantined == {o: record for o, record in first.items() if o not in back}
    poison = {o for o, r in last.items() if isinstance(r, Quarantined) and not r.expired}
    assert {batch.offset for batch in history.poison} == poison


@given(topics)
def test_late_records_of_deposed_leaders_change_nothing(topic: Topic) -> None:
    history = read(topic)
    late = [
        record
        for record in topic
        if getattr(record, "epoch", None) != history.epoch and not isinstance(record, OPERATORS)
    ]
    before = (history.epoch, history.path, history.quarantined, history.poison)
    for record in late:
        history.feed(history.position, record)

    assert (history.epoch, history.path, history.quarantined, history.poison) == before


@given(topics, st.integers(0, 40))
# The reader starts from an update that is taken back.
@example([Lead(-1, GENESIS, "c1", 0), update(0, 1), Lead(0, GENESIS, "c2", 2), update(2, 1)], 2)
def test_readers_with_different_starts_agree(topic: Topic, start: int) -> None:
    whole = read(topic)
    then = read(topic[:start])
    later = read(topic, History(then.epoch, then.head, then.position, then.poison, then.number))

    assert later.epoch == whole.epoch
    assert set(later.poison) == set(whole.poison)
    assert later.quarantined.items() <= whole.quarantined.items()
    assert later.requeued.items() <= whole.requeued.items()
    assert later.base_lost == (then.head not in whole.path)
    if not later.base_lost:
        assert later.path == whole.path[whole.path.index(then.head) :]


@given(topics, st.integers(0, 40))
def test_leader_may_forget_history_behind_it(topic: Topic, start: int) -> None:
    whole, forgetful = read(topic), read(topic[:start])
    forgetful.forget_before(forgetful.head.version)

    assert len(forgetful.path) == 1
    read(topic, forgetful)
    assert forgetful.epoch == whole.epoch
    if not forgetful.base_lost:
        assert forgetful.head == whole.head
