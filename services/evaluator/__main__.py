"""Start an evaluator: `python -m services.evaluator --help`, or `doll evaluator`."""

from __future__ import annotations

import gc

if __name__ == "__main__":  # before it imports the rest: see `keep_imports`
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

NICE = 10  # beside whoever trains on the same machine: it comes second
# A turn is the evaluation of one version at the longest: minutes, on a large test set or a busy
# machine.
SLOW_S = 60.0
HANGS_S = 1800.0


def main() -> int:
    """Run until told to end; returns the exit status."""
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
    """What tells an experiment tracker of a job; not loaded where no job wants it."""
    from common.tracking.mlflow import open_tracking  # noqa: PLC0415 -- likewise
    from services.evaluator.tracker import JobTracker, TrackerProcess  # noqa: PLC0415 -- see above

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


def tracks(only: str | None, record: JobRecord, new: bool) -> bool:  # noqa: FBT001 -- as `Jobs` asks it
    """Whether to tell an experiment tracker of a job: see `begins`."""
    return record.spec.tracking is not None and _is_of(only, record, new=new)


def begins(only: str | None, record: JobRecord, new: bool) -> bool:  # noqa: FBT001 -- as `Jobs` asks it
    """Whether to judge a job: a stopped one too, at first, for it may have left its last version.

    Args:
        only: The only job; None: all that ask for it.
        record: The job.
        new: Whether this process has not had it yet.
    """
    return record.spec.evaluation is not None and _is_of(only, record, new=new)


def _is_of(only: str | None, record: JobRecord, *, new: bool) -> bool:
    return only in (None, record.spec.name) and (new or record.wanted != "stopped")


if __name__ == "__main__":
    sys.exit(main())
