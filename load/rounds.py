"""Measures the protocol's updates per second with gradients that cost nothing, by stage.

    python load/rounds.py     # exits 1 below 200 updates/s with the tiny model and 4 workers

Runs real coordinator and worker processes with K=20 on batches of one record from a prepared
backlog. Each service logs the mean duration of its stages at its end. The rest of a round is
transit: messages on their way through Redis, threads waiting for the processor, decisions.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from common.embedded.services import EmbeddedService, stop_all
from common.redis.board import open_board
from common.testing.costless import ENTRYPOINT
from load.harness import report
from load.harness.counting import costless_spec
from load.harness.processor import Processor
from load.harness.stack import NotMeasuredError, Servers, await_until, check, events, servers
from load.harness.updates import Pace, UpdatesMeter
from load.throughput.backlog import check_left, produce

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec

TOPIC = "records"
# At least one for each worker of the largest scenario.
_PARTITIONS = 20
_GROUP_SIZE = 20  # K
_WAITING = (
    # Batches that a worker may hold: five groups, so that no worker waits for the leader's status.
    100
)
_TINY, _MEGABYTE = 100, 250_000  # float32 weights
_REQUIRED_PER_S = 200.0
# Updates per second for which the backlog suffices.
_PER_S = 1_000
_WARM_S = 1.0
# Time for workers to start, to join a group and to leave, each. They all share the same few
# processors, or a part of them on a busy machine.
_PATIENCE_S = 60.0
_MORE_PATIENCE_S = 10.0  # additional time per worker


class Scenario(NamedTuple):
    """One job to measure."""

    name: str
    weights: int
    workers: int
    required_per_s: float = 0.0
    group_size: int = _GROUP_SIZE

    def job(self) -> JobSpec:
        """Return the job."""
        return costless_spec(
            *(self.name, TOPIC, self.weights),
            batch_size=1,
            group_size=self.group_size,
            waiting_batches=_WAITING,
        )


# Sorted by number of workers. Workers are started once and more join later, because 20 take a while
# to load torch.
SCENARIOS = (
    Scenario("megabyte-2", _MEGABYTE, 2),
    Scenario("tiny-4", _TINY, 4, _REQUIRED_PER_S),
    Scenario("megabyte-8", _MEGABYTE, 8),
    Scenario("megabyte-20", _MEGABYTE, 20),
)

# Sources of the stages of a round: a field of an event, and the service that logs it. A round
# passes each stage once, except for `sum`: once for each order, so up to K times.
STAGES = {
    "indicator": ("indicator", "worker"),
    "trigger": ("PostTrigger", "coordinator"),
    "fetch": ("fetch", "worker"),
    "gradient": ("gradient", "worker"),
    "push": ("push", "worker"),
    "sum": ("AddGradient", "coordinator"),
    "step": ("Apply", "coordinator"),
    "audit": ("AppendAudit", "coordinator"),
    "publish": ("PublishModel", "coordinator"),
}


class Measured(NamedTuple):
    """Result of one scenario."""

    scenario: Scenario
    pace: Pace
    # Mean duration of each stage in a round. `sum` covers all orders of the round.
    stages_ms: dict[str, float]
    cores: dict[str, float]

    @property
    def transit_ms(self) -> float:
        """Time of a round outside its stages.

        Excludes the indicator, which runs beside the round.
        """
        stages = sum(ms for stage, ms in self.stages_ms.items() if stage != "indicator")
        return 1e3 / self.pace.updates_per_s - stages

    def as_data(self) -> dict[str, Any]:
        """Return the result for the JSON file."""
        return {
            **self.scenario._asdict(),
            "updates_per_s": self.pace.updates_per_s,
            "round_ms": 1e3 / self.pace.updates_per_s,
            "stages_ms": self.stages_ms | {"transit": self.transit_ms},
            "cores": self.cores,
        }


class Fleet:
    """A coordinator, and as many workers as the scenarios have needed so far."""

    def __init__(self, on: Servers) -> None:
        self.on = on
        self.coordinator = on.start("coordinator", "coordinator")
        self.workers = list[EmbeddedService]()

    @property
    def services(self) -> list[EmbeddedService]:
        """All services."""
        return [self.coordinator, *self.workers]

    def pids(self) -> dict[str, int]:
        """Return process ids by name."""
        return {service.name: service.pid for service in self.services} | self.on.pids

    def grow(self, workers: int) -> None:
        """Start workers until there are this many. Each takes any job.

        Waits until all have started. Otherwise the first ones would work on processors that the
        others need to start.

        Raises:
            NotMeasuredError: If a worker does not start.
        """
        for number in range(len(self.workers), workers):
            self.workers.append(self.on.start("worker", f"worker-{number}"))
        deadline = time.monotonic() + self.patience_s
        for worker in self.workers:
            await_until(
                partial(_started, worker), deadline - time.monotonic(), f"{worker.name} starts"
            )

    @property
    def patience_s(self) -> float:
        """Maximum time of one operation of all workers."""
        return _PATIENCE_S + _MORE_PATIENCE_S * len(self.workers)

    def stage_times(self, job: str) -> dict[str, list[dict[str, Any]]]:
        """Return the `stage_times` events of a job, by kind of service."""
        kinds = {"coordinator": [self.coordinator], "worker": self.workers}
        return {
            kind: [entry for each in services for entry in events(each, "stage_times", job)]
            for kind, services in kinds.items()
        }

    def close(self) -> None:
        """Stop all services."""
        stop_all(self.services)


def _started(service: EmbeddedService) -> bool:
    check([service])
    return bool(events(service, "service_started"))


def measure(scenario: Scenario, fleet: Fleet, backlog: int, seconds: float) -> Measured:
    """Run one scenario from its job's submission to its end."""
    fleet.grow(scenario.workers)
    job = fleet.on.submit(scenario.job()).spec.name
    with closing(UpdatesMeter(fleet.on.log, job)) as meter:
        try:
            meter.await_workers({worker.name for worker in fleet.workers}, 0, fleet.patience_s)
        except NotMeasuredError:
            check(fleet.services)
            raise
        meter.measure(_WARM_S)
        processor = Processor(fleet.pids())
        pace = meter.measure(seconds)
        cores = processor.cores()
    check_left(open_board(fleet.on.settings, job), backlog)
    fleet.on.stop_jobs(job)

    def all_reported() -> bool:
        reported = fleet.stage_times(job)
        return len(reported["coordinator"]) == 1 and len(reported["worker"]) == 2 * scenario.workers

    await_until(all_reported, fleet.patience_s, f"all services report {job}")
    return Measured(scenario, pace, _stages_ms(fleet.stage_times(job)), _summed(cores))


