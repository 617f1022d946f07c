"""Start a worker: `python -m services.worker --help`, or `doll worker`.

Loading PyTorch takes most of the time until the first gradient. So it loads while another thread
learns from Kafka and Redis which job this worker is for.
"""

from __future__ import annotations

import gc

# This comes before the other imports: see `keep_imports`.
if __name__ == "__main__":
    gc.disable()

import random
import sys
import threading
from contextlib import closing, suppress
from functools import cache, partial
from typing import TYPE_CHECKING

from common.config.program import command_line
from common.core.liveness import WORKER
from common.core.messages import WorkerId
from common.errors import OutsideError, UnavailableError, UserError
from common.jobs.spec import BUILT_IN_TASKS
from common.jobs.store import JobStore
from common.notices.ec2 import open_notices
from common.runtime.service import keep_imports, run
from common.runtime.traces import open_tracer
from common.storage.port import open_blobs
from common.storage.store import CheckpointStore
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.outages import Outage
from services.worker.member_name import await_member_name
from services.worker.memory import keep_freed_memory
from services.worker.notices import NoticeWatch
from services.worker.selection import JOBS_S, JobSelector, SelectingWorker

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord
    from common.kafka.port import StreamLog
    from common.redis.port import Boards
    from common.runtime.service import ServiceProcess
    from common.telemetry.metrics.serving import Watchdog
    from services.worker.group import GroupAccess
    from services.worker.loop import Observers

# Extra lifetime of a reported failure, so that it lasts until the next attempt has ended.
UNABLE_S = 60.0
# Pause between checks for a selected job.
SELECTED_S = 0.05


def main() -> int:
    """Run until asked to stop, and return the exit status."""
    arguments = command_line("worker")
    return run("worker", arguments.name, partial(_work, arguments.job or ""), called="worker")


def _work(only: str, process: ServiceProcess) -> None:
    """Work for one job after another until asked to leave.

    Raises:
        UserError: If a setting makes no sense.
        BaseException: The fault of the thread that selects jobs. Without it, no job can be found.
    """
    settings = process.settings
    keep_freed_memory()
    notices = open_notices(settings)
    # An existing notice keeps the worker from joining.
    if notices is not None:
        NoticeWatch(notices, process.stopping, process.logger).start()
    metrics, watchdog = ProcessMetrics("worker"), process.watchdogs.begin("the main loop")
    process.serve_metrics(metrics)
    with closing(open_tracer(settings, process.service, process.name)) as tracer:
        # Without the GPU that it is configured for, the worker can serve no job.
        if settings.gpus not in ("all", "none"):
            from common.learning.devices import resolve_device  # noqa: PLC0415 -- see above

            resolve_device("cuda", process.logger.warning)
        process.logger.info("service_started")
        log = _opened(process, watchdog)
        if log is None:
            return
        from common.redis.boards import open_boards  # noqa: PLC0415 -- a wrong command needs none

        boards = open_boards(settings)
        selector = JobSelector(
            SelectingWorker(process.name, only, (*BUILT_IN_TASKS, *settings.tasks)),
            JobStore(log),
            boards.roster(),
            metrics,
            process.logger,
            random.SystemRandom().random,
        )
        faults = list[BaseException]()
        thread = threading.Thread(
            target=_select, args=(selector, process.stopping, faults), name="jobs", daemon=True
        )
        thread.start()
        observers = _loaded(settings.threads or 1)(metrics, tracer, process.watchdogs, watchdog)
        while not process.stopping.is_set():
            watchdog.beat()
            job = selector.selected()
            if job is None:
                process.stopping.wait(SELECTED_S)
            else:
                _work_for(job, selector, log, boards, process, observers)
        thread.join()
        boards.close()
        log.close()
        if faults:
            raise faults[0]


@cache
def _loaded(threads: int) -> type[Observers]:
    """Load everything that computes gradients, with this many threads. Later calls are instant."""
    gc.disable()
    import torch  # noqa: PLC0415 -- see above

    from services.worker.loop import Observers  # noqa: PLC0415 -- as above

    keep_imports()
    torch.set_num_threads(threads)
    return Observers


def _select(selector: JobSelector, leaving: threading.Event, faults: list[BaseException]) -> None:
    try:
        while not leaving.is_set():
            selector.turn()
        selector.close()
    except BaseException as fault:  # noqa: BLE001 -- raised again in the main thread
        faults.append(fault)
        leaving.set()


def _work_for(
    job: JobRecord,
    selector: JobSelector,
    log: StreamLog,
    boards: Boards,
    process: ServiceProcess,
    observers: Observers,
) -> None:
    """Work for one job until the selector withdraws it or an error ends it."""
    from services.worker.loop import JobWorker  # noqa: PLC0415 -- see above

    def look() -> JobSpec | None:
        return None if process.stopping.is_set() else selector.still(job)

    def stays() -> bool:
        observers.watchdog.beat()
        return look() is not None

    board = boards.board(job.id)
    settings, logger = process.settings, process.logger
    name = WorkerId(process.name)
    try:
        member = await_member_name(job, process.name, log, stays)
        if member is None:
            return
        if member != name:
            name = member
            logger.info("slot_assigned", job=job.spec.name, member=name)
        parts = name, job, settings, log, board, observers, logger
        worker = JobWorker(*parts, access=partial(_access, job, settings, boards))
        selector.pinned_by(lambda: worker.pinned)
        worker.run(look)
    except BaseException as error:  # noqa: BLE001 -- whatever it is, it ends this job here alone
        # Any error ends this job here, and no other.
        again_s = selector.failed(job.spec.name, error)
        # A person must fix this error, so it is reported.
        if isinstance(error, UserError):
            with suppress(OutsideError):
                board.put_unable(WORKER + name, str(error), again_s + UNABLE_S)
    finally:
        selector.pinned_by(None)
        board.close()
        # Frees the model now: reference cycles could keep it for minutes.
        gc.collect()


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
    from common.collectives.torch_group import TorchGroups, advertised  # noqa: PLC0415 -- see above
    from services.worker.group import LEAVE_S, GroupAccess  # noqa: PLC0415 -- as above

    origin, among = job.origin, spec.aggregation
    transport = "gloo" if among is None else among.transport
    return GroupAccess(
        TorchGroups(advertised(settings), boards.rendezvous(job.id), transport),
        CheckpointStore(open_blobs(settings), job.id),
        "" if origin is None else origin.sha256,
        min(LEAVE_S, settings.leave_s),
    )


def _opened(process: ServiceProcess, watchdog: Watchdog) -> StreamLog | None:
    """Open Kafka; return None if the process must stop first."""
    from common.kafka.stream import open_stream_log  # noqa: PLC0415 -- a wrong command needs none

    outage = Outage(process.logger, "kafka")
    while not process.stopping.is_set():
        watchdog.beat()
        try:
            log = open_stream_log(process.settings, process.name)
        except UnavailableError as error:
            outage.met(error)
            # Use the wait to load PyTorch.
            _loaded(process.settings.threads or 1)
            process.stopping.wait(JOBS_S)
        else:
            outage.over()
            return log
    return None


if __name__ == "__main__":
    sys.exit(main())
