"""How fast the admin service answers, while the job asked about goes on and event streams are open.

It runs as a process, on an embedded Kafka and Redis.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by path: this checkout's packages

from common.api.keys import KeyStore
from common.core.messages import Batch, Lead, ModelId, UpdateApplied, WorkerId
from common.core.spans import Span
from common.embedded.process import free_port
from common.embedded.services import Service
from common.embedded.stack import EmbeddedStack
from common.jobs.spec import parse_job
from common.jobs.store import JobStore
from common.kafka.names import updates_topic
from common.ports.servers import Log, NewTopic, Writer
from common.runtime.connect import open_log
from common.wire.messages import encode_audit
from load.harness import report
from load.harness.asking import Address, Asked, Link, connect, on_schedule, open_streams
from load.harness.processor import Processor
from load.harness.report import Figure
from load.harness.stack import NotMeasuredError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


JOB, STREAM = "asked", "made-up"
HISTORY = 2000  # updates that the job has made before
_SPEC = f"""
name: {JOB}
streams: [{STREAM}]
records:
  fields: {{features: {{dtype: float32, shape: [41]}}, label: {{dtype: int64}}}}
task: {{name: tabular-mlp, classes: 2}}
batch_size: 256
group_size: 20
optimizer: {{name: adam, learning_rate: 1.0e-3}}
stop: {{updates: 1000000, deadline_s: 86400}}
"""
UPDATES_PER_S = 5.0  # and goes on to make
BATCHES, SAMPLES = 20, 256
PLANNED_WORKERS = 10_000
WARM_UP_S = 1.0
START_S = 30.0
_LOOK_S = 0.1
REQUIRED_P99_MS, REQUIRED_PLAN_MS = 50.0, 100.0


class Found(NamedTuple):
    """What was measured."""

    asked: Asked
    streams: Sequence[int]  # updates that each open stream was told
    plans: Sequence[float]  # seconds of each
    cores: dict[str, float]


def main() -> int:
    """Measure, print a table; returns the exit status."""
    example = "python load/admin.py --seconds 30 --streams 200 --json out/admin.json"
    parser = report.parser(__doc__, example, kafka=False)
    parser.add_argument("--rate", type=float, default=500.0, metavar="N", help="per second (500)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of that (10)")
    parser.add_argument("--streams", type=int, default=100, metavar="N", help="of events (100)")
    parser.add_argument("--plans", type=int, default=50, metavar="N", help="one by one (50)")
    arguments = parser.parse_args()
    return _told(arguments, _measured(arguments))


def _measured(arguments: argparse.Namespace) -> Found:
    """Start everything, measure, end everything.

    Raises:
        NotMeasuredError: If something did not run as it should.
    """
    with ExitStack() as parts:
        stack = parts.enter_context(EmbeddedStack())
        logs = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="doll-admin-")))
        log = open_log(stack.settings, "benchmark")
        key, _ = KeyStore(log).create("benchmark", "operator")
        writer = _make_up(log)
        port = free_port()
        address = Address("127.0.0.1", port, key)
        own = stack.settings.model_copy(update={"api_port": port, "api_requests_per_s": 1e5})
        service = Service("admin", "a1", own, logs)
        parts.callback(service.stop)
        ended = threading.Event()
        parts.callback(ended.set)
        going_on = threading.Thread(target=_go_on, args=(writer, ended), daemon=True)
        going_on.start()
        try:
            found = uvloop.run(_asked(address, arguments, service.pid))
        except (OSError, TimeoutError) as error:
            raise NotMeasuredError(f"{error!r}; {service.last_words()}") from error
        ended.set()
        going_on.join()
        return found


async def _asked(address: Address, arguments: argparse.Namespace, pid: int) -> Found:
    show = address.request("GET", f"/v1/jobs/{JOB}")
    link = await _ready(address, show)
    events = await open_streams(address, f"/v1/jobs/{JOB}/events", arguments.streams)
    await on_schedule(address, show, arguments.rate, WARM_UP_S)
    before = [each.updates for each in events]
    processor = Processor({"service": pid})
    asked = await on_schedule(address, show, arguments.rate, arguments.seconds)
    cores = processor.cores()
    told = [each.updates - count for each, count in zip(events, before, strict=True)]
    if any(each.lost for each in events):
        raise NotMeasuredError("a stream of events was closed")
    for each in events:
        each.close()
    return Found(asked, told, await _plans(link, address, arguments.plans), cores)


async def _ready(address: Address, show: bytes) -> Link:
    """A connection, once the service listens and has read the job's history.

    Raises:
        NotMeasuredError: If it has not in time.
    """
    answered, deadline = "nothing listens", monotonic() + START_S
    while monotonic() < deadline:
        with suppress(ConnectionRefusedError):
            link = await connect(address)
            answer = await link.ask(show)
            if answer.status == 200 and json.loads(answer.body)["progress"]["version"] >= HISTORY:
                return link
            answered = f"{answer.status} {answer.body!r}"
            link.writer.close()
        await asyncio.sleep(_LOOK_S)
    raise NotMeasuredError(f"the job is not shown within {START_S:g} s: {answered}")


async def _plans(link: Link, address: Address, count: int) -> list[float]:
    """Seconds of each plan, one after the other."""
    rates = np.random.default_rng(1).uniform(1, 250, PLANNED_WORKERS)
    updates = 10_000
    body = {
        "rates_per_s": rates.round(3).tolist(),
        "group_size": BATCHES,
        "batch_size": SAMPLES,
        "updates": updates,
        "deadline_s": 1.05 * updates * BATCHES * SAMPLES / float(rates.sum()),
        "availability": 0.9,
        "spot_usd_per_hour": 0.158,
        "on_demand_usd_per_hour": 0.286,
    }
    request = address.request("POST", "/v1/provisioning/plan", json.dumps(body).encode())
    await link.ask(request)  # what it needs is imported
    answers = [await link.ask(request) for _ in range(count)]
    wrong = [answer for answer in answers if answer.status != 200]
    if wrong:
        raise NotMeasuredError(f"a plan was answered with {wrong[0].status} {wrong[0].body!r}")
    return [answer.seconds for answer in answers]


def _make_up(log: Log) -> Writer:
    """Submit a job that no coordinator leads, and write its history; gives what goes on with it.

    Raises:
        NotMeasuredError: If Kafka does not take it.
    """
    log.create_topics([NewTopic(STREAM, 4)])
    JobStore(log).submit(parse_job(_SPEC))
    writer = log.writer()
    lead = Lead(-1, ModelId(-1, 0), "benchmark")
    for record in (lead, *map(_update, range(1, HISTORY + 1))):
        writer.append(updates_topic(JOB), encode_audit(record))
    if not writer.flush(START_S):
        raise NotMeasuredError("Kafka does not take the history of the job")
    return writer


def _go_on(writer: Writer, ended: threading.Event) -> None:
    """Make updates until the end."""
    for version in count(HISTORY + 1):
        if ended.wait(1 / UPDATES_PER_S):
            return
        writer.append(updates_topic(JOB), encode_audit(_update(version)))
        writer.flush(START_S)


def _update(version: int) -> UpdateApplied:
    end, batches = version * SAMPLES, []
    for number in range(BATCHES):
        span = Span(STREAM, number % 4, end - SAMPLES, end)
        batches.append(Batch(number, WorkerId(f"w{number % 8}"), (span,), SAMPLES))
    made, metrics = (0, version, tuple(batches), BATCHES * SAMPLES), {"accuracy": 0.9}
    return UpdateApplied(*made, 0.4, metrics, gradient_s=0.02)


def _told(arguments: argparse.Namespace, found: Found) -> int:
    """Print what was measured; returns the exit status."""
    seconds = report.spread(found.asked.seconds, {"p50": 0.5, "p99": 0.99, "max": 1.0})
    rate = f"{arguments.rate:g} requests/s on a job for {arguments.seconds:g} s"
    least = min(found.streams, default=0)
    streams = f"{len(found.streams)} open streams of events, updates sent to each"
    plans = f"a plan for {PLANNED_WORKERS:,} workers, p50 of {len(found.plans)}, ms"
    figures = (
        Figure(f"{rate}, p50, ms", 1e3 * seconds["p50"], 2),
        Figure(f"{rate}, p99, ms", 1e3 * seconds["p99"], 2, REQUIRED_P99_MS),
        Figure(f"{rate}, slowest, ms", 1e3 * seconds["max"], 2),
        Figure(f"{streams}, fewest", least),
        Figure(f"{streams}, most", max(found.streams, default=0)),
        Figure("cores of the service meanwhile", found.cores["service"], 2),
        Figure(plans, 1e3 * float(np.median(found.plans)), 1, REQUIRED_PLAN_MS),
    )
    statuses = dict(found.asked.statuses)
    faults = [f"answers by status: {statuses}"] if set(statuses) != {200} else []
    faults += ["a stream of events received no update"] if least == 0 else []
    data = {
        "seconds": seconds,
        "statuses": statuses,
        "updates_of_streams": list(found.streams),
        "plan_seconds": report.spread(found.plans),
        "cores": found.cores,
    }
    result = report.Found("admin service", figures, data, faults)
    result.draw()
    print(
        f"answers by status: {statuses}; connections: {found.asked.connections};"
        f" the sender was late by {1e3 * found.asked.late_s:.1f} ms at most"
    )
    return report.conclude(arguments.json, report.machine(), data, result.short())


if __name__ == "__main__":
    sys.exit(report.run(main))
