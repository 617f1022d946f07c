"""Kafka for tests: an embedded and a real broker for the whole run, started on demand.

A test module requests them with `pytest_plugins = ["tests.servers"]`.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NoReturn

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType

from common.embedded.apache_kafka import ApacheKafka, resolve
from common.embedded.kafka import EmbeddedKafka
from common.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


_PATIENCE_S = 30.0


def lacking(reason: str) -> NoReturn:
    """Skip because a server is missing, or fail if all servers are required (CI)."""
    if os.environ.get("TEST_REQUIRE_SERVERS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def embedded_kafka() -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka() as kafka:
        yield kafka


@pytest.fixture(scope="session")
def apache_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    # Recovering full-size indexes of hundreds of topics takes longer than starting.
    small = "log.index.size.max.bytes=65536\n"
    folder = tmp_path_factory.mktemp("apache-kafka")
    with ApacheKafka(kafka_jars(), folder, properties=small) as kafka:
        yield kafka


def kafka_jars() -> Path:
    """Return the folder of Apache Kafka's jars. Skips the test if they are not available."""
    if os.environ.get("TEST_WITHOUT_KAFKA") == "1":
        pytest.skip("TEST_WITHOUT_KAFKA=1: Maven cannot fetch Apache Kafka here")
    try:
        return resolve()
    except UserError as error:
        lacking(str(error))


def configure(
    bootstrap: str,
    name: str,
    settings: Mapping[str, str],
    kind: ResourceType = ResourceType.TOPIC,
) -> None:
    """Change settings of a topic, or of a broker by its number. Returns when all brokers use them.

    Kafka answers once its controller has written them. The broker learns of them a moment later.
    """
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 2})
    entries = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        for key, value in settings.items()
    ]
    changed = ConfigResource(kind, name, incremental_configs=entries)
    admin.incremental_alter_configs([changed])[changed].result(_PATIENCE_S)
    deadline = time.monotonic() + _PATIENCE_S
    asked = ConfigResource(kind, name)
    while True:
        found = admin.describe_configs([asked])[asked].result(_PATIENCE_S)
        if all(found[key].value == value for key, value in settings.items()):
            return
        assert time.monotonic() < deadline, f"the broker never heard of {settings} of {name}"
