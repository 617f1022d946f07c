"""The jobs whose models one process judges: a thread each, and what becomes of those that fail."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from common.connections import open_board
from common.errors import DollError
from common.telemetry import Changes
from services.evaluator.loop import JobEvaluator

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.config import Settings
    from common.job_parts import EvaluationSpec
    from common.jobs.store import JobRecord
    from common.metrics.evaluator import EvaluatorMetrics
    from common.metrics.serving import Pulses
    from common.ports import Board, Log
    from common.telemetry import EventLogger

AGAIN_S = 5.0  # until a job is tried again that could not be judged
END_S = 10.0  # for all jobs to end in order
# A turn is the evaluation of one version at the longest: on a large test set, or a busy machine.
TURN_S = 1800.0


@dataclass(slots=True)
class _Running:
    """One job."""

    evaluator: JobEvaluator
    thread: threading.Thread
    fault: BaseException | None = None
    again_at_s: float = 0.0  # when to begin anew after a fault


class Jobs:
    """The jobs that this process judges.

    Args:
        settings: Of the process.
        log: Kafka.
        metrics: Of the process.
        pulses: Of its loops.
        logger: Of the process.
        only: The only job; None: all that ask for it.
        clock: Seconds that never go back.
        boards: Opens a job's board.
    """

    def __init__(  # noqa: PLR0913 -- what the thread of a job is made of
        self,
        settings: Settings,
        log: Log,
        metrics: EvaluatorMetrics,
        pulses: Pulses,
        logger: EventLogger,
        *,
        only: str | None = None,
        clock: Callable[[], float] = monotonic,
        boards: Callable[[Settings, str], Board] = open_board,
    ) -> None:
        self._settings = settings
        self._source = log
        self._metrics = metrics
        self._pulses = pulses
        self._log = logger
        self._only = only
        self._clock = clock
        self._open_board = boards
        self._told = Changes()
        self._running = dict[str, _Running]()

    def follow(self, jobs: dict[str, JobRecord]) -> None:
        """Begin with new jobs, tell the others what is wanted of them, end those that are gone.

        Raises:
            BaseException: What ended a job's thread, if it was no fault of the job or the world.
        """
        for job, record in jobs.items():
            evaluation = record.spec.evaluation
            if evaluation is None or self._only not in (None, job):
                continue
            running = self._running.get(job)
            if running is not None and running.thread.is_alive():
                running.evaluator.follow(record)
            elif running is not None and running.fault is not None:
                self._after(running.fault, running, record, evaluation)
            elif record.wanted != "stopped" or running is None:
                self._begin(record, evaluation)  # a stopped one may have left its last version
        for job in self._running.keys() - jobs.keys():
            self._running[job].evaluator.follow(None)
            if not self._running[job].thread.is_alive():
                del self._running[job]

    def end(self) -> None:
        """End all threads in order."""
        for running in self._running.values():
            running.evaluator.stop()
        for running in self._running.values():
            running.thread.join(END_S)

    def _after(
        self,
        fault: BaseException,
        running: _Running,
        record: JobRecord,
        evaluation: EvaluationSpec,
    ) -> None:
        """Begin anew, in a while, with a job that cannot go on; the others do not notice."""
        if not isinstance(fault, DollError):
            raise fault  # ours: better dead and replayed than alive and wrong
        job = record.spec.name
        if not running.again_at_s:
            running.again_at_s = self._clock() + AGAIN_S
            if self._told(job, str(fault)):
                self._log.error("job_not_evaluated", job=job, reason=str(fault))
        if self._clock() >= running.again_at_s:
            self._begin(record, evaluation)

    def _begin(self, record: JobRecord, evaluation: EvaluationSpec) -> None:
        job = record.spec.name
        pulse = self._pulses.begin(f"the loop of {job}", TURN_S)
        evaluator = JobEvaluator(
            record,
            evaluation,
            self._settings,
            log=self._source,
            board=self._open_board(self._settings, job),
            metrics=self._metrics,
            pulse=pulse,
            logger=self._log,
        )

        def run() -> None:
            try:
                evaluator.run()
            except BaseException as fault:  # noqa: BLE001 -- raised again in the main thread
                running.fault = fault
            finally:
                self._pulses.end(pulse)

        thread = threading.Thread(target=run, name=job, daemon=True)
        self._running[job] = running = _Running(evaluator, thread)
        thread.start()
