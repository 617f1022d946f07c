"""Opens the servers that the settings name, for commands and for the admin service.

Each adapter is imported on first use. A client library takes part of a second to load, no command
needs all of them, and an invalid command line needs none.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

from common.jobs.servers import Outside
from common.kafka.opening import kafka_settings
from common.storage.port import open_blobs

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.kafka.port import TransactionalLog
    from common.redis.port import Boards


def connect(settings: Settings) -> Outside:
    """Return functions that open the servers. All callers share one client of Kafka and Redis."""

    @cache
    def boards() -> Boards:
        from common.redis.boards import open_boards  # noqa: PLC0415 -- imported on first use

        return open_boards(settings)

    return Outside(
        settings,
        open_log=cache(partial(_open_log, settings)),
        open_board=lambda job: boards().board(job),
        open_blobs=partial(open_blobs, settings),
        live_statuses=lambda on: boards().live_statuses(on),
    )


def _open_log(settings: Settings) -> TransactionalLog:
    from common.kafka.transactions import KafkaTransactionalLog  # noqa: PLC0415 -- imported on first use

    return KafkaTransactionalLog(kafka_settings(settings, "doll"))
