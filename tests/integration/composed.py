"""The services of docker-compose.yml as processes, as in the file except for hosts and ports."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.request import urlopen

from common.embedded.apache_kafka import ApacheKafka
from common.embedded.process import Child, free_port
from tests import compose
from tests.compose import ROOT, SECRETS, Part

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KAFKA = ROOT / "deploy/compose/kafka/server.properties"
CLI = (sys.executable, "-m", "services.cli")  # the entry point of the images
STOP_S = 20.0


class ComposedKafka(ApacheKafka):
    """Apache Kafka with the properties of its container. `host_port` is the published port."""

    def _write_configuration(self) -> None:
        super()._write_configuration()  # where logs go
        self.host_port = free_port()
        kafka = compose.services()["kafka"]
        added = (f"{name}={value}" for name, value in kafka_properties(kafka).items())
        text = "\n".join([KAFKA.read_text(), *added, ""])
        (data,) = (each.split(":")[1] for each in kafka["volumes"] if each.startswith("kafka:"))
        for old, new in {
            "kafka:9092": f"127.0.0.1:{self._port}",
            "://:9092": f"://127.0.0.1:{self._port}",
            ":29092": f":{self.host_port}",
            "localhost:9093": f"127.0.0.1:{self.controller_port}",
            f"={data}": f"={self.data}/log",
        }.items():
            assert old in text, f"the properties of Kafka have no {old} any more"
            text = text.replace(old, new)
        (self.data / "server.properties").write_text(text)


def kafka_variables(kafka: Part) -> dict[str, str]:
    """Return the variables of Kafka's container as its entry point changes them."""
    variables = compose.environment_of(kafka)
    advertised = variables["KAFKA_ADVERTISED_LISTENERS"]
    listeners = re.sub(r"://[^:]*:", "://0.0.0.0:", advertised)
    return {"KAFKA_LISTENERS": listeners, **variables}


def kafka_properties(kafka: Part) -> dict[str, str]:
    """Return the variables of Kafka that its image writes into the properties file."""
    names = {name: name.removeprefix("KAFKA_").lower() for name in kafka_variables(kafka)}
    return {
        property_.replace("_", "."): kafka_variables(kafka)[name]
        for name, property_ in names.items()
        if name.startswith("KAFKA_") and name != "KAFKA_HEAP_OPTS"
    }


@dataclass(frozen=True, slots=True)
class Servers:
    """Addresses on this machine of the servers that the file names."""

    kafka: str
    redis: str
    s3: str
    secrets: Path


class Stack:
    """Our containers, as processes.

    Args:
        servers: Servers of the test.
        folder: Folder for logs and temporary files.
    """

    def __init__(self, servers: Servers, folder: Path) -> None:
        self.servers = servers
        self.api_port = free_port()
        # Keyed by container.
        self.metrics_ports = dict[str, int]()
        self._folder = folder
        self._children = dict[str, Child]()

    def up(self, name: str, count: int = 1) -> None:
        """Start the containers of a service."""
        service = compose.services()[name]
        for number in range(1, count + 1):
            container = f"{name}-{number}"
            port = self.metrics_ports[container] = free_port()
            self._children[container] = Child(
                [*CLI, *service["command"]],
                self._folder / f"{container}.log",
                environment=self.environment(service, port),
                forks=True,
            )

    def environment(self, service: Part, metrics_port: int) -> dict[str, str]:
        """Return a container's variables, plus those that a process needs without a container."""
        variables = compose.environment_of(service)
        replaced = {
            "DOLL_KAFKA": self.servers.kafka,
            "DOLL_REDIS": self.servers.redis,
            "AWS_ENDPOINT_URL_S3": self.servers.s3,
            "DOLL_API_HOST": "127.0.0.1",
            "DOLL_API_PORT": str(self.api_port),
            "DOLL_METRICS_HOST": "127.0.0.1",
            "DOLL_METRICS_PORT": str(metrics_port),
        }
        places = {bind.target: str(bind.source) for bind in compose.binds(service)}
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self._folder),
            **{
                name: places.get(value, value.replace(SECRETS, f"{self.servers.secrets}/"))
                for name, value in (variables | _known(replaced, variables)).items()
            },
        }

    def well(self) -> bool:
        """Return True if the health checks of all containers pass."""
        return all(self._well(container) for container in self.metrics_ports)

    def _well(self, container: str) -> bool:
        with (
            socket.socket() as probe
            # Each poll starts a process. Frequent polls would slow the services down.
        ):
            if probe.connect_ex(("127.0.0.1", self.metrics_ports[container])) != 0:
                return False
        service = compose.services()[container.rpartition("-")[0]]
        _, python, *arguments = service["healthcheck"]["test"]
        assert python == "python"
        done = subprocess.run(  # noqa: S603 -- what the file says
            [sys.executable, *arguments],
            env=self.environment(service, self.metrics_ports[container]),
            capture_output=True,
            check=False,
        )
        return done.returncode == 0

    def scraped(self, container: str) -> str:
        """Return the metrics that Prometheus would scrape from a container."""
        address = f"http://127.0.0.1:{self.metrics_ports[container]}/metrics"
        with urlopen(address, timeout=5.0) as answer:
            return str(answer.read().decode())

    def ended(self) -> list[str]:
        """Return the containers that have ended, with their last output."""
        return [
            f"{name}: {child.last_words()}"
            for name, child in self._children.items()
            if not child.running()
        ]

    def stop(self) -> dict[str, int | None]:
        """Send SIGTERM to all, as `docker-compose stop` does. Returns their exit statuses."""
        for child in self._children.values():
            child.ask_to_end()
        for child in self._children.values():
            child.stop(STOP_S)
        return {name: child.exit_code for name, child in self._children.items()}

    def kill(self) -> None:
        """Kill all that still run."""
        for child in self._children.values():
            child.kill()


def compose_program(folder: Path, stack: Stack, doll: Path) -> None:
    """Write a `docker-compose` that only supports `run --rm SERVICE COMMAND...`."""
    service = compose.services()["admin"]
    variables = stack.environment(service, 0)
    exports = "".join(f"export {name}='{value}'\n" for name, value in variables.items())
    words = ("run", "--rm", "-T", "--no-deps", "admin")
    checks = "".join(f'[ "$1" = {word} ] || exit 64; shift\n' for word in words)
    program = folder / "docker-compose"
    program.write_text(
        f'#!/bin/sh\n{checks}{exports}unset DOLL_API DOLL_API_KEY_FILE\nexec "{doll}" "$@"\n'
    )
    program.chmod(0o755)


def _known(replaced: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the replaced values of variables that the container has. It gets no others."""
    return {name: value for name, value in replaced.items() if name in variables}
