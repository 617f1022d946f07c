"""Start a worker: `python -m services.worker --help`, or `doll worker`.

This process selects jobs, and starts a process for each job and slot, see `services.worker.slots`.
It never loads PyTorch, whose import takes most of the time until the first gradient. The fork
server loads it, while this process learns from Kafka and Redis which job it is for.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    # A process with threads cannot be forked, and OpenBLAS starts some when NumPy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import random
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

from common.config.program import command_line
from common.errors import UnavailableError, UserError
from common.jobs.spec import BUILT_IN_TASKS
from common.jobs.store import JobStore
from common.notices.preemption import open_notices
from common.runtime import fork_server
from common.runtime.service import run
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.metrics.worker import lost_gpus
from common.telemetry.outages import Outage, leave_log_to
from services.worker.gpus import find_slots
from services.worker.notices import NoticeWatch
from services.worker.selection import JOBS_S, JobSelector, SelectingWorker
from services.worker.slots import Slot
from services.worker.torch_build import torch_build

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from common.kafka.port import Log
    from common.runtime.service import ServiceProcess
    from common.telemetry.metrics.serving import Watchdog

# Pause between checks of the slots' threads.
LOOK_S = 0.2


def main() -> int:
    """Run until asked to stop, and return the exit status."""
    arguments = command_line("worker")
    request = fork_server.begin("worker")
    if request is not None:
        request.run()
    return run("worker", arguments.name, partial(_work, arguments.job or ""), called="worker")


def _work(only: str, process: ServiceProcess) -> None:
    """Work for jobs until asked to leave.

    Raises:
        UserError: If a setting makes no sense.
        BaseException: The fault of a thread without which no job can be found or worked for.
    """
    settings = process.settings
    notices = open_notices(settings)
    # An existing notice keeps the worker from joining.
    if notices is not None:
        NoticeWatch(notices, process.stopping, process.logger).start()
    metrics, watchdog = ProcessMetrics("worker"), process.watchdogs.begin("the main loop")
    process.serve_metrics(metrics)
    # Without a GPU that it is configured for, the worker can serve no job.
    found = find_slots(settings, os.environ, process.logger, torch_build)
    process.logger.info("service_started", gpus=[f"{gpu.name} {gpu.uuid}" for gpu in found])
    log = _opened(process, watchdog)
    if log is None:
        return
    from common.redis.boards import open_boards  # noqa: PLC0415 -- a wrong command needs none

    boards, job_store = open_boards(settings), JobStore(log)
    roster = boards.roster()
    gpus = [gpu.uuid for gpu in found] or [""]
    slots, lost = dict[Slot, JobSelector](), lost_gpus(metrics)
    for number, gpu in enumerate(gpus):
        name = process.name if len(gpus) == 1 else f"{process.name}.{number}"
        selector = JobSelector(
            SelectingWorker(name, only, (*BUILT_IN_TASKS, *settings.tasks)),
            *(job_store, roster, metrics, process.logger, random.SystemRandom().random),
        )
        count = lost.labels(gpu).inc if gpu else int
        slot = Slot(name, gpu, selector, log, boards, process, count)
        metrics.include(slot.metrics)
        process.watchdogs.watch(slot)
        slots[slot] = selector
    # The process of a job uses the same servers.
    leave_log_to(lambda: any(slot.works for slot in slots))
    faults = list[BaseException]()
    threads = [
        threading.Thread(target=_guarded, args=(work, process.stopping, faults), daemon=True)
        for work in (partial(_select, slots, process.stopping), *(slot.run for slot in slots))
    ]
    for thread in threads:
        thread.start()
    while not process.stopping.wait(LOOK_S):
        watchdog.beat()
        if all(slot.gave_up for slot in slots):
            faults.append(UserError("; ".join(slot.gave_up for slot in slots)))
            process.stopping.set()
    for thread in threads:
        while thread.is_alive():
            watchdog.beat()
            thread.join(LOOK_S)
    job_store.close()
    boards.close()
    log.close()
    if faults:
        raise faults[0]


def _select(slots: Mapping[Slot, JobSelector], leaving: threading.Event) -> None:
    """Select jobs for all slots."""
    left = dict(slots)
    while left and not leaving.is_set():
        for number, (slot, selector) in enumerate(list(left.items())):
            if slot.gave_up:
                selector.close()
                del left[slot]
            else:
                # One wait is enough for all slots.
                selector.turn(waits=number == 0)
    for selector in left.values():
        selector.close()


def _guarded(
    work: Callable[[], None], leaving: threading.Event, faults: list[BaseException]
) -> None:
    """Run a loop. Its fault makes the worker leave."""
    try:
        work()
    except BaseException as fault:  # noqa: BLE001 -- raised again in the main thread
        faults.append(fault)
        leaving.set()


def _opened(process: ServiceProcess, watchdog: Watchdog) -> Log | None:
    """Open Kafka; return None if the process must stop first."""
    from common.kafka.opening import open_log  # noqa: PLC0415 -- a wrong command needs none

    outage = Outage(process.logger, "kafka")
    while not process.stopping.is_set():
        watchdog.beat()
        try:
            log = open_log(process.settings, process.name)
        except UnavailableError as error:
            outage.met(error)
            process.stopping.wait(JOBS_S)
        else:
            outage.over()
            return log
    return None


if __name__ == "__main__":
    sys.exit(main())
