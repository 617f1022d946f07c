"""The process that does everything for one job: consumer, gradients, heartbeat and presence.

The worker starts it as `python -m services.worker.job_process`, usually as a fork. It ends with its
job, so nothing that a task does to its process reaches another job.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch

from common.core.messages import WorkerId
from common.jobs.store import JobRecord, decode_entry
from common.kafka.stream import open_stream_log
from common.learning.errors import GpuLostError
from common.redis.boards import open_boards
from common.runtime.service import EXIT_FAILED, EXIT_OK, run
from common.runtime.traces import open_tracer
from common.storage.port import open_blobs
from common.storage.store import CheckpointStore
from common.telemetry.metrics.registry import ProcessMetrics
from services.worker.channel import (
    BeginJob,
    JobChanged,
    LeaveJob,
    LeftJob,
    Pinned,
    ProcessBeat,
    ProcessEnd,
    Scrape,
    Scraped,
    ToProcess,
    failure_of,
)
from services.worker.loop import JobWorker, Observers
from services.worker.memory import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.config.settings import Settings
    from common.jobs.spec import JobSpec
    from common.redis.port import Boards
    from common.runtime.service import ServiceProcess
    from services.worker.group import GroupAccess

# Interval of reports about the health of this process.
BEAT_S = 1.0


def main() -> int:
    """Work for the job that the worker names, and return the exit status."""
    keep_freed_memory()
    channel = ProcessEnd(socket.socket(fileno=int(sys.argv[-1])))
    messages = list[ToProcess]()
    try:
        while not messages:
            messages = channel.receive()
    except EOFError:
        return EXIT_FAILED
    begin, *others = messages
    if not isinstance(begin, BeginJob):
        raise TypeError("the worker has to name the job first")
    # Torch reads this variable when it first uses a GPU. It then sees only the slot's GPU, or none.
    os.environ["CUDA_VISIBLE_DEVICES"] = begin.gpu
    return run("worker", begin.member, partial(_work, channel, begin, others), called="worker")


def _work(
    channel: ProcessEnd, begin: BeginJob, others: list[ToProcess], process: ServiceProcess
) -> int:
    """Work for the job until the worker says otherwise, and report how it ended.

    Args:
        channel: This process's end of the channel.
        begin: The first message.
        others: Messages that arrived with it.
        process: This process.
    """
    link = _Link(channel, begin, process)
    link.receive(others)
    try:
        _work_for(link, begin, process)
    except GpuLostError as error:
        channel.send(failure_of(error, error.batches))
        return EXIT_FAILED
    except BaseException as error:  # noqa: BLE001 -- whatever it is, it ends this process alone
        channel.send(failure_of(error))
        return EXIT_FAILED
    channel.send(LeftJob())
    return EXIT_OK


class _Link:
    """The worker as this process sees it. Its own thread receives and answers messages."""

    def __init__(self, channel: ProcessEnd, begin: BeginJob, process: ServiceProcess) -> None:
        self._name = begin.job.encode()
        self.job = self._record(begin.record)
        self.metrics = ProcessMetrics("worker")
        # Returns True if the held state keeps the worker at its job.
        self.is_pinned: Callable[[], bool] = lambda: False
        self._channel = channel
        self._process = process
        self._pinned = False
        threading.Thread(target=self._receive_all, name="worker", daemon=True).start()

    def look(self) -> JobSpec | None:
        """Return the newest specification; None if this process must leave the job."""
        if (pinned := self.is_pinned()) != self._pinned:
            self._pinned = pinned
            self._channel.send(Pinned(pinned))
        return None if self._process.stopping.is_set() else self.job.spec

    def receive(self, messages: list[ToProcess]) -> None:
        """Act on messages of the worker."""
        for message in messages:
            match message:
                case JobChanged(record):
                    self.job = self._record(record)
                case LeaveJob():
                    self._process.stopping.set()
                case Scrape():
                    self._channel.send(Scraped(self.metrics.packed()))

    def _receive_all(self) -> None:
        while True:
            try:
                messages = self._channel.receive(BEAT_S)
            except EOFError:
                # The worker has ended. On Linux, the kernel has already killed this process.
                os._exit(EXIT_FAILED)
            self._channel.send(ProcessBeat(self._process.watchdogs.complaint()))
            try:
                self.receive(messages)
            # A task may have broken what this thread needs. It still has to see the order to leave.
            except Exception:
                self._process.logger.exception("message_failed")

    def _record(self, entry: str) -> JobRecord:
        record = decode_entry(self._name, entry.encode())
        if not isinstance(record, JobRecord):
            raise TypeError("the worker has to send the record of a job")
        return record


def _work_for(link: _Link, begin: BeginJob, process: ServiceProcess) -> None:
    job, settings = link.job, process.settings
    torch.set_num_threads(settings.threads or 1)
    # A slot with a GPU must not fall back to the CPU.
    settings = settings.model_copy(update={"gpus": begin.gpu or "none"})
    watchdog = process.watchdogs.begin("the main loop")
    with ExitStack() as stack:
        tracer = open_tracer(settings, process.service, process.name)
        stack.callback(tracer.close)
        log = open_stream_log(settings, process.name)
        stack.callback(log.close)
        boards = open_boards(settings)
        stack.callback(boards.close)
        board = boards.board(job.id)
        stack.callback(board.close)
        observers = Observers(link.metrics, tracer, process.watchdogs, watchdog)
        member = WorkerId(begin.member)
        parts = member, job, settings, log, board, observers, process.logger
        worker = JobWorker(*parts, access=partial(_access, job, settings, boards))
        link.is_pinned = lambda: worker.pinned
        worker.run(link.look)


def _access(job: JobRecord, settings: Settings, boards: Boards, spec: JobSpec) -> GroupAccess:
    """Return access to the other members of a job whose members hold the weights.

    Args:
        job: The job.
        settings: Settings of the process.
        boards: Provides the rendezvous of members.
        spec: The newest specification.

    Raises:
        UserError: If the settings name no object storage, or no address that others can reach.
    """
    from common.collectives.torch_group import TorchGroups, advertised  # noqa: PLC0415 -- few need it
    from services.worker.group import LEAVE_S, GroupAccess  # noqa: PLC0415 -- as above

    origin, among = job.origin, spec.aggregation
    transport = "gloo" if among is None else among.transport
    return GroupAccess(
        TorchGroups(advertised(settings), boards.rendezvous(job.id), transport),
        CheckpointStore(open_blobs(settings), job.id),
        "" if origin is None else origin.sha256,
        min(LEAVE_S, settings.leave_s),
    )


if __name__ == "__main__":
    sys.exit(main())
