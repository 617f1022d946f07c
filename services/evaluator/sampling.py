"""Which records of an update are predicted before the model learns from them.

At most so many of each stream, from as many of its batches as may be: neither the first partition
nor the first worker alone.

    batches of a stream   ┌────────────┐┌────────────┐┌──────┐
    sampled               ├──┤          ├──┤          ├┤          in proportion to their offsets
"""

from __future__ import annotations

from collections.abc import Sequence

from common.core.spans import Span

MOST_PIECES = 16  # of a stream: each is a question to Kafka, of some milliseconds


def sample(spans: Sequence[Span], most: int) -> list[Span]:
    """Choose the beginnings of some spans, in proportion to their lengths.

    Args:
        spans: Of an update, in one stream.
        most: Offsets in all.
    """
    count = min(len(spans), MOST_PIECES, most)
    chosen = [spans[index * len(spans) // count] for index in range(count)]
    total = sum(span.end - span.start for span in chosen)
    share, before, found = min(most, total), 0, list[Span]()
    for span in chosen:
        after = before + span.end - span.start
        if quota := share * after // total - share * before // total:
            found.append(span._replace(end=span.start + quota))
        before = after
    return found
