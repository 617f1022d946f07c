"""Many jobs with nothing to do on one coordinator: threads, memory, processor, and who leads."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import psutil

from common.embedded.services import stop_all
from common.runtime.connect import open_log
from load.harness.counting import CountingJob, counting_job
from load.harness.processor import Processor
from load.harness.report import Figure, Found
from load.harness.stack import await_until, check, events

if TYPE_CHECKING:
    from load.harness.stack import Servers

_SETTLES_S = 10.0  # after all are led, and after an empty one has started
_MEASURED_S = 30.0
_LONGEST_S = 300.0


def measure_idle(on: Servers, jobs: int = 100) -> Found:
    """Measure a coordinator without jobs, then one that starts among many.

    Raises:
        NotMeasuredError: If something did not run as it should.
    """
    with ExitStack() as stack:
        empty = on.start("coordinator", "idle-empty")
        stack.callback(stop_all, [empty])
        time.sleep(_SETTLES_S)
        check([empty])
        empty_bytes = psutil.Process(empty.pid).memory_info().rss
        empty.stop()
        names = _submit(on, jobs)
        stack.callback(on.stop_jobs, *names)
        began = time.monotonic()
        service = on.start("coordinator", "idle")
        stack.callback(stop_all, [service])
        await_until(
            lambda: len({each["job"] for each in events(service, "leader_elected")}) == jobs,
            _LONGEST_S,
            "all jobs are led",
        )
        led_s = time.monotonic() - began
        time.sleep(_SETTLES_S)
        processor = Processor({"coordinator": service.pid})
        time.sleep(_MEASURED_S)
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


def _submit(on: Servers, jobs: int) -> list[str]:
    with closing(open_log(on.settings, "load")) as log:
        return [
            CountingJob(counting_job(f"idle-{number}", 200, 0.0), on.settings, log, 1).name
            for number in range(jobs)
        ]
