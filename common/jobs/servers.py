"""What a program reaches of the outside: settings and, when first needed, the three ports."""

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
    """Settings and how to open what they name; a program opens only what it needs."""

    settings: Settings
    open_log: Callable[[], TransactionalLog]
    open_board: Callable[[str], Board]  # by job
    open_blobs: Callable[[], Blobs]
    # Looks at boards in a few packets; None if they share no connection.
    live_statuses: Callable[[Sequence[Board]], Sequence[LiveStatus | Exception]] | None = None
