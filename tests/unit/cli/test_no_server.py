"""Every command soon reports that its server is not reachable, and at which address."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import httpx2
import pytest
from typer.testing import CliRunner

from common.core.spans import Partition
from common.errors import OutsideError
from common.kafka.memory import MemoryLog
from common.kafka.names import JOBS
from common.kafka.port import NewTopic
from common.runtime.connect import connect
from services.cli import exits
from services.cli.app import app
from services.cli.system.outside import Ways

if TYPE_CHECKING:
    from typer.testing import Result

    from tests.unit.cli.conftest import World

CLOSED = "127.0.0.1:1"
NO_KAFKA = f"error: no Kafka at {CLOSED} (DOLL_KAFKA); start it, or set another address"
NO_SERVICE = f"error: no DOLL service at http://{CLOSED} (DOLL_API); start it, or set another URL"
WITHIN_S = 10.0

COMMANDS = {
    NO_KAFKA: (
        "audit digits",
        "dlq replay clinic-a --reason lost",
        "job logs digits",
        "job replay digits --all",
        "key create ada --role viewer",
        "key list",
        "produce digits --topic clinic-a",
        "topic describe clinic-a",
    ),
    NO_SERVICE: (
        "dlq show digits",
        "job change digits --group-size 2",
        "job delete digits --purge --yes",
        "job events digits",
        "job list",
        "job pause digits",
        "job requeue digits --all",
        "job show digits",
        "job watch digits --once",
        "model list digits",
        "model pull digits -o digits.safetensors",
        "plan --job digits --workers 4",
        "prices",
        "provisioning replan digits",
        "provisioning show digits",
    ),
}


def run(command: str, api: str = f"http://{CLOSED}") -> Result:
    arguments = ["--kafka", CLOSED, *command.split()]
    environment = {"COLUMNS": "200", "DOLL_BLOBS": "file:///tmp", "DOLL_KAFKA": "", "DOLL_API": api}
    return CliRunner().invoke(app, arguments, obj=Ways(connect), env=environment)


@pytest.mark.parametrize(
    ("command", "said"), [(each, said) for said, several in COMMANDS.items() for each in several]
)
def test_command_without_its_server_names_the_address(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.kafka.log._FIRST_WAITS_S", (0.01,))
    monkeypatch.setattr("doll.connection.AGAIN_S", (0.0,))
    found = run(command)
    assert found.stderr.startswith(said), found.output
    assert found.exit_code == exits.UNAVAILABLE


@pytest.mark.parametrize("command", ["job list", "key list"])
def test_command_without_its_server_ends_within_ten_seconds(command: str) -> None:
    began = monotonic()
    assert run(command).exit_code == exits.UNAVAILABLE
    assert monotonic() - began < WITHIN_S


def test_command_without_a_named_service_explains_how_to_start_one(world: World) -> None:
    said = world.run("job", "list", code=exits.UNAVAILABLE, end=_Nobody()).stderr
    assert said == (
        "error: no DOLL service at http://127.0.0.1:8080 (DOLL_API is not set); start one with"
        " `doll up`, or set DOLL_API to its URL\n"
    )


class _Nobody(httpx2.BaseTransport):
    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("nobody listens", request=request)


class _Guarded(MemoryLog):
    """Kafka that hides the jobs topic from the caller, who has no right to it."""

    def partitions(self, topic: str) -> tuple[Partition, ...]:
        if topic == JOBS:
            raise OutsideError(f"{topic}: TOPIC_AUTHORIZATION_FAILED")
        return super().partitions(topic)


def test_produce_needs_no_access_to_the_jobs_topic(world: World) -> None:
    world.log = _Guarded()
    world.log.create_topics([NewTopic("clinic-a")])
    world.run("produce", "digits", "--topic", "clinic-a", "--records", "1")
    assert world.log.ends([Partition("clinic-a", 0)]) == {Partition("clinic-a", 0): 1}
