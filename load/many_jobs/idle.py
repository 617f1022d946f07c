"""Many jobs with nothing to do on one coordinator: threads, memory, processor, and who leads."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.embedded.services import Service, stop_all
from common.jobs.store import JobBook
from common.runtime.connect import open_log
from load.harness import report
from load.harness.counting import CountingJob, counting_job
from load.harness.processor import Processor
from load.harness.stack import await_until, check

if TYPE_CHECKING:
    from load.harness.stack import Servers

THREADS, MORE_MB, CORES, LED_S = 60, 150.0, 0.1, 15.0
_SETTLES_S = 10.0  # after all are led, and after an empty one has started
_MEASURED_S = 30.0
_LONGEST_S = 300.0


@dataclass(frozen=True)
class IdleFound:
    """What was measured."""

    jobs: int
    threads: int
    more_mb: float  # resident, above a coordinator without jobs
    files: int
    cores: float
    led_s: float  # until the last one was led, from the start of the process
    led_again: int  # leaderships beyond one of each job
    stepped_down: int
    failed: int  # jobs' parts that an exception ended

    def short(self) -> list[str]:
        """What falls short of what is required."""
        found: list[tuple[str, float, float]] = [
            ("threads", self.threads, THREADS),
            ("MB above an empty one", self.more_mb, MORE_MB),
            ("cores", self.cores, CORES),
            ("seconds until all are led", self.led_s, LED_S),
            ("jobs led twice", self.led_again, 0),
            ("leaders that stepped down", self.stepped_down, 0),
            ("failures", self.failed, 0),
        ]
        return [
            f"{what}: {value:g}, at most {most:g}" for what, value, most in found if value > most
        ]

    def as_data(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)

    def print(self, kafka: str) -> None:
        """For people."""
        rows = [
            ("threads", f"{self.threads}"),
            ("MB above an empty coordinator", f"{self.more_mb:.0f}"),
            ("open files", f"{self.files}"),
            ("cores busy", f"{self.cores:.3f}"),
            ("all are led after, s", f"{self.led_s:.1f}"),
            ("led again", f"{self.led_again}"),
            ("leaders that stepped down", f"{self.stepped_down}"),
            ("failures", f"{self.failed}"),
        ]
        report.draw(f"{self.jobs} idle jobs on one coordinator; {kafka}", ("", ""), rows)


def measure_idle(on: Servers, folder: Path, jobs: int = 100) -> IdleFound:
    """Measure a coordinator without jobs, then one that starts among many.

    Raises:
        NotMeasuredError: If something did not run as it should.
    """
    with ExitStack() as stack:
        empty = Service("coordinator", "idle-empty", on.settings, folder)
        stack.callback(stop_all, [empty])
        time.sleep(_SETTLES_S)
        check([empty])
        empty_mb = _resident_mb(empty.pid)
        empty.stop()
        names = _submit(on, jobs)
        stack.callback(_stop, on, names)
        began = time.monotonic()
        service = Service("coordinator", "idle", on.settings, folder)
        stack.callback(stop_all, [service])
        await_until(
            lambda: len(set(_jobs_of("leads", service.log))) == jobs, _LONGEST_S, "all jobs are led"
        )
        led_s = time.monotonic() - began
        time.sleep(_SETTLES_S)
        processor = Processor({"coordinator": service.pid})
        time.sleep(_MEASURED_S)
        cores = processor.cores()["coordinator"]
        check([service])
        return IdleFound(
            jobs,
            threads=len(list(Path(f"/proc/{service.pid}/task").iterdir())),
            more_mb=_resident_mb(service.pid) - empty_mb,
            files=len(list(Path(f"/proc/{service.pid}/fd").iterdir())),
            cores=cores,
            led_s=led_s,
            led_again=len(_jobs_of("leads", service.log)) - jobs,
            stepped_down=len(_jobs_of("steps_down", service.log)),
            failed=len(_jobs_of("job_failed", service.log)),
        )


def _submit(on: Servers, jobs: int) -> list[str]:
    with closing(open_log(on.settings, "load")) as log:
        return [
            CountingJob(counting_job(f"idle-{number}", 200, 0.0), on.settings, log, 1).name
            for number in range(jobs)
        ]


def _stop(on: Servers, names: list[str]) -> None:
    with closing(open_log(on.settings, "load")) as log, closing(JobBook(log)) as book:
        for name in names:
            book.want(name, "stopped", "measured")


def _jobs_of(event: str, log: Path) -> list[str]:
    """The jobs of which a service told this."""
    lines = log.read_text().splitlines() if log.exists() else []
    told = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [each["job"] for each in told if each["event"] == event]


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6
