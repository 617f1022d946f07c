"""Refuses a job at its submission for what would hold it later: its task, or its model's size.

A built-in task is judged by arithmetic. A task of somebody's own is built in a process of its own,
`common.jobs.task_check`, with little memory and little time, so that it can do no harm here. A
check that does not end refuses the job: what stops it may stop each worker. A task that is not here
is no reason to refuse a job: others may have it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection
from importlib.util import find_spec
from signal import strsignal
from typing import NamedTuple

import msgspec

from common.config.program import command_of, search_path
from common.errors import GivenError
from common.jobs.job_file import check_options
from common.jobs.spec import UNKNOWN_WORKERS, JobSpec
from common.learning.task_options import MAX_MODEL_MIB, options_of
from common.telemetry.logging import event_logger

MOST_MIB = 4 << 10  # of the other process; a model that fits is judged, whatever builds it
PATIENCE_S = 60.0  # PyTorch and the task's own libraries are loaded, from a cold disk
_MIB = 1 << 20
_BYTES = 4  # of a float32

_log = event_logger(__name__)


class CheckRequest(msgspec.Struct, frozen=True):
    """Which task to build."""

    spec: msgspec.Raw
    allowed: tuple[str, ...]


class CheckReport(msgspec.Struct, frozen=True):
    """What came of it."""

    refused: str = ""  # why no job can have it
    missing: str = ""  # why the task cannot be built here, although others may have it
    unended: str = ""  # why the check came to no end
    model_mb: float = 0.0


_REPORT = msgspec.json.Decoder(CheckReport)


class Unchecked(NamedTuple):
    """Why a task was not checked."""

    why: str
    begun: bool = False  # True if the check began, and came to no end

    def refuse(self) -> None:
        """Refuse the job if its check began.

        Raises:
            GivenError: With what to do.
        """
        if self.begun:
            raise GivenError(
                ("task",),
                f"{self.why}; if the task is right, submit the job with `--unchecked`"
                " (`?unchecked=true`)",
            )


def built_apart(
    spec: JobSpec, allowed: Collection[str], patience_s: float = PATIENCE_S
) -> CheckReport:
    """Build a task in a process of its own."""
    order = CheckRequest(msgspec.Raw(spec.model_dump_json().encode()), tuple(allowed))
    path = search_path(sys.path)  # the task is found there as it is here
    try:
        done = subprocess.run(  # noqa: S603 -- our own command line
            command_of("common.jobs.task_check"),
            input=msgspec.json.encode(order),
            capture_output=True,
            check=True,
            timeout=patience_s,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        return _REPORT.decode(done.stdout)
    except subprocess.TimeoutExpired:
        return CheckReport(unended=f"the check of the task did not end within {patience_s:g} s")
    except subprocess.CalledProcessError as error:
        if error.returncode < 0:  # by SIGKILL, it may have lacked memory
            how = f"was ended by signal {-error.returncode} ({strsignal(-error.returncode)})"
        else:
            how = f"ended early, with status {error.returncode}"
        return CheckReport(unended=f"the check of the task {how}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return CheckReport(unended="the check of the task ended without an answer")


def check_submission(
    spec: JobSpec,
    allowed: Collection[str],
    coordinator_memory_mib: int,
    build: Callable[[JobSpec, Collection[str]], CheckReport] = built_apart,
) -> Unchecked | None:
    """Refuse a job whose task makes no sense, as far as can be seen here. May take some seconds.

    Args:
        spec: The job.
        allowed: Entrypoints that may be imported here (DOLL_TASKS).
        coordinator_memory_mib: For the sums of rounds in flight, and what workers know with
            compression (DOLL_COORDINATOR_MEMORY_MIB).
        build: Builds a task of somebody's own.

    Returns:
        Why the task was not checked; None if it was.

    Raises:
        GivenError: By the field.
    """
    check_options(spec)
    unchecked: Unchecked | None = None
    if spec.task.name:
        parameters = options_of(spec.task.name, spec.task_options).parameters
        size_mb = parameters * _BYTES / _MIB
    else:
        report = _looked_at(spec, allowed, build)
        if report.refused:
            raise GivenError(("task",), report.refused)
        if why := report.missing or report.unended:
            unchecked = Unchecked(why, begun=bool(report.unended))
            _log.info("task_not_checked", job=spec.name, reason=why)
        size_mb = report.model_mb
    if size_mb > MAX_MODEL_MIB:
        raise GivenError(
            ("task",),
            f"the model takes {size_mb:,.0f} MiB, more than {MAX_MODEL_MIB:,}: make it smaller",
        )
    # Beside the model itself: a sum for each round that may be in flight, one to spare, the view.
    views, rounds = int(spec.compression is not None), spec.most_rounds
    needed_mb = (rounds + 2 + views) * size_mb
    if (rounds > 1 or views) and needed_mb > coordinator_memory_mib:
        assumed = (
            f" ({UNKNOWN_WORKERS} workers are counted, as neither staleness nor"
            " provisioning.workers says how many)"
            if spec.provisioning is None
            and any(mode.staleness_per_worker for mode, _ in spec.synchronised.modes(1))
            else ""
        )
        view = ", and what workers know with compression," if views else ""
        raise GivenError(
            ("synchronisation.staleness" if rounds > 1 else "compression",),
            f"{rounds} {'update' if rounds == 1 else 'updates'} in flight{assumed}{view} take"
            f" {needed_mb:,.0f} MiB of a coordinator, more"
            f" than the {coordinator_memory_mib:,} that DOLL_COORDINATOR_MEMORY_MIB allows:"
            f" {'lower it' if rounds > 1 else 'leave it out'}, or allow more",
        )

    return unchecked


def unasked(spec: JobSpec, allowed: Collection[str]) -> CheckReport:  # noqa: ARG001 -- instead of `built_apart`
    """Build nothing, as whoever submits the job wishes."""
    return CheckReport(missing="the request says so")


def _looked_at(
    spec: JobSpec,
    allowed: Collection[str],
    build: Callable[[JobSpec, Collection[str]], CheckReport],
) -> CheckReport:
    """Build a task of somebody's own, if this process may and can."""
    if spec.task.entrypoint not in allowed:
        return CheckReport(missing=f"DOLL_TASKS does not list {spec.task.entrypoint} here")
    if find_spec("torch") is None:
        return CheckReport(missing="PyTorch is not installed here")
    return build(spec, allowed)
