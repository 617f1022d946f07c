"""Opens the outside that the settings name: the one place that knows the adapter behind a URL."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.adapters.kafka_log import KafkaLog, KafkaSettings
from common.adapters.redis_board import RedisBoard
from common.embedded.kafka import embedded_settings

if TYPE_CHECKING:
    from common.config import Settings
    from common.ports import Board, Log


def open_log(settings: Settings, client_id: str = "doll") -> Log:
    """Open Kafka; a real broker is not asked before the first call.

    Raises:
        UnavailableError: If the settings name an embedded broker that is gone.
    """
    if settings.embedded_kafka:
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
    return RedisBoard(settings.redis, job)