def _stages_ms(reported: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    found = dict[str, float]()
    for stage, (field, kind) in STAGES.items():
        entries = [entry for entry in reported[kind] if field in entry]
        passes = sum(entry[field] for entry in entries)
        total_ms = sum(entry[field] * entry[f"{field}_ms"] for entry in entries)
        found[stage] = total_ms / passes if passes else 0.0
    [leader] = reported["coordinator"]
    found["sum"] *= leader["AddGradient"] / leader["Apply"]
    return found


def _summed(cores: dict[str, float]) -> dict[str, float]:
    """Add up the cores of all workers."""
    workers = sum(used for name, used in cores.items() if name.startswith("worker-"))
    others = {name: used for name, used in cores.items() if not name.startswith("worker-")}
    return {"workers": workers, **others}


def main() -> int:
    """Measure, report, and check the bars."""
    parser = report.parser(__doc__)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="seconds per scenario; default %(default)g"
    )
    parser.add_argument(
        "--only", choices=names, nargs="+", default=names, help="scenarios to run; default: all"
    )
    given = parser.parse_args()
    machine, found = report.machine(), list[Measured]()
    with servers(given.kafka, tasks=(ENTRYPOINT,)) as on:
        values = [bytes(4)]  # a zero, float32
        backlog = int(_PER_S * (given.seconds + 2 * _WARM_S) * _GROUP_SIZE)
        produce(on.log, TOPIC, _PARTITIONS, values, backlog)
        with closing(Fleet(on)) as fleet:
            for scenario in (each for each in SCENARIOS if each.name in given.only):
                found.append(measure(scenario, fleet, backlog, given.seconds))
                pace = found[-1].pace.updates_per_s
                print(f"{scenario.name}: {pace:,.0f} updates/s", flush=True)
    _print(found, on.kafka, given.seconds)
    short = [
        f"{m.scenario.name}, required {m.scenario.required_per_s:.0f} updates/s"
        for m in found
        if m.pace.updates_per_s < m.scenario.required_per_s
    ]
    result = {"kafka": on.kafka, "scenarios": [measured.as_data() for measured in found]}
    return report.conclude(given.json, machine, result, short)


def _print(found: list[Measured], kafka: str, seconds: float) -> None:
    columns = ("", *(measured.scenario.name for measured in found))
    rows = [
        ("updates/s", *(f"{m.pace.updates_per_s:,.0f}" for m in found)),
        ("round, ms", *(f"{1e3 / m.pace.updates_per_s:.2f}" for m in found)),
        *((f"  {stage}", *(f"{m.stages_ms[stage]:.2f}" for m in found)) for stage in STAGES),
        ("  transit", *(f"{m.transit_ms:.2f}" for m in found)),
        *((f"cores: {name}", *(f"{m.cores[name]:.2f}" for m in found)) for name in found[0].cores),
    ]
    title = f"Rounds of K={_GROUP_SIZE}, gradients of no cost; {kafka}; {seconds:g} s each"
    report.draw(title, columns, rows)


if __name__ == "__main__":
    sys.exit(report.run(main))
