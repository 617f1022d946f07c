"""Submits jobs to an idle fleet, and measures the processor time until each worker's first claim.

The worker is a process that selects jobs, its fork server, and a child for each job. All three
count, from the moment before the job's record is written.
"""

from __future__ import annotations

from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from common.core.messages import Claim
from common.core.spans import Partition
from common.data.codecs import codec_of
from common.embedded.services import stop_all
from common.errors import UnknownTopicError
from common.kafka.names import control_topic
from common.kafka.read import read_decoded
from common.wire import messages as wire
from load.harness import report
from load.harness.counting import counting_spec
from load.harness.processor import Neighbours, used_s
from load.harness.stack import Servers, await_until, check
from load.throughput.backlog import produce

TIMES = 10
MOST_PROCESSOR_S = 0.3
_IDLE_S = 60.0
_CLAIM_S = 60.0
_BATCH_SIZE, _IDS, _PARTITIONS = 8, 64, 2
# Processor time of an idle worker's processes within one check; more means that it still starts.
_IDLE_PROCESSOR_S = 0.02
_SPREAD = {"median": 0.5, "max": 1.0}


class JobStart(NamedTuple):
    """The start of one job."""

    # Time from before the submission to the first claim.
    claimed_s: float
    # Processor time of all processes of the worker meanwhile.
    processor_s: float


class JobStarts:
    """Result of `--only job`."""

    name = "job"

    def __init__(self, found: list[JobStart], others: float) -> None:
        self._found = found
        # Number of cores that other processes used meanwhile.
        self._others = others

    @property
    def missed(self) -> list[str]:
        """Description of a missed bar."""
        found = report.spread([each.processor_s for each in self._found], _SPREAD)["median"]
        if found <= MOST_PROCESSOR_S:
            return []
        return [f"job: median of processor {found:.2f} s, required {MOST_PROCESSOR_S} s"]

    def as_data(self) -> dict[str, Any]:
        """Return the result for the JSON file."""
        return {
            "each": [each._asdict() for each in self._found],
            "missed": self.missed,
            "others": self._others,
        }

    def draw(self, on: Servers) -> None:
        """Print the result as a table."""
        rows = [
            (what, *(f"{value:.3f}" for value in report.spread(values, _SPREAD).values()))
            for what, values in (
                ("to the first claim", [each.claimed_s for each in self._found]),
                ("processor of the worker", [each.processor_s for each in self._found]),
            )
        ]
        title = f"job: a job is submitted to an idle worker, {len(self._found)} times; {on.kafka}"
        report.draw(title, ("s", "median", "max"), rows)
        print(f"other processes used {self._others:.2f} cores meanwhile")


def measure(on: Servers, times: int) -> JobStarts:
    """Submit jobs to an idle worker, one after another.

    Raises:
        NotMeasuredError: If the worker does not become idle, or claims nothing.
    """
    topic, found = "job-records", list[JobStart]()
    specs = [
        counting_spec(
            _IDS, 0.0, name=f"job-{n}", streams=[topic], batch_size=_BATCH_SIZE, group_size=1
        )
        for n in range(times)
    ]
    values = codec_of(specs[0].records).encode({"id": np.arange(_IDS)})
    produce(on.log, topic, _PARTITIONS, values, 100 * _BATCH_SIZE)
    services = [on.start("coordinator", "job-coordinator"), on.start("worker", "job-worker")]
    worker = services[1]
    try:
        neighbours = Neighbours(lambda: [*on.pids.values(), *(each.pid for each in services)])
        for spec in specs:
            _await_idle(worker.pid)
            check(services)
            began_at, before_s = monotonic(), used_s(worker.pid)
            on.submit(spec)
            await_until(lambda: _claimed(on, spec.name), _CLAIM_S, "the first claim")  # noqa: B023 -- awaited in this pass
            found.append(JobStart(monotonic() - began_at, used_s(worker.pid) - before_s))
            on.stop_jobs(spec.name)
        return JobStarts(found, neighbours.cores())
    finally:
        stop_all(services)


def _await_idle(pid: int) -> None:
    """Wait until a worker uses almost no processor time, after its start or its last job."""
    last = [used_s(pid), monotonic()]

    def is_idle() -> bool:
        if monotonic() - last[1] < 1.0:
            return False
        before_s, last[:] = last[0], [used_s(pid), monotonic()]
        return last[0] - before_s <= _IDLE_PROCESSOR_S

    await_until(is_idle, _IDLE_S, "the worker is idle")


def _claimed(on: Servers, job: str) -> bool:
    try:
        if on.log.bounds(Partition(control_topic(job), 0)).end == 0:
            return False
    except UnknownTopicError:
        return False
    claims = read_decoded(on.log, control_topic(job), wire.decode_claim)
    return any(isinstance(claim, Claim) for _, claim in claims)
