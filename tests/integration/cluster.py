"""A cluster of real processes on real servers, for tests that kill processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager
from secrets import token_hex
from typing import TYPE_CHECKING

import numpy as np

from common.data.codecs import codec_of
from common.embedded.process import Child
from common.embedded.services import stop_all
from common.errors import UnavailableError
from common.jobs.job_file import parse_job
from common.jobs.operations import AfterLoss, JobOperations
from common.jobs.purge import purge
from common.kafka.opening import open_log
from common.kafka.settings import EmbeddedControl
from common.runtime.connect import connect
from common.storage.port import open_blobs
from common.testing.counting import ENTRYPOINT
from load.harness.counting import CountingJob
from services.cli.local import open_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from common.config.settings import Settings
    from common.core.audit import Audit
    from common.core.messages import LeaderStatus, ReadFrom, Vector, Wanted
    from common.jobs.edit import Value
    from common.jobs.purge import Remains
    from common.jobs.store import JobRecord

PATIENCE_S = 240.0
PAUSE_S = 0.02  # seconds between two polls


@contextmanager
def served(settings: Settings, logs: Path) -> Iterator[Settings]:
    """Run an admin service. Yields settings for a command that connects to it."""
    page = open_page(settings, logs, f"commands-{token_hex(4)}", "operator")
    try:
        page.await_ready(lambda: False)
        yield settings.model_copy(update={"api": page.url, "api_key": page.key})
    finally:
        stop_all([page.service])


def await_condition(
    condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S
) -> None:
    """Wait until a condition holds. Fails with its description if it never does.

    Clients reconnect to an unavailable server by themselves, so the wait ignores such errors.
    """

    def holds() -> bool:
        try:
            return condition()
        except UnavailableError:
            return False

    deadline = time.monotonic() + patience_s
    pause = 0.01
    while True:
        # Read the clock before the condition, because this process may be stopped for a long time
        # between the two.
        is_late = time.monotonic() > deadline
        if holds():
            return
        if is_late:
            raise AssertionError(f"after {patience_s:g} s still not so: {what}")
        time.sleep(pause)


class Cluster:
    """Coordinators and workers as processes, all for one job of the counting model.

    Args:
        settings: Settings of the servers.
        folder: Folder for logs.
        name: The job's name. Its streams are `<name>-a` and `<name>-b`, two partitions each.
        records: Number of records. Ids start at 0.
        options: Further lines of the job file.
        poison: See `CountingTask`.
        seconds: See `CountingTask`.
        entrypoint: Entry point of a counting task.
    """

    def __init__(  # noqa: PLR0913, PLR0917 -- whatever of a cluster a test wants another of
        self,
        settings: Settings,
        folder: Path,
        name: str,
        records: int,
        options: str = "",
        poison: int = -1,
        seconds: float = 0.0,
        entrypoint: str = ENTRYPOINT,
    ) -> None:
        self.settings = settings.model_copy(update={"tasks": (entrypoint,), "threads": 1})
        self.job = name
        self.records = records
        self.folder = folder
        self._children = dict[str, Child]()
        self.log = open_log(settings)
        self.streams = (f"{name}-a", f"{name}-b")
        spec = parse_job(
            f"""
            name: {name}
            streams: [{", ".join(self.streams)}]
            records: {{codec: tensor, fields: {{id: {{dtype: int64}}}}}}
            task:
              {{entrypoint: "{entrypoint}", records: {records}, poison: {poison},
              seconds: {seconds}}}
            batch_size: 8
            group_size: 4
            reduction: sum
            optimizer: {{name: sgd, learning_rate: 1.0}}
            batch_linger_s: 0.3
            group_linger_s: 0.5
            hot_snapshot: {{every_s: 0.2}}
            {options}
            """.replace("\n            ", "\n")
        )
        self.spec = spec
        self._counting = CountingJob(spec, settings, self.log, partitions=2)
        self.board = self._counting.board
        self._writer = self.log.writer()
        self._job_store = JobOperations(self.log)
        self._produced = 0

    def start(self, service: str, name: str, job: str = "", **settings: object) -> None:
        """Start a coordinator, or a worker of this job or of another one."""
        self._start(service, name, ["--job", job or self.job] * (service == "worker"), settings)

    def start_double(self, name: str) -> str:
        """Start another process with a worker's name. Returns its name in this cluster."""
        called = f"{name}-double"
        self._start("worker", name, ["--job", self.job], {}, called)
        return called

    def start_free_worker(self, name: str, **settings: object) -> None:
        """Start a worker that serves any job."""
        self._start("worker", name, [], settings)

    def _start(
        self,
        service: str,
        name: str,
        options: list[str],
        settings: dict[str, object],
        called: str = "",
    ) -> None:
        command = [sys.executable, "-m", f"services.{service}", "--name", name, *options]
        own = self.settings.model_copy(update=settings)
        environment = {**os.environ, **own.environ()}
        called = called or name
        log = self.folder / f"{called}.log"
        self._children[called] = Child(command, log, environment, forks=True)

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL."""
        self._children.pop(name).kill()

    def freeze(self, name: str) -> None:
        """Freeze a process until `thaw`."""
        self._children[name].send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Continue a frozen process."""
        self._children[name].send_signal(signal.SIGCONT)

    def stop(self, name: str) -> int | None:
        """Send SIGTERM to a process, wait for its end, and return its exit code."""
        child = self._children.pop(name)
        child.stop(30.0)
        return child.exit_code

    def pid(self, name: str) -> int:
        """Return the id of a process."""
        return self._children[name].pid

    def ended(self) -> list[str]:
        """Return processes that ended without being killed or stopped."""
        return [name for name, child in self._children.items() if not child.running()]

    def close(self) -> None:
        """Stop all processes and jobs. Processes of later tests must not serve these jobs."""
        self._writer.close()
        for child in self._children.values():
            child.kill()
        await_condition(self._all_stopped, "all jobs are stopped")
        self._job_store.close()
        self.log.close()

    def _all_stopped(self) -> bool:
        for job, record in self._job_store.read().items():
            if record.wanted != "stopped":
                self._job_store.patch(job, "the test is over", wanted="stopped")
        return True

    def said(self, name: str) -> str:
        """Return the log of a process."""
        return (self.folder / f"{name}.log").read_text()

    def has_led(self, name: str) -> bool:
        """Return True if a coordinator logged that it leads this job, now or earlier."""
        lines = self.said(name).splitlines()
        return any(" leader_elected " in line and f" job={self.job} " in line for line in lines)

    def produce(self, count: int, garbage_every: int = 0) -> None:
        """Write the next ids to all partitions, and some garbage between them."""
        ids = np.arange(self._produced, self._produced + count)
        for number, value in zip(
            ids.tolist(), codec_of(self.spec.records).encode({"id": ids}), strict=True
        ):
            place = number % 4
            stream, partition = self.streams[place // 2], place % 2
            self._writer.append(stream, value, partition=partition)
            if garbage_every and number % garbage_every == 0:
                self._writer.append(stream, b"no record", partition=partition)
        assert self._writer.flush(30.0)
        self._produced += count

    def produce_to(self, stream: str, ids: range, partition: int | None = None) -> None:
        """Write these ids to one stream, which has two partitions, or to one of its partitions."""
        # A new producer has no state of earlier records.
        log = open_log(self.settings)
        writer = log.writer()
        values = codec_of(self.spec.records).encode({"id": np.array(ids)})
        for number, value in enumerate(values):
            writer.append(stream, value, partition=number % 2 if partition is None else partition)
        assert writer.flush(30.0)
        writer.close()
        log.close()

    def record(self) -> JobRecord:
        """Return the job's record from the jobs topic."""
        return self._job_store.get(self.job)

    def wanted(self) -> str:
        """Return the job's desired state in the jobs topic."""
        return self.record().wanted

    def want(self, wanted: Wanted) -> None:
        """Stop or resume the job."""
        self._job_store.patch(self.job, "the test says so", wanted=wanted)

    def purge(self) -> Remains:
        """Free the job's name."""
        return purge(self.job, self._job_store, connect(self.settings))

    def submit_again(self) -> str:
        """Submit the job again. Returns its id."""
        self.board.close()
        self._counting = CountingJob(self.spec, self.settings, self.log, partitions=2)
        self.board = self._counting.board
        return self._counting.record.id

    def resume_after_loss(self, read_from: ReadFrom = "") -> None:
        """Resume the job after it was held for lost records."""
        self._job_store.patch(
            self.job, "the test says so", after_loss=AfterLoss(read_from=read_from)
        )

    def change(self, **changed: Value) -> None:
        """Change settings of the job while it runs."""
        self._job_store.patch(self.job, "the test says so", changed=changed)

    def bootstrap(self) -> str:
        """Return Kafka's address for a plain client."""
        embedded = self.settings.embedded_kafka
        return EmbeddedControl(embedded).address() if embedded else self.settings.kafka

    def leader_status(self) -> LeaderStatus | None:
        """Return the leader's status."""
        return self.board.get_leader_status()

    def version(self) -> int:
        """Return the number of updates that count on the audit trail."""
        return len(self.audit().updates)

    def drained(self) -> bool:
        """Return True if every produced record is settled."""
        return self._counting.drained()

    def audit(self) -> Audit:
        """Fold both topics into an audit."""
        return self._counting.audit()

    def weights(self) -> Vector:
        """Return weights (records,) of the hot snapshot that has all updates of the audit."""
        return self._counting.weights(self.audit())

    def blobs(self) -> list[str]:
        """Return the names in object storage."""
        return open_blobs(self.settings).names("")
