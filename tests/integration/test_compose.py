"""Services run as docker-compose.yml says, and the commands of its guide train a model.

Tests in tests/unit/deploy check on every change that services understand its variables.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import boto3
import pytest
import redis
from moto.server import ThreadedMotoServer

from common.embedded.process import Child, free_port
from common.embedded.redis import find_redis_server
from tests import compose
from tests.changes import once_changed
from tests.compose import ROOT
from tests.integration.cluster import await_condition
from tests.integration.composed import ComposedKafka, Servers, Stack, compose_program
from tests.integration.guides import DOCS, programs, what_goes_wrong
from tests.redis_servers import system_redis_server
from tests.servers import kafka_jars

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from types_boto3_s3 import S3Client

    from common.embedded.kafka import EmbeddedKafka

pytest_plugins = ["tests.forked_doll", "tests.servers"]

SCRIPTS = ROOT / "deploy/compose"
GUIDE_S = 180.0


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """Run `make secrets`. Returns the folder with its files."""
    folder = tmp_path / "secrets"
    subprocess.run([SCRIPTS / "make-secrets", folder], check=True, capture_output=True)  # noqa: S603 -- our own script
    return folder


@pytest.fixture
def kafka(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Yield Kafka's address for containers and for this machine. Real Kafka if it is installed."""
    required = os.environ.get("TEST_REQUIRE_SERVERS") == "1"
    here = shutil.which("java") and shutil.which("mvn")
    if (here or required) and os.environ.get("TEST_WITHOUT_KAFKA") != "1":
        with ComposedKafka(kafka_jars(), tmp_path / "kafka") as broker:
            yield broker.settings.bootstrap, f"127.0.0.1:{broker.host_port}"
    else:
        embedded: EmbeddedKafka = request.getfixturevalue("embedded_kafka")
        address = f"embedded:{embedded.control.path}"
        yield address, address


@pytest.fixture
def redis_url(secrets: Path, tmp_path: Path) -> Iterator[str]:
    """The Redis of the file, started by its script."""
    service = compose.services()["redis"]
    binary = system_redis_server() or find_redis_server()
    folder, port = tmp_path / "redis", free_port()
    folder.mkdir()
    (folder / "redis-server").symlink_to(binary)
    password = secrets / "redis_password"
    child = Child(
        ["sh", str(SCRIPTS / "redis.sh"), "--port", str(port), "--bind", "127.0.0.1"],
        folder / "redis.log",
        environment={
            **compose.environment_of(service),
            "PATH": f"{folder}:{os.environ['PATH']}",
            "REDIS_PASSWORD_FILE": str(password),
            "REDIS_DIRECTORY": str(folder),
        },
    )

    def answers() -> bool:
        try:
            return bool(redis.Redis(port=port, password=password.read_text().strip()).ping())
        except redis.ConnectionError:
            return False

    try:
        child.await_ready(answers)
        yield compose.environment_of(compose.services()["worker"])["DOLL_REDIS"].replace(
            "redis:6379", f"127.0.0.1:{port}"
        )
    finally:
        child.stop()


@pytest.fixture
def storage(secrets: Path) -> Iterator[tuple[str, S3Client]]:
    """An S3 server with the bucket of the file."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_SHARED_CREDENTIALS_FILE", str(secrets / "s3_credentials"))
        client = boto3.session.Session().client(
            "s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1"
        )
        client.create_bucket(Bucket=bucket())
    yield f"http://{host}:{port}", client
    server.stop()


def bucket() -> str:
    """Writes go to the bucket that the file creates."""
    made = compose.environment_of(compose.services()["s3-bucket"])["BUCKET"]
    blobs = compose.environment_of(compose.services()["coordinator"])["DOLL_BLOBS"]
    assert blobs.startswith(f"s3://{made}/")
    return made


@pytest.fixture
def stack(
    kafka: tuple[str, str],
    redis_url: str,
    storage: tuple[str, S3Client],
    secrets: Path,
    tmp_path: Path,
) -> Iterator[Stack]:
    folder = tmp_path / "logs"
    folder.mkdir()
    running = Stack(Servers(kafka[0], redis_url, storage[0], secrets), folder)
    try:
        yield running
    finally:
        running.kill()


@once_changed(
    *("docker-compose.yml", "deploy/compose/", "docs/start/compose.md", "common/config/settings"),
    *("tests/compose.py", "tests/integration/test_compose.py", "tests/integration/composed.py"),
)
def test_compose_services_run_and_guide_commands_train_a_model(
    stack: Stack,
    kafka: tuple[str, str],
    storage: tuple[str, S3Client],
    doll_program: Path,
    tmp_path: Path,
) -> None:
    for name in ("coordinator", "worker", "evaluator", "provisioner", "admin"):
        stack.up(name, count=2 if name == "worker" else 1)
    await_condition(lambda: stack.well() or bool(stack.ended()), "all services are healthy")
    assert not stack.ended()
    workdir = tmp_path / "workdir"
    workdir.mkdir()
    path = programs(tmp_path / "bin", doll_program)
    compose_program(tmp_path / "bin", stack, doll_program)
    # The guide's commands find everything by the published ports.
    guide = tmp_path / "compose.md"
    text = (DOCS / "start" / guide.name).read_text()
    for published, ours in {
        "127.0.0.1:29092": kafka[1],
        "127.0.0.1:8080": f"127.0.0.1:{stack.api_port}",
    }.items():
        assert published in text
        text = text.replace(published, ours)
    guide.write_text(text)
    reader = {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(workdir)}
    wrong = what_goes_wrong([str(guide)], workdir, reader, GUIDE_S)

    assert not wrong, wrong
    assert (workdir / "digits.safetensors").stat().st_size > 1000
    _, client = storage

    def checkpoints() -> list[str]:
        found = client.list_objects_v2(Bucket=bucket(), Prefix="checkpoints/").get("Contents", [])
        return [each["Key"] for each in found]

    await_condition(lambda: any("manifest" in key for key in checkpoints()), "a checkpoint")
    updates, evaluated = (
        f'{name}{{job_name="digits"}}' for name in ("doll_updates_total", "doll_evaluated_version")
    )
    await_condition(lambda: updates in stack.scraped("coordinator-1"), "updates are counted")
    await_condition(lambda: evaluated in stack.scraped("evaluator-1"), "a version was evaluated")
    assert not stack.ended()
    assert set(stack.stop().values()) == {0}


def test_compose_redis_requires_password_and_persists_writes(redis_url: str, secrets: Path) -> None:
    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(redis_url).get("key")
    password = (secrets / "redis_password").read_text().strip()
    inside = redis.Redis.from_url(redis_url, password=password)
    config = inside.config_get("*")
    assert config["appendonly"] == "yes"
    assert config["maxmemory-policy"] == "noeviction"
    assert config["maxmemory"] == str(512 << 20)
