"""Start an evaluator: `python -m services.evaluator --help`, or `doll evaluator`."""

from __future__ import annotations

import gc

# This comes before the other imports: see `keep_imports`.
if __name__ == "__main__":
    gc.disable()

import os
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import torch

from common.config.program import command_line
from common.redis.boards import open_boards
from common.runtime.jobs import OpenedKafka, follow_jobs
from common.runtime.service import ServiceProcess, run
from common.storage.port import open_blobs
from common.telemetry.metrics.registry import ProcessMetrics
from services.evaluator.evaluation_runner import EvaluatorProcess
from services.evaluator.loop import JobEvaluator

if TYPE_CHECKING:
    from common.jobs.store import JobRecord
    from common.kafka.port import Log
    from common.redis.port import Boards
    from common.runtime.jobs import MakePart, Wanted
    from common.runtime.supervisor import PreviousFault
    from services.evaluator.tracker import JobTracker

# Lower priority than training on the same machine.
NICE = 10
# A turn takes at most the evaluation of one version: minutes on a large test set or a busy machine.
SLOW_S = 60.0
HANGS_S = 1800.0


def main() -> int:
    """Run until a signal ends the process; return its exit status."""
    arguments = command_line("evaluator")
    return run("evaluator", arguments.name, partial(_evaluate, arguments.job))


def _evaluate(job: str | None, process: ServiceProcess) -> None:
    os.nice(NICE)
    torch.set_num_threads(process.settings.threads or 1)
    metrics = ProcessMetrics("evaluator")

    def parts(opened: OpenedKafka) -> MakePart:
        settings, logger = process.settings, process.logger
        shared = EvaluatorProcess(settings, opened.log, boards.board, metrics, logger)
        return partial(JobEvaluator, shared)

    def trackers(opened: OpenedKafka) -> MakePart:
        return partial(_tracker, process, metrics, opened.log, boards)

    with closing(open_boards(process.settings)) as boards:
        follow_jobs(
            *(process, metrics, parts, partial(begins, job)),
            beside=(trackers, partial(tracks, job)),
            slow_s=SLOW_S,
            hangs_s=HANGS_S,
        )


def _tracker(
    process: ServiceProcess,
    metrics: ProcessMetrics,
    log: Log,
    boards: Boards,
    wanted: Wanted,
    wake: Callable[[], None],
    fault: PreviousFault | None,
) -> JobTracker:
    """Return a job's tracker; its modules are imported only if a job needs them."""
    from common.tracking.mlflow import open_tracking  # noqa: PLC0415 -- only if a job is tracked
    from services.evaluator.tracker import JobTracker, TrackerProcess  # noqa: PLC0415 -- only if a job is tracked

    settings = process.settings
    shared = TrackerProcess(
        settings=settings,
        name=process.name,
        log=log,
        board=boards.board,
        open_tracking=partial(open_tracking, settings),
        open_blobs=partial(open_blobs, settings),
        metrics=metrics,
        logger=process.logger,
    )
    return JobTracker(shared, wanted, wake, fault)


def tracks(only: str | None, record: JobRecord, new: bool) -> bool:  # noqa: FBT001 -- as `Jobs` calls it
    """Return True if a job should be tracked; see `begins`."""
    return record.spec.tracking is not None and _is_of(only, record, new=new)


def begins(only: str | None, record: JobRecord, new: bool) -> bool:  # noqa: FBT001 -- as `Jobs` calls it
    """Return True if a job should be evaluated.

    A stopped job is evaluated once, too, because its last version may not be evaluated yet.

    Args:
        only: Optional. Name of the only job to evaluate. If unset, all jobs with `evaluation`.
        record: The job.
        new: True if this process has not evaluated the job yet.
    """
    return record.spec.evaluation is not None and _is_of(only, record, new=new)


def _is_of(only: str | None, record: JobRecord, *, new: bool) -> bool:
    return only in (None, record.spec.name) and (new or record.wanted != "stopped")


if __name__ == "__main__":
    sys.exit(main())
