"""External services of a program: settings and the three ports, each opened when first needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.kafka.port import TransactionalLog
    from common.redis.port import Board, LiveStatus
    from common.storage.port import Blobs


@dataclass(frozen=True, slots=True)
class Outside:
    """Settings, and functions that open what they name. A program opens only what it needs."""

    settings: Settings
    open_log: Callable[[], TransactionalLog]
    # Takes the id of a job.
    open_board: Callable[[str], Board]
    open_blobs: Callable[[], Blobs]
    # Polls several boards in a few packets; None if they share no connection.
    live_statuses: Callable[[Sequence[Board]], Sequence[LiveStatus | Exception]] | None = None
