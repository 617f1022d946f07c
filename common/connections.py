"""Opens the outside that the settings name: the one place that knows the adapter behind a URL.

An adapter is imported when it is first wanted: each client library takes a good part of a second to
load, no process needs all of them, and a command line that is wrong needs none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from common.errors import UserError
from common.outside import Outside

if TYPE_CHECKING:
    from common.config import Settings
    from common.ports import Blobs, Board, Log, Notices


def connect(settings: Settings) -> Outside:
    """Say how to open what the settings name."""
    return Outside(
        settings,
        open_log=partial(open_log, settings),
        open_board=partial(open_board, settings),
        open_blobs=partial(open_blobs, settings),
    )


def open_log(settings: Settings, client_id: str = "doll") -> Log:
    """Open Kafka; a real broker is not asked before the first call.

    Raises:
        UnavailableError: If the settings name an embedded broker that is gone.
    """
    from common.adapters.kafka_log import KafkaLog, KafkaSettings  # noqa: PLC0415 -- see above

    if settings.embedded_kafka:
        from common.embedded.kafka import embedded_settings  # noqa: PLC0415 -- see above

        embedded = embedded_settings(settings.embedded_kafka)
        return KafkaLog(replace(embedded, client_id=client_id))
    return KafkaLog(
        KafkaSettings(
            bootstrap=settings.kafka,
            client_id=client_id,
            group_protocol=settings.kafka_group_protocol,
            replication_factor=settings.kafka_replication,
            security=settings.kafka_security,
        )
    )


def open_board(settings: Settings, job: str) -> Board:
    """Open a job's notice board in Redis; the server is not asked before the first call."""
    from common.adapters.redis_board import RedisBoard  # noqa: PLC0415 -- see above

    return RedisBoard(settings.redis, job)


def open_blobs(settings: Settings) -> Blobs:
    """Open object storage.

    Raises:
        UserError: If the settings name none.
        UnavailableError: If it is a directory that cannot be used.
    """
    url = urlsplit(settings.blobs)
    if url.scheme == "file":
        from common.adapters.disk_blobs import DiskBlobs  # noqa: PLC0415 -- see above

        return DiskBlobs(Path(unquote(url.path)))
    if url.scheme == "s3":
        from common.adapters.s3_blobs import S3Blobs  # noqa: PLC0415 -- see above

        prefix = unquote(url.path).strip("/")
        return S3Blobs(url.netloc, f"{prefix}/" if prefix else "", settings.s3_endpoint or None)
    raise UserError(
        "no object storage is named: set DOLL_BLOBS to file:///directory or s3://bucket/prefix"
    )


def open_notices(settings: Settings) -> Notices | None:
    """Open where this machine hears of its end, or None; it is not asked before the first look."""
    if settings.notices == "none":
        return None
    from common.adapters.ec2_notice import Ec2Notices  # noqa: PLC0415 -- see above

    return Ec2Notices(settings.metadata_endpoint)
