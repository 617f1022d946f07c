"""Measures many jobs on one coordinator: their cost, and how workers spread over them.

python load/jobs.py --only idle       # exits 1 if a hundred idle jobs cost too much
python load/jobs.py --only spread     # exits 1 if a small job waits too long for a worker
python load/jobs.py --only submit     # exits 1 if `doll job submit` is slow beside many jobs
python load/jobs.py --only admin      # exits 1 if an admin service is costly beside 1,000 jobs
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from time import monotonic, sleep

import numpy as np
import psutil

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from typing import TYPE_CHECKING

from common.data.codecs import codec_of
from common.embedded.services import environment_of, stop_all
from common.errors import UnavailableError
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.kafka.port import Log, NewTopic
from common.redis.boards import open_boards
from common.testing.counting import ENTRYPOINT
from load.harness import report
from load.harness.counting import CountingJob, counting_job
from load.harness.processor import Processor
from load.harness.report import Figure, Found
from load.harness.stack import NotMeasuredError, Servers, await_until, check, events, servers
from load.jobs_admin import PARTITIONS, SPEC, STREAM, measure_admin
from services.cli.local import open_page

if TYPE_CHECKING:
    from common.redis.port import Board

# `--only spread`. Records are per job.
WORKERS, RECORDS = 4, 200
# Time to settle once all jobs are led, and once a coordinator without jobs has started.
_SETTLES_S = 10.0
_MEASURED_S = 30.0
_IDLE_LED_S = 300.0
# Time until all jobs are drained, counted from their last record.
DRAINED_S = 240.0
# Longest time that a job with records waits for a worker. It is a bar only if every job can have
# its turn in this time.
WAITS_S = 120.0
_SPREAD_LED_S = 180.0
_FLUSH_S = 60.0
_LONGEST_S = 900.0
# Bar of `doll job submit` for the last of all jobs.
SUBMITTED_S = 0.2
# The last jobs are submitted by processes of their own.
_COMMANDS = 5
# Program that times `doll job submit`. It does not count the start, which all commands have in
# common: the interpreter, the libraries, the command line's parser.
_COMMAND = """\
import sys
from time import monotonic, sleep
import typer.main
import services.cli.system.api
from common.runtime.connect import connect
from services.cli.app import app
from services.cli.system.outside import Ways
command = typer.main.get_command(app)
began = monotonic()
command(["job", "submit", *sys.argv[1:]], obj=Ways(connect), standalone_mode=False)
print(f"took {monotonic() - began}")
"""


def measure_idle(on: Servers, jobs: int) -> Found:
    """Measure a coordinator without jobs, then one that starts with many.

    Raises:
        NotMeasuredError: If a part does not run as expected.
    """
    with ExitStack() as stack:
        empty = on.start("coordinator", "idle-empty")
        stack.callback(stop_all, [empty])
        sleep(_SETTLES_S)
        check([empty])
        empty_bytes = psutil.Process(empty.pid).memory_info().rss
        empty.stop()
        specs = [counting_job(f"idle-{number}", 200, 0.0) for number in range(jobs)]
        names = [CountingJob(spec, on.settings, on.log, 1).name for spec in specs]
        stack.callback(on.stop_jobs, *names)
        began = monotonic()
        service = on.start("coordinator", "idle")
        stack.callback(stop_all, [service])
        await_until(
            lambda: len({each["job"] for each in events(service, "leader_elected")}) == jobs,
            _IDLE_LED_S,
            "all jobs are led",
        )
        led_s = monotonic() - began
        sleep(_SETTLES_S)
        processor = Processor({"coordinator": service.pid})
        sleep(_MEASURED_S)
        cores = processor.cores()["coordinator"]
        check([service])
        process = psutil.Process(service.pid)
        data = {
            "jobs": jobs,
            "threads": process.num_threads(),
            "more_mb": (process.memory_info().rss - empty_bytes) / 1e6,
            "files": process.num_fds(),
            "cores": cores,
            "led_s": led_s,
            "led_again": len(events(service, "leader_elected")) - jobs,
            "stepped_down": len(events(service, "leadership_lost")),
            "failed": len(events(service, "job_failed")),
        }
    figures = (
        Figure("threads", data["threads"], most=60),
        Figure("MB above an empty coordinator", data["more_mb"], most=150),
        Figure("open files", data["files"]),
        Figure("cores busy", data["cores"], 3, most=0.1),
        Figure("all are led after, s", data["led_s"], 1, most=15),
        Figure("led again", data["led_again"], most=0),
        Figure("leaders that stepped down", data["stepped_down"], most=0),
        Figure("jobs' parts that an exception ended", data["failed"], most=0),
    )
    return Found(f"{jobs} idle jobs on one coordinator; {on.kafka}", figures, data)


@dataclass
class _Watched:
    """A job, observed through its leader's status."""

    job: CountingJob
    board: Board
    drained_at: float | None = None
    alone_since: float | None = None
    waited_s: float = 0.0

    def look(self, now: float) -> None:
        """Record whether the job has workers and whether it is drained."""
        try:
            leader_status = self.board.get_leader_status()
        except UnavailableError:
            return
        if leader_status is None or self.drained_at is not None:
            return
        first = self.job.record.first
        claimed = sum(leader_status.claimed[place] - begin for place, begin in first.items())
        if claimed == RECORDS and leader_status.waiting == 0:
            self.drained_at = now
        if self.drained_at is not None or leader_status.live:
            self.alone_since = None
        elif self.alone_since is None:
            self.alone_since = now
        else:
            self.waited_s = max(self.waited_s, now - self.alone_since)


