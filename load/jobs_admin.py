"""Measures an admin service beside many jobs: cost and latency. Part of `load/jobs.py`.

Of the jobs, 90 % are paused, 9 % run without records, and 1 % make updates. Their topics and boards
are real, but no coordinators run, so that the service has the machine to itself.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter, sleep
from typing import TYPE_CHECKING

import httpx2
import psutil
import uvloop

from common.api.keys import KeyStore
from common.core.messages import (
    GENESIS,
    Batch,
    BatchReady,
    Lead,
    LeaderStatus,
    UpdateApplied,
    WorkerId,
)
from common.core.spans import Partition, Span
from common.embedded.process import free_port
from common.embedded.services import EmbeddedService, stop_all
from common.errors import UnavailableError
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.kafka.names import control_topic, updates_topic
from common.kafka.port import NewTopic
from common.redis.exchange import open_leader_boards
from common.wire.messages import encode_audit, encode_claim
from load.harness import report
from load.harness.asking import Address, on_schedule
from load.harness.browser import browser, chromium
from load.harness.processor import Processor
from load.harness.report import Figure, Found
from load.harness.stack import NotMeasuredError, Servers, await_until, check

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.jobs.store import JobRecord
    from common.kafka.port import Log
    from common.redis.port import LeaderBoard

STREAM, PARTITIONS = "watched", 4
SPEC = f"""
name: {{name}}
streams: [{STREAM}]
records:
  fields: {{{{features: {{{{dtype: float32, shape: [41]}}}}, label: {{{{dtype: int64}}}}}}}}
