"""Updates topics written by several leaders, and the history that each of them believes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from msgspec.structs import replace as with_

from common.core.history import History
from common.core.messages import (
    GENESIS,
    Lead,
    ModelId,
    Quarantined,
    Replayed,
    Requeued,
    UpdateApplied,
)
from tests.unit.core.examples import batch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.core.messages import AuditRecord

Topic = list["AuditRecord | None"]
FIRST_EPOCH = 1000


def update(epoch: int, version: int, *offsets: int) -> UpdateApplied:
    """Return an update of these batches."""
    return UpdateApplied(epoch, version, tuple(map(batch, offsets)), 10 * len(offsets), 1.0)


def read(topic: Iterable[AuditRecord | None], history: History | None = None) -> History:
    """Feed a history all records of a topic that it has not read yet, and return it."""
    history = History() if history is None else history
    for offset, record in enumerate(topic):
        if offset >= history.position:
            history.feed(offset, record)
    return history


@dataclass
class Believer:
    """A process that leads, has led, or only reads."""

    epoch: int
    version: int
    number: int = 0

    def next(self) -> int:
        """Number of its next record."""
        self.number += 1
        return self.number


def play(steps: Iterable[tuple[str, int, int]]) -> Topic:
    """Let candidates and leaders append all records that an honest process may append.

    A candidate has read the topic up to some point and starts from an update that was effective
    there. A leader may continue to write after it was deposed, and records may be delivered twice.
    Operators requeue batches and replay them, quarantined or not.
    """
    topic: Topic = []
    believers = list[Believer]()
    for step, one, two in steps:
        if step == "lead":
            known = read(topic[: max(len(topic) - one % 4, 0)])
            base = known.path[two % len(known.path)]
            epoch = max(known.epoch + 1, FIRST_EPOCH + len(topic))
            believers.append(Believer(epoch, base.version))
            topic.append(Lead(known.epoch, base, f"c{len(topic)}", epoch))
        elif step == "update" and believers:
            leader = believers[-1 - one % min(len(believers), 3)]
            leader.version += 1
            record = update(leader.epoch, leader.version, two)
            topic.append(with_(record, number=leader.next()))
        elif step == "quarantine" and believers:
            leader = believers[-1 - one % min(len(believers), 3)]
            reason = "expired" if one % 5 == 0 else "poison: raised"
            known = read(topic)
            # The present leader knows what is quarantined; a deposed one may not.
            if leader.epoch != known.epoch or two % 5 not in known.quarantined:
                topic.append(Quarantined(leader.epoch, batch(two % 5), reason, leader.next()))
        elif step == "requeue":
            topic.append(Requeued(batch(two % 5), "ada", float(one)))
        elif step == "replay":
            topic.append(Replayed(batch(two % 5), "ada", float(one)))
        elif step == "again" and topic:
            topic.append(topic[one % len(topic)])
        elif step == "garbage":
            topic.append(None)
    return topic


steps = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "lead",
                "lead",
                "update",
                "update",
                "update",
                "update",
                "quarantine",
                "quarantine",
                "requeue",
                "replay",
                "again",
                "garbage",
            ]
        ),
        st.integers(0, 20),
        st.integers(0, 20),
    ),
    max_size=40,
)
topics = steps.map(play)

__all__ = ["GENESIS", "ModelId", "Topic", "play", "read", "topics", "update"]
