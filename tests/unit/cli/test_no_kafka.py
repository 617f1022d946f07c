"""Every command that reads Kafka says soon that there is none, and where it looked."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from common.core.spans import Partition
from common.errors import OutsideError
from common.kafka.memory import MemoryLog
from common.kafka.names import JOBS
from common.ports.servers import NewTopic
from common.runtime.connect import connect
from services.cli import exits
from services.cli.app import app
from services.cli.system.outside import Ways

if TYPE_CHECKING:
    from typer.testing import Result

    from tests.unit.cli.conftest import World

CLOSED = "127.0.0.1:1"
SAID = f"error: no Kafka at {CLOSED} (DOLL_KAFKA): start it, or name another"
WITHIN_S = 10.0

COMMANDS = [
    "job list",
    "job show digits",
    "job watch digits --once",
    "job logs digits",
    "job pause digits",
    "job delete digits --purge --yes",
    "job requeue digits --all",
    "audit digits",
    "dlq show digits",
    "dlq replay clinic-a --reason lost",
    "key list",
    "key create ada --role viewer",
    "model list digits",
    "model pull digits -o digits.safetensors",
    "produce digits --topic clinic-a",
    "provisioning show digits",
    "topic describe clinic-a",
]


def run(command: str) -> Result:
    arguments = ["--kafka", CLOSED, *command.split()]
    environment = {"COLUMNS": "200", "DOLL_BLOBS": "file:///tmp", "DOLL_API": "", "DOLL_KAFKA": ""}
    return CliRunner().invoke(app, arguments, obj=Ways(connect), env=environment)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_without_kafka_names_the_address(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.kafka.log._FIRST_WAITS_S", (0.01,))
    found = run(command)
    assert found.stderr.startswith(SAID), found.output
    assert found.exit_code == exits.UNAVAILABLE


def test_command_without_kafka_ends_within_ten_seconds() -> None:
    began = monotonic()
    assert run("job list").stderr.startswith(SAID)
    assert monotonic() - began < WITHIN_S


class _Guarded(MemoryLog):
    """A Kafka in which the caller may not see the jobs topic."""

    def partitions(self, topic: str) -> tuple[Partition, ...]:
        if topic == JOBS:
            raise OutsideError(f"{topic}: TOPIC_AUTHORIZATION_FAILED")
        return super().partitions(topic)


def test_command_that_needs_no_right_on_the_jobs_topic_is_not_asked_for_one(world: World) -> None:
    world.log = _Guarded()
    world.log.create_topics([NewTopic("clinic-a")])
    world.run("produce", "digits", "--topic", "clinic-a", "--records", "1")
    assert world.log.ends([Partition("clinic-a", 0)]) == {Partition("clinic-a", 0): 1}
