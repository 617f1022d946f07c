"""The servers that a benchmark runs on, and control of its services.

All parts are real and run as processes of their own: a broker, a redis-server, and services that do
not know of the measurement.
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
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from common.config.settings import Settings
from common.embedded.apache_kafka import ApacheKafka, resolve
from common.embedded.kafka import EmbeddedKafka
from common.embedded.process import family
from common.embedded.redis import EmbeddedRedis
from common.embedded.services import EmbeddedService, Kind
from common.jobs.operations import JobOperations
from common.kafka.opening import open_log

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord
    from common.kafka.port import Log

# Interval between checks of a condition.
_LOOK_S = 0.02


class NotMeasuredError(Exception):
    """Raised if a run's number would be misleading. The message says why."""


def await_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait until a condition holds.

    Raises:
        NotMeasuredError: If it does not hold within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        # Read the clock before the condition, because this process may be suspended between the
        # two.
        is_late = time.monotonic() > deadline
        if condition():
            return
        if is_late:
            raise NotMeasuredError(f"timed out after {timeout_s:g} s: {what}")
        time.sleep(_LOOK_S)


@dataclass(frozen=True)
class Servers:
    """Servers that services connect to, and their name in reports."""

    settings: Settings
    kafka: str  # its name
    logs: Path  # folder of the services' logs
    pids: dict[str, int] = field(default_factory=dict)  # servers that this started
    # Services fork from a process with loaded libraries, so that many fit and start quickly.
    forks: bool = False

    def using(self, gpus: str) -> Servers:
        """Return the same servers for services with another setting `gpus`."""
        return replace(self, settings=self.settings.model_copy(update={"gpus": gpus}))

    def start(self, kind: Kind | str, name: str, *arguments: str) -> EmbeddedService:
        """Start a service, or a program with a service's options, by its module."""
        return EmbeddedService(kind, name, self.settings, self.logs, arguments, forks=self.forks)

    def start_all(self, workers: int) -> list[EmbeddedService]:
        """Start a coordinator and then workers."""
        names = (f"worker-{number}" for number in range(workers))
        coordinator = self.start("coordinator", "coordinator")
        return [coordinator, *(self.start("worker", name) for name in names)]

    @cached_property
    def log(self) -> Log:
        """Kafka. Closed with the servers."""
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
        """Stop jobs that were measured."""
        with closing(JobOperations(self.log)) as job_store:
            for name in names:
                job_store.patch(name, "measured", wanted="stopped")


class Process(Protocol):
    """Anything with a process id, such as a service or a server."""

    @property
    def pid(self) -> int:
        """The process id."""


def freeze(process: Process) -> None:
    """Stop a process and its descendants with SIGSTOP."""
    for pid in family(process.pid):
        os.kill(pid, signal.SIGSTOP)


def thaw(process: Process) -> None:
    """Continue a frozen process and its descendants."""
    for pid in family(process.pid):
        os.kill(pid, signal.SIGCONT)


def check(services: Iterable[EmbeddedService]) -> None:
    """Make sure that services still run.

    Raises:
        NotMeasuredError: If a service has ended. Quotes its last log lines.
    """
    for service in services:
        if service.exit_code is not None:
            words = service.last_words()
            raise NotMeasuredError(f"{service.name} ended with {service.exit_code}: {words}")


def events(service: EmbeddedService, event: str, job: str = "") -> list[dict[str, Any]]:
    """Return all events of a name in a service's log, oldest first.

    Args:
        service: Service whose log is JSON.
        event: Name of the event.
        job: Optional. Only events of this job. If empty, events of all jobs.
    """
    lines = service.log.read_text(errors="replace").splitlines() if service.log.exists() else []
    entries = [
        json.loads(line) for line in lines if f'"event": "{event}"' in line and line[-1] == "}"
    ]
    return [entry for entry in entries if not job or entry.get("job") == job]


def await_running(
    services: Iterable[EmbeddedService], condition: Callable[[], bool], timeout_s: float, what: str
) -> None:
    """Wait until a condition holds, while all services run.

    Raises:
        NotMeasuredError: If it does not hold within `timeout_s`, or a service has ended.
    """

    def holds() -> bool:
        check(services)
        return condition()

    await_until(holds, timeout_s, what)


@contextmanager
def servers(
    kafka: str, *, tasks: tuple[str, ...] = (), logs: Path | None = None, forks: bool = False
) -> Iterator[Servers]:
    """Start servers with their data in a temporary folder.

    Args:
        kafka: `apache`, `embedded`, or the address of a running broker.
        tasks: Entrypoints that jobs may name.
        logs: Optional. Folder for the services' logs. If unset, the temporary folder.
        forks: See `Servers.forks`.
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
