"""A minute of chaos on real servers: all is struck, and every record is used exactly once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.embedded.apache_kafka import resolve
from common.errors import UserError
from load.chaos_schedule import FAMILIES
from tests.redis_servers import system_redis_server
from tests.servers import lacking

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
SEED = 1  # its minute strikes every family
PATIENCE_S = 300.0


@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.timeout(PATIENCE_S + 30)
def test_after_a_minute_of_chaos_every_record_has_been_used_exactly_once(tmp_path: Path) -> None:
    require_servers()

    found, said = chaos(tmp_path, minutes=1, seed=SEED)

    assert found["failures"] == [], said
    assert found["wrong_weights"] == 0
    assert found["flaws"] == []
    assert found["trained"] == found["records"] > 0
    assert found["updates"] > 0
    assert found["quarantined"] == 0
    assert found["faults_by_family"].keys() == FAMILIES
    assert found["unexpected_exits"] == []


def chaos(folder: Path, minutes: float, seed: int) -> tuple[Mapping[str, Any], str]:
    """What a run wrote to its file, and what it said; it must have come to its end."""
    result = folder / "chaos.json"
    command = [sys.executable, "load/chaos.py", "--minutes", str(minutes), "--seed", str(seed)]
    ended = subprocess.run(  # noqa: S603 -- our own interpreter and program
        [*command, "--json", str(result), "--logs", str(folder / "logs")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode in (0, 1), said
    found: dict[str, Any] = json.loads(result.read_text())
    return found, said


def require_servers() -> None:
    """Skip, or fail, where a server of the run is not to be had."""
    if os.environ.get("DOLL_WITHOUT_KAFKA") == "1":
        pytest.skip("DOLL_WITHOUT_KAFKA=1: Maven cannot fetch Apache Kafka here")
    try:
        resolve()
    except UserError as error:
        lacking(str(error))
    if system_redis_server() is None:
        lacking("no redis-server on PATH: install Redis (Debian: apt-get install redis-server)")
