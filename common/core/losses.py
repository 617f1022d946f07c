"""Streams that are other logs than they were: what to open, and what it costs to go on.

A stream's partition may lose the records at its end, which Kafka had acknowledged, and its topic
may be deleted and created anew. Both give offsets that were claimed to other records. The leader
holds the job then, and its owner says how to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from common.core.messages import Batch, Opened

if TYPE_CHECKING:
    from common.core.messages import ReadFrom
    from common.core.spans import LogPosition, Partition


class Divergence(NamedTuple):
    """A partition's log is not any more the one that its generation is of."""

    generation: int
    start: LogPosition  # where both part: its topic's id now, and the leader epoch below
    end: int  # of the log now
    recreated: bool  # it is another topic's; else it lost its last records


class Recovery(NamedTuple):
    """What a job's owner allows the next leader to go on after."""

    after_loss: bool = False
    read_from: ReadFrom = ""

    def opening(self, partition: Partition, divergence: Divergence, number: int) -> Opened | None:
        """The record that begins the next generation; None where the owner must say more."""
        if not self.after_loss or (divergence.recreated and not self.read_from):
            return None
        _, topic_id, epoch = divergence.start
        start = divergence.start.offset
        if divergence.recreated:
            start, epoch = (divergence.end if self.read_from == "latest" else 0), -1
        return Opened(partition, divergence.generation, number, topic_id, start, epoch)


def reason(
    lost: Mapping[Partition, Divergence],
    known: Callable[[Partition], int],
    waiting: Collection[Batch],
) -> str:
    """Why the job is held, what goes on, and what that costs.

    Args:
        lost: At least one partition.
        known: Up to where records of a partition are claimed.
        waiting: Accepted batches that are in no update yet.
    """
    cut = {place: each.start.offset for place, each in lost.items() if not each.recreated}
    anew = sorted({place.topic for place, each in lost.items() if each.recreated})
    sentences, costs = list[str](), list[str]()
    if anew:
        sentences.append(f"{_listed(anew, 'topic')} deleted and created anew")
        expire = sum(b.samples for b in waiting if any(s.topic in anew for s in b.address))
        costs.append(
            "reads the new topic from its beginning (`--from latest`: only what comes from now on);"
            f" {expire:,} records of the old one that wait to be trained expire"
        )
    if cut:
        first = min(cut)
        sentences.append(
            f"{first} lost records that Kafka had acknowledged: it was read up to"
            f" {known(first):,}, and is another log from {cut[first]:,} on"
            + (f"; so are {len(cut) - 1} more partitions" if len(cut) > 1 else "")
        )
        gone = sum(max(known(place) - start, 0) for place, start in cut.items())
        expire = _above(cut, known, waiting)
        costs.append(
            f"reads on where the logs part: {gone:,} records are gone, {gone - expire:,} of them"
            f" were used, {expire:,} expire"
        )
    option = "--from earliest" if anew else "--after-loss"
    return f"{'; '.join(sentences)}; `doll job resume {option}` {', and '.join(costs)}"


def _listed(names: Collection[str], what: str) -> str:
    plural = len(names) > 1
    return f"the {what}{'s' if plural else ''} {', '.join(names)} {'were' if plural else 'was'}"


def _above(
    starts: Mapping[Partition, int], known: Callable[[Partition], int], waiting: Collection[Batch]
) -> int:
    """Offsets of batches that lie above where partitions were cut."""
    return sum(
        max(min(span.end, known(span.place)) - max(span.start, starts[span.place]), 0)
        for batch in waiting
        for span in batch.address
        if span.place in starts
    )
