"""Opens the outside that the settings name: the one place that knows the adapter behind a URL.

An adapter is imported when it is first wanted: each client library takes a good part of a second to
load, no process needs all of them, and a command line that is wrong needs none.
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
    from common.redis.access import RedisAccess
    from common.redis.port import Board, Boards


def connect(settings: Settings) -> Outside:
    """Say how to open what the settings name; all who open Kafka or Redis so share its clients."""
    boards = cache(partial(open_boards, settings))
    return Outside(
        settings,
        open_log=cache(partial(_open_log, settings)),
        open_board=lambda job: boards().board(job),
        open_blobs=partial(open_blobs, settings),
        live_statuses=lambda on: boards().live_statuses(on),
    )


def _open_log(settings: Settings) -> TransactionalLog:
    from common.kafka.transactions import KafkaTransactionalLog  # noqa: PLC0415 -- see above

    return KafkaTransactionalLog(kafka_settings(settings, "doll"))


def open_board(settings: Settings, job: str) -> Board:
    """Open a job's notice board in Redis; the server is not asked before the first call.

    Raises:
        UserError: If the settings name a file that cannot be used.
    """
    from common.redis.board import RedisBoard  # noqa: PLC0415 -- see above

    return RedisBoard(settings.redis, job, access=_redis_access(settings))


def open_boards(settings: Settings) -> Boards:
    """Open the notice boards of all jobs in Redis, over connections that they share.

    Raises:
        UserError: If the settings name a file that cannot be used.
    """
    from common.redis.exchange import RedisBoards  # noqa: PLC0415 -- see above

    return RedisBoards(settings.redis, access=_redis_access(settings))


def _redis_access(settings: Settings) -> RedisAccess:
    from common.redis.access import RedisAccess  # noqa: PLC0415 -- see above

    return RedisAccess(
        password=settings.redis_password,
        ca=settings.redis_ca,
        cert=settings.redis_cert,
        key=settings.redis_key,
    )
