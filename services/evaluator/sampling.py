"""Choice of an update's records that a version predicts before the model learns from them.

The records of a stream, at most a given number, come from as many batches as possible, so that they
do not all come from the first partition or the first worker.

    batches of a stream   ┌────────────┐┌────────────┐┌──────┐
    sampled               ├──┤          ├──┤          ├┤          in proportion to their offsets
"""

from __future__ import annotations

from collections.abc import Sequence

from common.core.spans import Span

# Most pieces per stream. Each piece is a request to Kafka, which takes some milliseconds.
MOST_PIECES = 16


def sample(spans: Sequence[Span], most: int) -> list[Span]:
    """Choose the beginnings of some spans, in proportion to their lengths.

    Args:
        spans: Spans of an update, in one stream.
        most: Maximum number of offsets in total.
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