def measure_spread(on: Servers, jobs: int) -> Found:
    """Submit jobs, let a coordinator lead them all, then produce each job's records.

    Raises:
        NotMeasuredError: If a part does not run as expected.
    """
    with ExitStack() as stack:
        boards = stack.enter_context(closing(open_boards(on.settings)))
        specs = [counting_job(f"spread-{number}", RECORDS, 0.0) for number in range(jobs)]
        watched = [
            _Watched(CountingJob(spec, on.settings, on.log, 1), boards.board(spec.name))
            for spec in specs
        ]
        services = on.start_all(WORKERS)
        stack.callback(stop_all, services)
        stack.callback(on.stop_jobs, *(each.job.name for each in watched))
        await_until(
            lambda: all(each.board.get_leader_status() is not None for each in watched),
            _SPREAD_LED_S,
            "a leader of every job",
        )
        _produce(on.log, watched)
        since = monotonic()

        def drained() -> bool:
            now = monotonic()
            for each in watched:
                each.look(now)
            return all(each.drained_at is not None for each in watched)

        await_until(drained, _LONGEST_S, "all jobs are drained")
        check(services)
        took_s = [each.drained_at - since for each in watched if each.drained_at is not None]
        moves = sum(len(events(service, "job_selected")) for service in services)
        proofs = [each.job.audit() for each in watched]
    flaws = [flaw for proof in proofs for flaw in map(str, proof.flaws)]
    flaws += [
        f"{each.job.name}: {proof.trained} of {RECORDS} trained"
        for each, proof in zip(watched, proofs, strict=True)
        if proof.trained != RECORDS
    ]
    data = {
        "jobs": jobs,
        "records": RECORDS,
        "workers": WORKERS,
        "drained_s": max(took_s),  # counted from the last record
        # Time until the first job is drained.
        "first_s": min(took_s),
        "waited_s": max(each.waited_s for each in watched),
        # Mean time of a worker at one job.
        "turn_s": max(took_s) * WORKERS / max(moves, 1),
        "moves": moves,  # all workers
    }
    fits = jobs * data["turn_s"] / WORKERS <= WAITS_S
    figures = (
        Figure("all jobs drained, s", data["drained_s"], 1, DRAINED_S),
        Figure("the first one, s", data["first_s"], 1),
        Figure("longest wait for a worker, s", data["waited_s"], 1, WAITS_S if fits else inf),
        Figure("a worker's turn at a job, mean s", data["turn_s"], 1),
        Figure("moves", moves),
    )
    title = f"{jobs} jobs of {RECORDS} records on {WORKERS} workers; {on.kafka}"
    faults = [f"the audit says: {flaw}" for flaw in flaws]
    return Found(title, figures, {**data, "flaws": flaws}, faults)


