"""Divergence of streams: the generation to open, and the cost of resuming.

A stream's partition may lose acknowledged records at its end, and its topic may be recreated. Both
reassign claimed offsets to other records. The leader then holds the job, and its owner decides how
to resume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from common.core.messages import Batch, Opened

if TYPE_CHECKING:
    from common.core.messages import ReadFrom
    from common.core.spans import LogPosition, Partition


class Divergence(NamedTuple):
    """A partition's log is no longer the one that its current generation was read from.

    Its topic was recreated, or the log lost its last records.
    """

    generation: int
    # First offset at which the logs differ, with the current topic id and the leader epoch of the
    # record below.
    start: LogPosition
    # Current end of the log.
    end: int
    # True if the topic was recreated. Otherwise the log lost its last records.
    recreated: bool


class Recovery(NamedTuple):
    """Losses after which the job's owner allows the next leader to continue."""

    after_loss: bool = False
    read_from: ReadFrom = ""

    def opening(self, partition: Partition, divergence: Divergence, number: int) -> Opened | None:
        """Return the record that begins the next generation, or None if the owner must decide."""
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
    """Return why the job is held, how to resume it, and what that costs.

    Args:
        lost: At least one partition.
        known: Returns the end of the claimed records of a partition.
        waiting: Accepted batches in no update.
    """
    cut = {place: each.start.offset for place, each in lost.items() if not each.recreated}
    anew = sorted({place.topic for place, each in lost.items() if each.recreated})
    sentences, costs = list[str](), list[str]()
    if anew:
        sentences.append(f"{_listed(anew, 'topic')} deleted and recreated")
        expire = sum(b.samples for b in waiting if any(s.topic in anew for s in b.address))
        costs.append(
            "reads the new topic from its beginning (`--from latest`: only records that arrive"
            f" from then on); {expire:,} records of the old topic that wait to be trained expire"
        )
    if cut:
        first = min(cut)
        sentences.append(
            f"{first} lost records that Kafka had acknowledged: it was read up to offset"
            f" {known(first):,}, but its log is another one from offset {cut[first]:,} on"
            + (f"; {len(cut) - 1} more partitions lost records, too" if len(cut) > 1 else "")
        )
        gone = sum(max(known(place) - start, 0) for place, start in cut.items())
        expire = _above(cut, known, waiting)
        costs.append(
            f"continues where the logs diverge: {gone:,} records are lost, {gone - expire:,} of"
            f" them were trained, {expire:,} expire"
        )
    option = "--from earliest" if anew else "--after-loss"
    return f"{'; '.join(sentences)}; `doll job resume {option}` {', and '.join(costs)}"


def _listed(names: Collection[str], what: str) -> str:
    plural = len(names) > 1
    return f"the {what}{'s' if plural else ''} {', '.join(names)} {'were' if plural else 'was'}"


def _above(
    starts: Mapping[Partition, int], known: Callable[[Partition], int], waiting: Collection[Batch]
) -> int:
    """Return the number of waiting offsets above the cuts of partitions."""
    return sum(
        max(min(span.end, known(span.place)) - max(span.start, starts[span.place]), 0)
        for batch in waiting
        for span in batch.address
        if span.place in starts
    )
