"""What of a job's streams nobody could use, by reason, as the API tells it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from common.api.answers import DeadLettersPage
from common.kafka.dead_letters import by_reason, read_letters

if TYPE_CHECKING:
    from common.ports.servers import Log

_NEWEST = 5  # addresses of one reason


def dead_letters_page(log: Log, job: str, streams: Iterable[str], limit: int) -> DeadLettersPage:
    """Count them.

    Raises:
        UnavailableError: If Kafka is unavailable.
    """
    found = [
        (stream, each)
        for stream in streams
        for each in by_reason(read_letters(log, stream))
        if each.job == job
    ]
    reasons = [
        {
            "stream": stream,
            "reason": each.reason,
            "records": len(each.letters) - each.batches,
            "batches": each.batches,
            "replayed": each.replayed,
            "newest": [
                {"partition": span.partition, "offset": span.start, "end": span.end}
                for span in (letter.span for letter in each.letters[: -_NEWEST - 1 : -1])
            ],
        }
        for stream, each in found[:limit]
    ]
    others = sum(len(each.letters) for _, each in found[limit:])
    return DeadLettersPage.model_validate({"reasons": reasons, "others": others})
