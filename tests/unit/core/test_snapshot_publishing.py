"""Snapshots are taken when due, and published after the leader's records were read back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as with_

from common.core import commands as do
from common.core.history import History
from common.core.messages import (
    AuditRecord,
    ModelId,
    Quarantined,
    UpdateApplied,
)
from common.core.snapshot_publishing import SnapshotSchedule
from common.core.snapshots import genesis
from tests.unit.core.bench import QUIET
from tests.unit.core.examples import FIRST, SAMPLES, batch, of_kind, the

if TYPE_CHECKING:
    from common.core.settings import CoordinatorSettings
    from common.core.snapshots import Snapshot

EPOCH = 4
AFTER_LEAD = EPOCH + 1
HOT = replace(QUIET, hot_every_s=1.0)


class Audit(SnapshotSchedule):
    """A publisher whose history receives the records that it reads back."""

    def __init__(self, settings: CoordinatorSettings = QUIET, version: int = 0) -> None:
        self.history = History(EPOCH, position=AFTER_LEAD)
        self.appended = list[AuditRecord]()
        start = at(version) if version else genesis(FIRST)
        super().__init__(settings, start, self.history, now=0.0)

    def append(self, record: UpdateApplied | Quarantined) -> do.AppendAudit:
        """Append a record, to be read back later."""
        command = super().append(record)
        self.appended.append(command.record)
        return command

    def read(self, offset: int) -> tuple[do.PublishSnapshot, ...]:
        """Read the oldest unread record back, at this offset."""
        for other in range(self.history.position, offset):
            self.history.feed(other, None)
        self.history.feed(offset, self.appended.pop(0))
        return self.publish()


def at(version: int, control_position: int = 0) -> Snapshot:
    """Return the leader's copy at this point. Its position in the updates topic is unknown."""
    made = ModelId(EPOCH, version)
    return with_(genesis(FIRST), made=made, updates_position=-1, control_position=control_position)


def update(version: int) -> UpdateApplied:
    return UpdateApplied(EPOCH, version, (batch(version),), SAMPLES, loss=2.0)


# --- not before the leader's records were read back ------------------------------------------


def test_snapshot_waits_until_its_audit_was_read_back() -> None:
    # updates   4: Lead   5: J=1   6: another process   7: J=2   8: J=3
    # The copy is of J=2, so its position is 7 + 1.
    audit = Audit()
    audit.append(update(1))
    audit.append(update(2))
    assert audit.take(at(2), 0.0, checkpoint=False) == (do.CopyWeights(),)
    audit.append(update(3))
    assert audit.pending

    assert audit.read(5) == ()
    published = do.PublishSnapshot(with_(at(2), updates_position=8, number=2), checkpoint=False)
    assert audit.read(7) == (published,)
    assert not audit.pending
    assert audit.read(8) == ()
    assert audit.unread == 0


def test_snapshot_without_unread_audit_is_published_at_once() -> None:
    audit = Audit()
    first = the(audit.take(at(0, control_position=3), 0.0, checkpoint=True), do.PublishSnapshot)
    assert first.snapshot.updates_position == AFTER_LEAD

    audit.append(Quarantined(EPOCH, batch(1), "expired"))
    assert audit.read(9) == ()
    then = the(audit.take(at(0, control_position=4), 0.0, checkpoint=True), do.PublishSnapshot)
    assert then.snapshot.updates_position == 10


def test_newer_copy_replaces_one_that_still_waits() -> None:
    audit = Audit()
    audit.append(update(1))
    audit.take(at(1), 0.0, checkpoint=False)
    audit.append(update(2))
    audit.take(at(2), 0.0, checkpoint=True)

    assert audit.read(5) == ()
    published = the(audit.read(6), do.PublishSnapshot)
    assert published == do.PublishSnapshot(
        with_(at(2), updates_position=7, number=2), checkpoint=True
    )


def test_waiting_checkpoint_remains_one_when_a_newer_copy_replaces_it() -> None:
    audit = Audit()
    audit.append(update(1))
    audit.take(at(1), 0.0, checkpoint=True)
    audit.take(at(1, 7), 0.1, checkpoint=False)
    (published,) = audit.read(AFTER_LEAD)
    assert (published.checkpoint, published.snapshot.control_position) == (True, 7)


