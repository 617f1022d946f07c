"""The servers and services that a benchmark runs on, as processes of their own.

Real parts throughout: a broker, a redis-server, `services.coordinator` and `services.worker`, which
are told nothing of being measured.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common.config import Settings
from common.embedded.apache_kafka import ApacheKafka, resolve
from common.embedded.kafka import EmbeddedKafka
from common.embedded.process import Child
from common.embedded.redis import EmbeddedRedis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ROOT = Path(__file__).parents[1]
_LEAVE_S = 25.0  # a worker may take 20 s for the gradient under way
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


class Service:
    """One coordinator or worker.

    Args:
        name: Under which it goes.
        service: Which of `services`.
        arguments: Of its command line, besides the name.
        settings: Its environment.
        folder: Its log goes there.
    """

    def __init__(
        self, name: str, service: str, arguments: tuple[str, ...], settings: Settings, folder: Path
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        # The services of this checkout, wherever we were started.
        environment = os.environ | settings.environ() | {"PYTHONPATH": str(_ROOT)}
        command = [sys.executable, "-m", f"services.{service}", "--name", name, *arguments]
        self._child = Child(command, self.log, environment)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def check(self) -> None:
        """Make sure that it still runs.

        Raises:
            NotMeasuredError: If not; quotes its last words.
        """
        if not self._child.running():
            words = self.log.read_text(errors="replace")[-1500:]
            raise NotMeasuredError(f"{self.name} has ended: {words}")

    def freeze(self) -> None:
        """Let it do nothing at all until `thaw`."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it in order, also where it is frozen."""
        if self._child.running():
            self.thaw()
        self._child.stop(_LEAVE_S)


def stop_all(services: list[Service]) -> None:
    """End services, the last one first."""
    for service in reversed(services):
        service.stop()


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