def _produce(log: Log, watched: list[_Watched]) -> None:
    with closing(log.writer()) as writer:
        for each in watched:
            spec = each.job.record.spec
            values = codec_of(spec.records).encode({"id": np.arange(RECORDS)})
            for number, value in enumerate(values):
                writer.append(spec.streams[number % len(spec.streams)], value)
            writer.poll()
        if not writer.flush(_FLUSH_S):
            raise NotMeasuredError(f"Kafka did not accept all records in {_FLUSH_S:g} s")


def measure_submit(on: Servers, jobs: int) -> Found:
    """Submit most jobs from this process, and the last ones with the command.

    Raises:
        NotMeasuredError: If a command failed.
    """
    here_s = list[float]()
    on.log.create_topics([NewTopic(STREAM, PARTITIONS)])
    with closing(JobOperations(on.log)) as job_store:
        for number in range(jobs - _COMMANDS):
            began = monotonic()
            job_store.submit(parse_job(SPEC.format(name=f"submit-{number}")))
            here_s.append(monotonic() - began)
    page = open_page(on.settings, on.logs, "commands", "operator")
    try:
        page.await_ready(lambda: False)
        settings = on.settings.model_copy(update={"api": page.url, "api_key": page.key})
        environment = environment_of(settings)
        last = range(jobs - _COMMANDS, jobs)
        commands_s = [_submitted(environment, on.logs, f"submit-{number}") for number in last]
    finally:
        stop_all([page.service])
    figures = (
        Figure("`doll job submit`, median, s", median(commands_s), 3, SUBMITTED_S),
        Figure("`doll job submit`, longest, s", max(commands_s), 3),
        Figure("one process for many, median, s", median(here_s), 3),
        Figure("one process for many, its last, s", here_s[-1], 3),
    )
    data = {"jobs": jobs, "here_s": here_s, "commands_s": commands_s}
    return Found(f"The last of {jobs} jobs submitted; {on.kafka}", figures, data)


def _submitted(environment: dict[str, str], folder: Path, name: str) -> float:
    """Return the seconds that the command took to submit a job."""
    file = folder / f"{name}.yaml"
    file.write_text(SPEC.format(name=name))
    command = (sys.executable, "-c", _COMMAND, str(file))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 -- our own command line
    *_, last = done.stdout.splitlines() or [""]
    if done.returncode or not last.startswith("took "):
        raise NotMeasuredError(f"`doll job submit` failed: {done.stderr[-500:]}")
    return float(last.removeprefix("took "))


PARTS: dict[str, Callable[[Servers, int], report.Found]] = {
    "idle": measure_idle,
    "spread": measure_spread,
    "submit": measure_submit,
    "admin": measure_admin,
}
_JOBS, _ADMIN_JOBS = 100, 1000


def main() -> int:
    """Measure, report, and check the bars."""
    parser = report.parser(__doc__)
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts to run; default: all"
    )
    parser.add_argument(
        "--jobs", type=int, help=f"number of jobs; default: {_JOBS}, for admin {_ADMIN_JOBS}"
    )
    parser.add_argument(
        "--logs", type=Path, help="folder for the services' logs; default: a temporary one"
    )
    given = parser.parse_args()
    machine, found = report.machine(), dict[str, report.Found]()
    for part in given.only:
        with servers(given.kafka, tasks=(ENTRYPOINT,), logs=given.logs) as on:
            jobs = given.jobs or (_ADMIN_JOBS if part == "admin" else _JOBS)
            found[part] = PARTS[part](on, jobs)
        found[part].draw()
    short = [f"{part}: {what}" for part, one in found.items() for what in one.short()]
    result = {part: one.data for part, one in found.items()}
    return report.conclude(given.json, machine, result, short)


if __name__ == "__main__":
    sys.exit(report.run(main))