@given(st.lists(st.sampled_from(["update", "other's record", "read", "copy"]), max_size=60))
def test_published_snapshot_contains_exactly_the_audit_below_its_position(
    steps: list[str],
) -> None:
    audit, version = Audit(), 0
    # Version of the model after each record of the updates topic.
    topic = [0] * AFTER_LEAD
    own, read = list[int](), 0
    for step in steps:
        published = list[do.PublishSnapshot]()
        match step:
            case "update":
                version += 1
                audit.append(update(version))
                own.append(len(topic))
                topic.append(version)
            case "other's record":
                topic.append(version)
            case "read" if read < len(own):
                read += 1
                published = of_kind(audit.read(own[read - 1]), do.PublishSnapshot)
            case "copy":
                copied = audit.take(at(version), 0.0, checkpoint=False)
                published = of_kind(copied, do.PublishSnapshot)
        for each in published:
            position = each.snapshot.updates_position
            assert position == (own[read - 1] + 1 if read else AFTER_LEAD)
            assert topic[position - 1] == each.snapshot.made.version
        assert audit.unread == len(own) - read


# --- times -----------------------------------------------------------------------------------


def test_snapshot_is_not_due_while_nothing_is_new() -> None:
    # at       1.0        1.5    2.0
    # version  0          1      1
    # due      no: again  not    hot
    #          at 2.0     yet
    audit = Audit(HOT)
    assert audit.due() == 1.0
    assert audit.consider(1.0, progress=0, control_position=0) is None
    assert audit.due() == 2.0
    assert audit.consider(1.5, progress=1, control_position=0) is None
    assert audit.consider(2.0, progress=1, control_position=0) == "hot"


def test_accepted_batches_make_a_snapshot_due() -> None:
    assert Audit(HOT).consider(1.0, progress=0, control_position=1) == "hot"


@pytest.mark.parametrize(
    "settings",
    [replace(HOT, checkpoint_every_s=5.0), replace(HOT, checkpoint_every_updates=3)],
)
def test_new_leader_takes_one_checkpoint_of_the_version_it_started_from(
    settings: CoordinatorSettings,
) -> None:
    # The leader before may have published this version on the board alone, or left it to members.
    audit = Audit(settings, version=2)
    assert audit.consider(5.0, progress=2, control_position=0) == "checkpoint"
    audit.take(at(2), 5.0, checkpoint=True)
    assert audit.consider(15.0, progress=2, control_position=0) is None


def test_snapshot_starts_a_new_interval() -> None:
    audit = Audit(HOT)
    audit.take(at(1), 0.7, checkpoint=False)
    assert audit.due() == pytest.approx(1.7)
    assert audit.consider(1.6, progress=2, control_position=0) is None
    assert audit.consider(1.7, progress=1, control_position=0) is None
    assert audit.consider(2.7, progress=2, control_position=0) == "hot"


def test_snapshot_is_not_due_while_one_waits() -> None:
    audit = Audit(HOT)
    audit.append(update(1))
    audit.take(at(1), 1.0, checkpoint=False)
    assert audit.due() is None
    assert audit.consider(9.0, progress=2, control_position=0) is None
    audit.read(5)
    assert audit.consider(9.0, progress=2, control_position=0) == "hot"


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (replace(QUIET, hot_every_s=5.0), "hot"),
        (replace(QUIET, hot_every_updates=3), "hot"),
        (replace(QUIET, checkpoint_every_s=5.0), "checkpoint"),
        (replace(QUIET, checkpoint_every_updates=3), "checkpoint"),
        (replace(QUIET, checkpoint_every_control_records=50), "checkpoint"),
        (replace(QUIET, hot_every_s=5.0, checkpoint_every_updates=3), "checkpoint"),
        (QUIET, None),
    ],
)
def test_intervals_count_seconds_updates_or_control_records(
    settings: CoordinatorSettings, kind: str | None
) -> None:
    audit = Audit(settings)
    assert audit.consider(4.9, progress=2, control_position=49) is None
    assert audit.consider(5.0, progress=3, control_position=50) == kind


def test_checkpoint_counts_as_hot_snapshot_but_not_the_reverse() -> None:
    audit = Audit(replace(QUIET, hot_every_updates=2, checkpoint_every_updates=3))
    assert audit.consider(0.0, progress=2, control_position=0) == "hot"
    audit.take(at(2), 0.0, checkpoint=False)
    assert audit.consider(0.0, progress=3, control_position=0) == "checkpoint"
    audit.take(at(3), 0.0, checkpoint=True)
    assert audit.consider(0.0, progress=4, control_position=0) is None
    assert audit.consider(0.0, progress=5, control_position=0) == "hot"
