"""A slot of a worker: a GPU, or the processor, with a child process for the slot's job.

The worker itself runs no code of a task, so nothing that a task does can reach another job:

    the process leaves in order          the slot takes its next job
    the process reports an error         the job waits for a while, see `JobSelector.failed`
    the process dies                     the job waits for a shorter while; the signal and the last
                                         output are in the log and in the job's state
    the process does not leave in time   the worker kills it
    the worker dies                      the kernel kills the process
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from contextlib import closing, suppress
from time import monotonic
from typing import TYPE_CHECKING

from common.config.program import command_of
from common.core.liveness import WORKER
from common.errors import OutsideError
from common.jobs.store import encode_entry
from common.runtime.fork_server import Adopted, end_strangers, fork_child
from services.worker.channel import (
    BeginJob,
    Failure,
    JobChanged,
    LeaveJob,
    LeftJob,
    Pinned,
    ProcessBeat,
    Scrape,
    Scraped,
    WorkerEnd,
    failure_of,
)
from services.worker.member_name import await_member_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from common.core.messages import WorkerId
    from common.jobs.store import JobRecord
    from common.kafka.port import Log
    from common.redis.port import Boards
    from common.runtime.service import ServiceProcess
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.registry import Family
    from services.worker.selection import JobSelector

MODULE = "services.worker.job_process"
# Extra lifetime of a reported failure, so that it lasts until the next attempt has ended.
UNABLE_S = 60.0
# Pause between checks for a selected job, and for its changes.
SELECTED_S = 0.05
# Time after DOLL_LEAVE_S, or after its last message, in which a process has to end.
GRACE_S = 5.0
# Longest time that a scrape waits for a process.
SCRAPE_S = 1.0
# Reads of what a process has sent before its end, which are more than a socket can hold.
MOST_READS = 100
# Longest time without a message before a process counts as unhealthy.
STILL_S = 60.0
# Time within which a GPU may fail only once, unless a batch is at fault.
AGAIN_LOST_S = 600.0
# Words in errors of CUDA that are faults of a kernel, such as a wrong index, not of the GPU.
KERNEL_FAULTS = ("assert", "illegal", "misaligned")
# Lines and bytes of a process's output that its failure quotes.
LAST_LINES, LAST_BYTES = 50, 2_000

UNASKED = Failure(
    "the worker's process for this job left without an order, for example after a SIGTERM",
    kind=("left",),
    reported=True,
    died=True,
)


class JobProcess:
    """A process for one job, as its worker sees it. One thread drives it with `turn`.

    Args:
        begin: The first message.
        logger: Bound to the slot.

    Raises:
        OSError: If the process cannot be started.
    """

    def __init__(self, begin: BeginJob, logger: EventLogger) -> None:
        self._log = logger.bind(job=begin.job)
        self._since = monotonic()
        self.pinned = False
        # What the process said of its end.
        self.result: Failure | LeftJob | None = None
        # Monotonic time after which the process is killed.
        self._deadline = float("inf")
        # Why this worker has killed the process.
        self._killed = ""
        self._complaint, self._last_seen = "", self._since
        self._scraped = Scraped(())
        self._arrived = threading.Condition()
        self._scrapes = 0
        self._last_lines, self._is_fatal = deque[bytes](maxlen=LAST_LINES), False
        ours, theirs = socket.socketpair()
        reads, writes = os.pipe()
        try:
            with theirs:
                self._process = _start_process(f"job-{begin.job}", writes, theirs)
        except OSError:
            ours.close()
            os.close(reads)
            raise
        finally:
            os.close(writes)
        self._channel = WorkerEnd(ours)
        self._readable = select.poll()
        self._readable.register(ours, select.POLLIN)
        self._channel.send(begin)
        self._output = threading.Thread(
            target=self._copy_output, args=(reads,), name="output", daemon=True
        )
        self._output.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def turn(self, timeout_s: float) -> bool:
        """Receive messages for at most this time; return False if the process has ended."""
        now = monotonic()
        if now > self._deadline and not self._killed:
            self._killed = "was killed, because it did not end in time"
            self._log.warning("job_process_killed", after_s=now - self._since)
            self._process.kill()
        self._channel.send()
        with suppress(EOFError):
            if self._readable.poll(1e3 * timeout_s):
                for message in self._channel.receive():
                    self._handle(message)
            return self._process.poll() is None
        # The process has closed its end, so it ends now.
        self._deadline = min(self._deadline, monotonic() + GRACE_S)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.poll() is None

    def change(self, record: str) -> None:
        """Send a changed record of the job."""
        self._channel.send(JobChanged(record))

    def leave(self, within_s: float) -> None:
        """Make the process leave in order, and kill it if it takes longer than `within_s`."""
        self._deadline = min(self._deadline, monotonic() + within_s)
        self._channel.send(LeaveJob())

    def end(self) -> Failure | None:
        """Kill the process if it still runs, and return why it failed; None if it did not."""
        self._process.kill()
        status = self._process.wait()
        if sys.platform == "linux":
            end_strangers()
        with suppress(EOFError):
            for _ in range(MOST_READS):
                for message in self._channel.receive():
                    self._handle(message)
        self._channel.close()
        self._output.join(GRACE_S)
        if isinstance(self.result, Failure):
            return self.result
        return None if isinstance(self.result, LeftJob) else self._death(status)

    def complaint(self) -> str:
        """Return why the process is unhealthy, as `Watchdog.complaint` does."""
        still_s = monotonic() - self._last_seen
        if still_s >= STILL_S:
            return f"the process {self.pid} for a job has sent nothing for {still_s:.0f} s"
        return self._complaint

    def metrics(self) -> Iterable[Family]:
        """Return the metrics of the process; the last known ones if it does not answer."""
        with self._arrived:
            number = self._scrapes
            self._channel.send(Scrape())
            self._arrived.wait_for(lambda: self._scrapes > number, SCRAPE_S)
            return self._scraped.families

    def _handle(self, message: Failure | LeftJob | Pinned | ProcessBeat | Scraped) -> None:
        self._last_seen = monotonic()
        match message:
            case Failure() | LeftJob():
                self.result = message
                # Threads that a task has left behind could keep the process for ever.
                self._deadline = min(self._deadline, monotonic() + GRACE_S)
            case Pinned(pinned):
                self.pinned = pinned
            case ProcessBeat(complaint):
                self._complaint = complaint
            case Scraped():
                with self._arrived:
                    self._scraped = message
                    self._scrapes += 1
                    self._arrived.notify_all()

    def _death(self, status: int) -> Failure:
        """Describe the end of a process that said nothing."""
        how = f"ended with exit status {status}, although its work was not done"
        if status < 0:
            how = f"died of {_signal_name(-status)}"
        if self._killed:
            how = self._killed
        elif status == -signal.SIGKILL:
            how += ", perhaps because the machine had no memory left"
        quoted = slice(LAST_BYTES) if self._is_fatal else slice(-LAST_BYTES, None)
        words = b"\n".join(self._last_lines)[quoted].decode(errors="replace").strip()
        reason = f"the worker's process for this job {how}; its last output: {words or 'none'}"
        return Failure(reason, kind=(how,), reported=True, died=True)

    def _copy_output(self, reads: int) -> None:
        """Copy the process's output to this process's, and keep the lines that a failure quotes."""
        with open(reads, "rb") as lines:
            while line := lines.readline(1 << 16):
                # The stacks of a fatal error begin with the thread that it is about.
                if line.startswith(b"Fatal Python error: "):
                    self._last_lines.clear()
                    self._is_fatal = True
                if not self._is_fatal or len(self._last_lines) < LAST_LINES:
                    self._last_lines.append(line.rstrip(b"\n"))
                with suppress(OSError):
                    while line:
                        line = line[os.write(2, line) :]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _start_process(
    name: str, output: int, inherited: socket.socket
) -> Adopted | subprocess.Popen[bytes]:
    if sys.platform == "linux":
        return fork_child(MODULE, ("--name", name), output, inherited)
    return subprocess.Popen(  # noqa: S603 -- our own command line, no shell
        command_of(MODULE, "--name", name, str(inherited.fileno())),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[inherited.fileno()],
        start_new_session=True,
    )


class Slot:
    """One slot of a worker. `run` works for one job after another.

    Args:
        name: Name of the worker in this slot.
        gpu: UUID of the slot's GPU; empty for the processor.
        selector: Selects the jobs of this slot.
        log: Kafka.
        boards: Redis.
        process: This process.
        count_loss: Counts a loss of the GPU.
    """

    def __init__(
        self,
        name: str,
        gpu: str,
        selector: JobSelector,
        log: Log,
        boards: Boards,
        process: ServiceProcess,
        count_loss: Callable[[], object],
    ) -> None:
        self._count_loss = count_loss
        self._name = name
        self._gpu = gpu
        self._selector = selector
        self._log = log
        self._boards = boards
        self._process = process
        # Why the slot cannot be used any more.
        self.gave_up = ""
        self._job: JobProcess | None = None
        # Id of the job, batches and monotonic time of the last loss of the GPU.
        self._lost: tuple[str, tuple[int, ...], float] = "", (), float("-inf")
        self._watchdog = process.watchdogs.begin(f"the loop of {name}")

    def run(self) -> None:
        """Work for one job after another until the worker has to end or the GPU is given up."""
        while not self._process.stopping.is_set() and not self.gave_up:
            self._watchdog.beat()
            job = self._selector.selected()
            if job is None:
                self._process.stopping.wait(SELECTED_S)
            else:
                self._work_for(job)
        self._process.watchdogs.end(self._watchdog)

    @property
    def works(self) -> bool:
        """True while a process works for a job."""
        return self._job is not None

    def complaint(self) -> str:
        """Return why the slot's process is unhealthy; empty if it is healthy."""
        job = self._job
        return "" if job is None else job.complaint()

    def metrics(self) -> Iterable[Family]:
        """Return the metrics of the slot's process."""
        job = self._job
        return () if job is None else job.metrics()

    def _look(self, job: JobRecord) -> JobRecord | None:
        """Return the newest record of a job; None if this slot must leave it."""
        self._watchdog.beat()
        return None if self._process.stopping.is_set() else self._selector.still(job)

    def _work_for(self, job: JobRecord) -> None:
        """Work for one job until the selector withdraws it or its process ends."""
        name: WorkerId | None = None
        try:
            name = await_member_name(
                job, self._name, self._log, lambda: self._look(job) is not None
            )
            if name is None:
                return
            if name != self._name:
                self._process.logger.info("slot_assigned", job=job.spec.name, member=name)
            failure = self._supervise(job, name)
        except Exception as error:  # noqa: BLE001 -- it ends this job here alone
            failure = failure_of(error)
        if failure is None:
            return
        if failure.lost:
            self._count_loss()
        if failure.lost and self._is_second_loss(job, failure):
            self.gave_up = (
                f"GPU {self._gpu} failed twice within {AGAIN_LOST_S / 60:.0f} minutes, on different"
                f" batches, and is not used any more: {failure.reason}"
            )
            self._process.logger.error("gpu_given_up", reason=self.gave_up)
        again_s = self._selector.failed(job.spec.name, failure)
        if failure.reported:
            with closing(self._boards.board(job.id)) as board, suppress(OutsideError):
                # A person must act, or has to know of it.
                board.put_unable(WORKER + (name or self._name), failure.reason, again_s + UNABLE_S)

    def _is_second_loss(self, job: JobRecord, failure: Failure) -> bool:
        """Record a loss of the GPU; True if it is the second one soon, with other batches.

        A batch that makes a kernel fail is sent again, alone. Then the batch is at fault.
        """
        if any(words in failure.reason for words in KERNEL_FAULTS):
            return False
        before, batches, before_s = self._lost
        self._lost = job.id, failure.lost, monotonic()
        recent = monotonic() - before_s < AGAIN_LOST_S
        return recent and not (before == job.id and set(failure.lost) & set(batches))

    def _supervise(self, job: JobRecord, name: str) -> Failure | None:
        """Run the process for a job until it ends, and return why it failed.

        Raises:
            OSError: If the process cannot be started.
        """
        begin = BeginJob(job.spec.name, encode_entry(job).decode(), name, self._gpu)
        self._job = process = JobProcess(begin, self._process.logger)
        self._selector.pinned_by(lambda: process.pinned)
        known, leaving, renews = job, False, False
        try:
            while process.turn(SELECTED_S):
                self._watchdog.beat()
                if leaving:
                    continue
                newest = self._look(job)
                # The task of a held job may have been corrected. Only a new process imports it.
                renews |= newest is not None and known.held and not newest.held
                if newest is None or (renews and not process.pinned):
                    leaving = True
                    process.leave(self._process.settings.leave_s + GRACE_S)
                elif newest is not known:
                    known = newest
                    process.change(encode_entry(known).decode())
        finally:
            self._job = None
            self._selector.pinned_by(None)
            failure = process.end()
        if not leaving:
            return failure or UNASKED
        # A process that was asked to leave has not failed, however it ended.
        if failure is not None:
            self._process.logger.warning(
                "job_left_by_failure", job=job.spec.name, reason=failure.reason
            )
        return None
