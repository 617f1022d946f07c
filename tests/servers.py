"""Kafka for tests: one embedded broker and one real one for the whole run, started when asked for.

A test module that uses them says `pytest_plugins = ["tests.servers"]`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

import pytest

from common.embedded.apache_kafka import ApacheKafka, resolve
from common.embedded.kafka import EmbeddedKafka
from common.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def lacking(reason: str) -> NoReturn:
    """Skip for want of a server, or fail where all servers must be there (CI)."""
    if os.environ.get("TEST_REQUIRE_SERVERS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def embedded_kafka() -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka() as kafka:
        yield kafka


@pytest.fixture(scope="session")
def apache_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    # Indexes of a full segment's size, of hundreds of topics, take longer to recover than to start.
    small = "log.index.size.max.bytes=65536\n"
    folder = tmp_path_factory.mktemp("apache-kafka")
    with ApacheKafka(kafka_jars(), folder, properties=small) as kafka:
        yield kafka


def kafka_jars() -> Path:
    """Where Apache Kafka is; skips where it cannot be had."""
    if os.environ.get("TEST_WITHOUT_KAFKA") == "1":
        pytest.skip("TEST_WITHOUT_KAFKA=1: Maven cannot fetch Apache Kafka here")
    try:
        return resolve()
    except UserError as error:
        lacking(str(error))
