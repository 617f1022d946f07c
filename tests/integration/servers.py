"""Servers for integration tests: all embedded, or all real."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Protocol

import pytest

from common.config.settings import Settings
from tests.integration.cluster import Cluster
from tests.redis_servers import system_redis_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.embedded.apache_kafka import ApacheKafka
    from common.embedded.kafka import EmbeddedKafka
    from common.embedded.redis import EmbeddedRedis


@pytest.fixture
def embedded(
    embedded_kafka: EmbeddedKafka, embedded_redis: EmbeddedRedis, tmp_path: Path
) -> Settings:
    return Settings(
        kafka=f"embedded:{embedded_kafka.control.path}",
        redis=embedded_redis.url,
        blobs=f"file://{tmp_path}/blobs",
        notices="none",
    )


@pytest.fixture
def real(apache_kafka: ApacheKafka, system_redis: EmbeddedRedis, tmp_path: Path) -> Settings:
    return Settings(
        kafka=apache_kafka.settings.bootstrap,
        kafka_group_protocol="consumer",
        redis=system_redis.url,
        blobs=f"file://{tmp_path}/blobs",
        notices="none",
    )


def has_real_servers() -> bool:
    """Return True if a real Kafka and a real Redis are installed or required."""
    here = shutil.which("java") and shutil.which("mvn") and system_redis_server()
    required = os.environ.get("TEST_REQUIRE_SERVERS") == "1"
    return bool(here or required) and os.environ.get("TEST_WITHOUT_KAFKA") != "1"


@pytest.fixture(
    params=[
        # If there are real servers, processes on the embedded ones run at night only: the demo,
        # the guides and the contracts use them by day.
        pytest.param("embedded", marks=[pytest.mark.nightly] * has_real_servers()),
        pytest.param("real", marks=[pytest.mark.kafka, pytest.mark.redis]),
    ]
)
def settings(request: pytest.FixtureRequest) -> Settings:
    found: Settings = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def likest_to_production(request: pytest.FixtureRequest) -> Settings:
    """Return real servers if they are installed, else embedded ones. For tests that take long."""
    found: Settings = request.getfixturevalue("real" if has_real_servers() else "embedded")
    return found


class Make(Protocol):
    """Creates clusters on the servers of the test."""

    def __call__(
        self,
        name: str,
        records: int,
        options: str = "",
        poison: int = -1,
        seconds: float = 0.0,
    ) -> Cluster:
        """Create a cluster, which is closed when the test ends."""


@pytest.fixture
def make(tmp_path: Path, settings: Settings) -> Iterator[Make]:
    made = list[Cluster]()

    def one(
        name: str, records: int, options: str = "", poison: int = -1, seconds: float = 0.0
    ) -> Cluster:
        made.append(Cluster(settings, tmp_path, name, records, options, poison, seconds))
        return made[-1]

    yield one
    for cluster in made:
        cluster.close()
