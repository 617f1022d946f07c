"""Check of a job at submission, for faults that would hold it later: its task, or the model's size.

A built-in task is checked by arithmetic. A custom task is built in a separate process,
`common.jobs.task_check`, with limited memory and time, so that it can do no harm here. If the check
does not complete, the job is refused, because the same fault may stop each worker. A task that is
not installed here is no reason to refuse the job, because other processes may have it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection
from importlib.util import find_spec
from signal import strsignal
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from common.config.program import command_of, search_path
from common.errors import GivenError
from common.jobs.job_file import check_options
from common.jobs.spec import UNKNOWN_WORKERS, JobSpec
from common.learning.task_options import MAX_MODEL_MIB, options_of
from common.telemetry.logging import event_logger

# Memory limit of the other process: enough for any model that is not too large itself.
MOST_MIB = 4 << 10
# Time limit of a check, which loads PyTorch and the task's own libraries from a cold disk.
PATIENCE_S = 60.0
_MIB = 1 << 20
# Size of a float32.
_BYTES = 4

if TYPE_CHECKING:
    from common.config.settings import Settings

_log = event_logger(__name__)


class CheckRequest(msgspec.Struct, frozen=True):
    """Request to build a task."""

    spec: msgspec.Raw
    allowed: tuple[str, ...]


class CheckReport(msgspec.Struct, frozen=True):
    """Result of building a task."""

    # Why no job can use the task.
    refused: str = ""
    # Fields that are wrong then.
    fields: tuple[str, ...] = ("task",)
    # Why the task cannot be built here. Other processes may have it.
    missing: str = ""
    # Why the check did not complete.
    unended: str = ""
    model_mb: float = 0.0


_REPORT = msgspec.json.Decoder(CheckReport)


class Unchecked(NamedTuple):
    """Reason that a task was not checked."""

    why: str
    # True if the check began but did not complete.
    begun: bool = False

    def refuse(self) -> None:
        """Refuse the job if its check began.

        Raises:
            GivenError: If it began. The message says what to do.
        """
        if self.begun:
            raise GivenError(
                ("task",),
                f"{self.why}; if the task is correct, submit the job with `--unchecked`"
                " (`?unchecked=true`)",
            )


class Checked(NamedTuple):
    """Result of the check of a job that was not refused."""

    # Size of the model's weights. 0 if the task was not checked.
    model_mb: float
    # None if the task was checked.
    unchecked: Unchecked | None


def built_apart(
    spec: JobSpec, allowed: Collection[str], patience_s: float = PATIENCE_S
) -> CheckReport:
    """Build a task in a separate process."""
    order = CheckRequest(msgspec.Raw(spec.model_dump_json().encode()), tuple(allowed))
    # The other process gets the same path, so that it finds the task, too.
    path = search_path(sys.path)
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
        # SIGKILL may mean that memory ran out.
        if error.returncode < 0:
            how = f"was killed by signal {-error.returncode} ({strsignal(-error.returncode)})"
        else:
            how = f"ended early with status {error.returncode}"
        return CheckReport(unended=f"the check of the task {how}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return CheckReport(unended="the check of the task ended without a result")


def check_submission(
    spec: JobSpec,
    allowed: Collection[str],
    coordinator_memory_mib: int,
    build: Callable[[JobSpec, Collection[str]], CheckReport] = built_apart,
) -> Checked:
    """Refuse a job if its task is found to be invalid. May take some seconds.

    Args:
        spec: The job.
        allowed: Entrypoints that may be imported here (DOLL_TASKS).
        coordinator_memory_mib: Memory for sums of rounds in flight and, with compression, for the
            tracked weights of workers (DOLL_COORDINATOR_MEMORY_MIB).
        build: Builds the task, if it is custom or the optimizer has groups of parameters.

    Raises:
        GivenError: If the task is invalid, with the field's path.
    """
    check_options(spec)
    unchecked: Unchecked | None = None
    size_mb = 0.0
    if spec.task.name:
        parameters = options_of(spec.task.name, spec.task_options).parameters
        size_mb = parameters * _BYTES / _MIB
    # Only the network itself shows the names of its parameters.
    if spec.task.own or spec.optimizer.groups:
        report = _looked_at(spec, allowed, build)
        if report.refused:
            raise GivenError(report.fields, report.refused)
        if why := report.missing or report.unended:
            unchecked = Unchecked(why, begun=bool(report.unended))
            _log.info("task_not_checked", job=spec.name, reason=why)
        size_mb = max(size_mb, report.model_mb)
    if size_mb > MAX_MODEL_MIB:
        raise GivenError(
            ("task",),
            f"the model takes {size_mb:,.0f} MiB, more than {MAX_MODEL_MIB:,}; make it smaller",
        )
    # The model itself, a sum for each round that may be in flight, a spare sum and, with
    # compression, the tracked weights of workers.
    views, rounds = int(spec.compression is not None), spec.most_rounds
    needed_mb = (rounds + 2 + views) * size_mb
    if (rounds > 1 or views) and needed_mb > coordinator_memory_mib:
        assumed = (
            f" (assuming {UNKNOWN_WORKERS} workers, because neither staleness nor"
            " provisioning.workers is set)"
            if spec.provisioning is None
            and any(mode.staleness_per_worker for mode, _ in spec.synchronised.modes(1))
            else ""
        )
        view = " and the tracked weights of workers (compression)" if views else ""
        raise GivenError(
            ("synchronisation.staleness" if rounds > 1 else "compression",),
            f"{rounds} {'update' if rounds == 1 else 'updates'} in flight{assumed}{view} take"
            f" {needed_mb:,.0f} MiB of a coordinator's memory, more"
            f" than the {coordinator_memory_mib:,} that DOLL_COORDINATOR_MEMORY_MIB allows;"
            f" {'lower it' if rounds > 1 else 'remove it'}, or allow more",
        )

    return Checked(size_mb, unchecked)


def check_init(spec: JobSpec, settings: Settings) -> None:
    """Refuse a job if its pretrained weights are at a place that is not listed.

    Raises:
        GivenError: If the setting DOLL_INIT_HOSTS does not list the place.
    """
    if spec.init is None or (spec.init.source.startswith("s3://") and not settings.blobs):
        return
    if why := spec.init.why_unlisted(settings.init_hosts, settings.blobs):
        raise GivenError(("init.from",), why)


def unasked(spec: JobSpec, allowed: Collection[str]) -> CheckReport:  # noqa: ARG001 -- instead of `built_apart`
    """Build nothing, because the request says so."""
    return CheckReport(missing="the request asks for no check")


def _looked_at(
    spec: JobSpec,
    allowed: Collection[str],
    build: Callable[[JobSpec, Collection[str]], CheckReport],
) -> CheckReport:
    """Build the task, if this process may and can."""
    if spec.task.own and spec.task.own not in allowed:
        return CheckReport(missing=f"DOLL_TASKS of this process does not list {spec.task.own}")
    if find_spec("torch") is None:
        return CheckReport(missing="PyTorch is not installed here")
    return build(spec, allowed)