task: {{{{name: tabular-mlp, classes: 2}}}}
batch_size: 256
group_size: 1
optimizer: {{{{name: adam, learning_rate: 1.0e-3}}}}
"""
_WRITERS = 8
_UPDATES_PER_S = 2.0  # per job with updates
# Time to settle once the service has read all topics that it follows.
_SETTLES_S = 30.0
_MEASURED_S = 60.0
_READY_S = 300.0
_ASKED_PER_S, _ASKED_S = 20.0, 30.0
_CHANGES = 50
_CHANGE_S = 60.0
_TTL_S = 3600.0
_FIRST_MS = 60_000.0
_LIST = "/v1/jobs"


@dataclass(frozen=True)
class _Work:
    """A job with updates. The benchmark writes what its coordinator and worker would write."""

    record: JobRecord
    board: LeaderBoard

    def lead(self, log: Log) -> None:
        """Write the records and values that do not change."""
        job = self.record.id
        with closing(log.writer()) as writer:
            writer.append(updates_topic(job), encode_audit(Lead(-1, GENESIS, "load", 0)))
            writer.flush(_READY_S)
        self.board.hold_lease("load", _TTL_S)
        self.board.put_leader_status(
            LeaderStatus(0, 0, dict(self.record.first), 0, 0, 1, dict(self.record.first))
        )


def measure_admin(on: Servers, jobs: int) -> Found:
    """Create jobs, then measure the service alone, with a page, with requests and with changes.

    Raises:
        NotMeasuredError: If a part does not run as expected.
    """
    with ExitStack() as stack:
        log = on.log
        records = _submit(log, jobs)
        running = [each for each in records if each.wanted == "running"]
        boards = stack.enter_context(closing(open_leader_boards(on.settings)))
        works = [_Work(record, boards.board(record.id)) for record in running]
        for work in works:
            work.lead(log)
        port = free_port()
        key, _ = KeyStore(log).create("load", "operator")
        address = Address("127.0.0.1", port, key)
        own = on.settings.model_copy(update={"api_port": port})
        service = EmbeddedService("admin", "admin", own, on.logs)
        stack.callback(stop_all, [service])
        ended = threading.Event()
        active = works[: max(1, jobs // 100)]
        going_on = threading.Thread(target=_go_on, args=(log, active, ended), daemon=True)
        going_on.start()
        stack.callback(ended.set)
        await_until(partial(_is_ready, address, len(running)), _READY_S, "all jobs are read")
        sleep(_SETTLES_S)
        alone = _cost(service)
        first_ms, page = _with_page(address, service)
        asked = uvloop.run(
            on_schedule(address, address.request("GET", _LIST), _ASKED_PER_S, _ASKED_S)
        )
        names = [record.spec.name for record in records if record.wanted == "paused"]
        changes_s, statuses = _change(address, names)
        check([service])
    seconds = report.spread(asked.seconds, {"p50": 0.5, "p99": 0.99, "max": 1.0})
    changed = report.spread(changes_s, {"p50": 0.5, "p99": 0.99, "max": 1.0})
    figures = (
        Figure("cores without a page", alone["cores"], 3, most=0.05),
        Figure("MB without a page", alone["mb"], most=250),
        Figure("threads", alone["threads"], most=30),
        Figure("cores with a page", page["cores"], 3, most=0.15),
        Figure("the list's first content, ms", first_ms, most=1000),
        Figure(f"GET {_LIST} at {_ASKED_PER_S:g}/s, p50, ms", 1e3 * seconds["p50"], 1),
        Figure(f"GET {_LIST} at {_ASKED_PER_S:g}/s, p99, ms", 1e3 * seconds["p99"], 1, most=100),
        Figure(f"{_CHANGES} changes, {_WRITERS} at once, p50, s", changed["p50"], 2),
        Figure(f"{_CHANGES} changes, {_WRITERS} at once, p99, s", changed["p99"], 2, most=2),
    )
    faults = []
    if set(asked.statuses) != {200}:
        faults.append(f"answers to GET by status: {dict(asked.statuses)}")
    if not set(statuses) <= {200, 201}:
        faults.append(f"answers to changes by status: {dict(statuses)}")
    data = {
        "jobs": jobs,
        "alone": alone,
        "page": page,
        "first_ms": first_ms,
        "list_s": seconds,
        "list_statuses": dict(asked.statuses),
        "changes_s": changed,
        "change_statuses": dict(statuses),
    }
    return Found(f"An admin service beside {jobs} jobs; {on.kafka}", figures, data, faults)


def _submit(log: Log, jobs: int) -> list[JobRecord]:
    """Submit all jobs, and pause nine of ten."""
    log.create_topics([NewTopic(STREAM, PARTITIONS)])
    running = jobs // 10
    with closing(JobOperations(log)) as job_store, ThreadPoolExecutor(_WRITERS) as threads:
        job_store.read()

        def submit(number: int) -> JobRecord:
            name = f"load-{number:04}"
            record = _again(lambda: job_store.submit(parse_job(SPEC.format(name=name))))
            if number < running:
                return record
            return _again(
                lambda: job_store.patch(name, "prices are high: until Monday", wanted="paused")
            )

        return list(threads.map(submit, range(jobs)))


def _again(act: Callable[[], JobRecord]) -> JobRecord:
    """Call a function, and once more if Kafka was too busy."""
    with suppress(UnavailableError):
        return act()
    return act()


def _go_on(log: Log, works: list[_Work], ended: threading.Event) -> None:
    """Write claims and updates until the event is set."""
    writer, version = log.writer(), 0
    while not ended.wait(1 / _UPDATES_PER_S):
        version += 1
        for work in works:
            job, first = work.record.id, work.record.first
            begin = first[Partition(STREAM, 0)] + 256 * (version - 1)
            spans = (Span(STREAM, 0, begin, begin + 256),)
            claim = BatchReady(WorkerId("w1"), spans, 256, ())
            writer.append(control_topic(job), encode_claim(claim))
            batch = Batch(version - 1, WorkerId("w1"), spans, 256)
            made = UpdateApplied(0, version, (batch,), 256, 0.4, {"accuracy": 0.9})
            writer.append(updates_topic(job), encode_audit(made))
        writer.flush(_READY_S)


def _is_ready(address: Address, running: int) -> bool:
    """True if the service has read all running jobs."""
    with suppress(httpx2.HTTPError):
        answer = httpx2.get(
            f"http://{address.host}:{address.port}/v1/jobs?wanted=running&limit=500",
            headers={"Authorization": f"Bearer {address.key}"},
            timeout=_CHANGE_S,
        )
        if answer.status_code == 200:
            found = [job for job in answer.json()["jobs"] if job["version"] is not None]
            return len(found) == running
    return False


def _cost(service: EmbeddedService) -> dict[str, float]:
    """Measure the resources that the service uses during `_MEASURED_S`."""
    processor = Processor({"admin": service.pid})
    sleep(_MEASURED_S)
    process = psutil.Process(service.pid)
    return {
        "cores": processor.cores()["admin"],
        "mb": process.memory_info().rss / 1e6,
        "threads": process.num_threads(),
    }


def _with_page(address: Address, service: EmbeddedService) -> tuple[float, dict[str, float]]:
    """Open the list in a browser. Returns the ms to its first row, and the service's cost.

    Raises:
        NotMeasuredError: If there is no Chromium.
    """
    executable = chromium()
    if executable is None:
        raise NotMeasuredError("chromium was not found on PATH")
    with browser(executable) as opened:
        context = opened.new_context(
            viewport={"width": 1366, "height": 768},
            http_credentials={"username": "load", "password": address.key},
        )
        url = f"http://{address.host}:{address.port}/"
        # The first visit starts the browser and fills its cache.
        for last in (False, True):
            page = context.new_page()
            began = perf_counter()
            page.goto(url, wait_until="commit")
            page.locator(".jobs tbody tr").first.wait_for(timeout=_FIRST_MS)
            first_ms = 1e3 * (perf_counter() - began)
            if not last:
                page.close()
        return first_ms, _cost(service)


def _change(address: Address, names: list[str]) -> tuple[list[float], Counter[int]]:
    """Submit and change jobs, several at once. Returns seconds and statuses."""
    statuses = Counter[int]()

    async def change(client: httpx2.AsyncClient, turns: asyncio.Semaphore, number: int) -> float:
        async with turns:
            began = perf_counter()
            if number % 2:
                body = json.dumps({"wanted": "paused", "reason": f"change {number}"})
                answer = await client.patch(f"/v1/jobs/{names[number]}", content=body)
            else:
                name = f"more-{number:04}"
                answer = await client.post(
                    "/v1/jobs",
                    content=SPEC.format(name=name),
                    headers={"Content-Type": "application/yaml"},
                )
            statuses[answer.status_code] += 1
            return perf_counter() - began

    async def all_changes() -> list[float]:
        headers = {"Authorization": f"Bearer {address.key}", "Content-Type": "application/json"}
        base = f"http://{address.host}:{address.port}"
        turns = asyncio.Semaphore(_WRITERS)
        async with httpx2.AsyncClient(base_url=base, headers=headers, timeout=_CHANGE_S) as client:
            return await asyncio.gather(
                *(change(client, turns, number) for number in range(_CHANGES))
            )

    return asyncio.run(all_changes()), statuses
