"""The servers that a benchmark runs on, and the handling of its services.

Real parts throughout, as processes of their own: a broker, a redis-server, and services that are
told nothing of being measured.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from common.config.settings import Settings
from common.embedded.apache_kafka import ApacheKafka, resolve
from common.embedded.kafka import EmbeddedKafka
from common.embedded.redis import EmbeddedRedis
from common.embedded.services import EmbeddedService, Kind
from common.jobs.operations import JobOperations
from common.kafka.opening import open_log

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord
    from common.kafka.port import Log

_LOOK_S = 0.02  # between looks at a condition


class NotMeasuredError(Exception):
    """A run that would have given a number which means something else; says why."""


def await_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait for something to become true.

    Raises:
        NotMeasuredError: If it did not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        # Read before the condition is: this process may be stopped for long right after that.
        is_late = time.monotonic() > deadline
        if condition():
            return
        if is_late:
            raise NotMeasuredError(f"timed out after {timeout_s:g} s: {what}")
        time.sleep(_LOOK_S)


@dataclass(frozen=True)
class Servers:
    """What the services connect to, and what a report calls it."""

    settings: Settings
    kafka: str  # its name
    logs: Path  # folder for those of services
    pids: dict[str, int] = field(default_factory=dict)  # of those that we started
    forks: bool = False  # whether services share what they load: many fit, and start at once

    def start(self, kind: Kind | str, name: str, *arguments: str) -> EmbeddedService:
        """Start a service, or a program that takes its options, by its module."""
        return EmbeddedService(kind, name, self.settings, self.logs, arguments, forks=self.forks)

    def start_all(self, workers: int) -> list[EmbeddedService]:
        """Start a coordinator and then workers."""
        names = (f"worker-{number}" for number in range(workers))
        coordinator = self.start("coordinator", "coordinator")
        return [coordinator, *(self.start("worker", name) for name in names)]

    @cached_property
    def log(self) -> Log:
        """Kafka; closed with the servers."""
        return open_log(self.settings, "load")

    def submit(self, spec: JobSpec) -> JobRecord:
        """Submit a job."""
        with closing(JobOperations(self.log)) as job_store:
            return job_store.submit(spec)

    def close(self) -> None:
        """Close the log, if it was opened."""
        if "log" in vars(self):
            self.log.close()

    def stop_jobs(self, *names: str) -> None:
        """Have jobs stopped that were measured."""
        with closing(JobOperations(self.log)) as job_store:
            for name in names:
                job_store.patch(name, "measured", wanted="stopped")


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


def check(services: Iterable[EmbeddedService]) -> None:
    """Make sure that services still run.

    Raises:
        NotMeasuredError: If one has ended; quotes its last words.
    """
    for service in services:
        if service.exit_code is not None:
            words = service.last_words()
            raise NotMeasuredError(f"{service.name} ended with {service.exit_code}: {words}")


def events(service: EmbeddedService, event: str, job: str = "") -> list[dict[str, Any]]:
    """All events of a name in a service's log, oldest first.

    Args:
        service: Its log is of JSON.
        event: The name.
        job: Those of this job alone; empty: of all.
    """
    lines = service.log.read_text(errors="replace").splitlines() if service.log.exists() else []
    entries = [
        json.loads(line) for line in lines if f'"event": "{event}"' in line and line[-1] == "}"
    ]
    return [entry for entry in entries if not job or entry.get("job") == job]


@contextmanager
def servers(
    kafka: str, *, tasks: tuple[str, ...] = (), logs: Path | None = None, forks: bool = False
) -> Iterator[Servers]:
    """Start the servers that are ours, with their data in a temporary folder.

    Args:
        kafka: `apache`, `embedded`, or the address of a broker that runs already.
        tasks: Entrypoints that jobs may name.
        logs: Folder for the logs of services; None: the temporary one.
        forks: Whether services share what they load.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="doll-load-")))
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
        on = Servers(Settings.model_validate(values), name, logs or folder, pids, forks)
        stack.callback(on.close)
        yield on


def _version(jars: Path) -> str:
    [clients] = jars.glob("kafka-clients-*.jar")
    return f"Apache Kafka {clients.stem.removeprefix('kafka-clients-')}, one node"
