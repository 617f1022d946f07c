"""The servers that a benchmark runs on, and the handling of its services.

Real parts throughout, as processes of their own: a broker, a redis-server, and services that are
told nothing of being measured.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from common.config.settings import Settings
from common.embedded.apache_kafka import ApacheKafka, resolve
from common.embedded.kafka import EmbeddedKafka
from common.embedded.redis import EmbeddedRedis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from common.embedded.services import Service

_LOOK_S = 0.02  # between looks at a condition


class NotMeasuredError(Exception):
    """A run that would have given a number which means something else; says why."""


def await_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait for something to become true.

    Raises:
        NotMeasuredError: If it did not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise NotMeasuredError(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(_LOOK_S)


@dataclass(frozen=True)
class Servers:
    """What the services connect to, and what a report calls it."""

    settings: Settings
    kafka: str  # its name
    pids: dict[str, int] = field(default_factory=dict)  # of those that we started


class Process(Protocol):
    """A service or a server: something with a process id."""

    @property
    def pid(self) -> int:
        """The process id."""


def freeze(process: Process) -> None:
    """Let a process do nothing at all until `thaw`."""
    os.kill(process.pid, signal.SIGSTOP)


def thaw(process: Process) -> None:
    """Let a process go on, if it is frozen."""
    os.kill(process.pid, signal.SIGCONT)


def check(services: Iterable[Service]) -> None:
    """Make sure that services still run.

    Raises:
        NotMeasuredError: If one has ended; quotes its last words.
    """
    for service in services:
        if service.exit_code is not None:
            words = service.last_words()
            raise NotMeasuredError(f"{service.name} ended with {service.exit_code}: {words}")


@contextmanager
def servers(kafka: str, folder: Path, *, tasks: tuple[str, ...] = ()) -> Iterator[Servers]:
    """Start the servers that are ours.

    Args:
        kafka: `apache`, `embedded`, or the address of a broker that runs already.
        folder: For their data.
        tasks: Entrypoints that jobs may name.
    """
    with ExitStack() as stack:
        server = shutil.which("redis-server")
        redis = stack.enter_context(EmbeddedRedis(Path(server) if server else None))
        pids = {"redis": redis.pid}
        if kafka == "embedded":
            mock = stack.enter_context(EmbeddedKafka())
            pids["kafka"] = mock.pid
            address, protocol, name = f"embedded:{mock.control.path}", "consumer", "librdkafka mock"
        elif kafka == "apache":
            jars = resolve()
            broker = stack.enter_context(ApacheKafka(jars, folder / "kafka"))
            pids["kafka"] = broker.pid
            address, protocol, name = broker.settings.bootstrap, "consumer", _version(jars)
        else:
            address, protocol, name = kafka, "classic", f"Kafka at {kafka}"
        values = {
            "kafka": address,
            "kafka_group_protocol": protocol,
            "redis": redis.url,
            "blobs": f"file://{folder / 'blobs'}",
            "tasks": tasks,
            "threads": 1,
            "log_format": "json",
        }
        yield Servers(Settings.model_validate(values), name, pids)


def _version(jars: Path) -> str:
    [clients] = jars.glob("kafka-clients-*.jar")
    return f"Apache Kafka {clients.stem.removeprefix('kafka-clients-')}, one node"
