"""Measures how soon training continues after losing a worker or the leader, or with a new worker.

    python load/recovery.py                            # all seven; exits 1 if one falls short
    python load/recovery.py --only worker --kills 10   # one of them, shorter
    python load/recovery.py --only thaw                # 2 and 8 workers stand still; 20 minutes

Runs real coordinator and worker processes on real servers: 4 workers, K=4, each gradient a timed
wait of 50 ms, 5 K waiting batches per worker (2 K, the default, if one more worker starts). One
process at a time is disturbed in the middle of a round and works again before the next, or one
more is started and leaves again. All is observed from outside, on the board and in the updates
topic. `--only job` submits jobs to an idle worker instead, see `load.faults.job_starts`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from common.testing.counting import ENTRYPOINT
from load.faults import job_starts, thaws
from load.faults.disturbances import (
    Disturbance,
    ask_to_leave,
    kill_leaders,
    kill_members,
    kill_workers,
    start_workers,
)
from load.faults.drill import Conditions, Drill
from load.harness import report
from load.harness.processor import Neighbours
from load.harness.stack import Servers, servers

_START_S = 60.0
# Time per disturbance that the backlog must last: enough for a new process to load torch on a busy
# machine and to join.
_PER_DISTURBANCE_S = 40.0
_SPREAD = {"median": 0.5, "p95": 0.95, "max": 1.0}
# Measurements without a drill, or with several.
OTHERS = (job_starts.JobStarts.name, thaws.Thaws.name)


class Measurement(NamedTuple):
    """A kind of disturbance, its number of repetitions and its bars."""

    title: str
    # Name of the value that is compared with the bar.
    value: str
    times: int
    disturb: Callable[[Drill, int], Iterator[Disturbance]]
    max_ms: float
    median_ms: float = inf  # at most
    coordinators: int = 1
    # Number of weights, if workers hold the model and add gradients up among themselves. 0 if the
    # model is on the board.
    weights: int = 0
    # Batches that a worker may hold, in units of K. Batches of a new worker wait behind all that
    # others hold.
    waiting_groups: int = Conditions.waiting_groups


def measurements(conditions: Conditions) -> dict[str, Measurement]:
    """Return all measurements by name, with their bars."""
    gradient_ms = 1e3 * conditions.gradient_s
    return {
        "worker": Measurement(
            "a worker is killed in the middle of its gradient",
            *("kill to the update in flight", 30, kill_workers, 1000.0, 300.0),
        ),
        "notice": Measurement(
            "a worker must leave in the middle of a round",
            *("delay of an update until it has left", 10, ask_to_leave, gradient_ms),
        ),
        "start": Measurement(
            "one more worker is started",
            "start of its process to the first update with its gradient",
            *(10, start_workers, 2500.0),
            waiting_groups=2,  # a job's default
        ),
        "takeover": Measurement(
            "the leader is killed, its standby is warm",
            *("kill to the new leader's first trigger", 10, kill_leaders, 300.0),
            coordinators=2,
        ),
        "group": Measurement(
            "a worker is killed while workers sum gradients among themselves, 1 MB",
            *("kill to the update in flight", 30, kill_members, 300.0, 150.0),
            weights=250_000,
        ),
    }


class Measured(NamedTuple):
    """Result of one measurement."""

    name: str
    measurement: Measurement
    conditions: Conditions
    found: list[Disturbance]
    # Number of cores that other processes used meanwhile.
    others: float

    @property
    def values_ms(self) -> list[float]:
        """Values that are compared with the bar, in order of occurrence."""
        return [value for each in self.found for value in each.values_ms]

    @property
    def missed(self) -> list[str]:
        """Descriptions of missed bars."""
        found = report.spread(self.values_ms, _SPREAD)
        limits = {"median": self.measurement.median_ms, "max": self.measurement.max_ms}
        return [
            f"{self.name}: {which} {found[which]:.0f} ms, required {limit:.0f} ms"
            for which, limit in limits.items()
            if found[which] > limit
        ]

    def as_data(self) -> dict[str, Any]:
        """Return the result for the JSON file."""
        return {
            "values_ms": self.values_ms,
            "spread_ms": report.spread(self.values_ms, _SPREAD),
            "missed": self.missed,
            "each": [each._asdict() for each in self.found],
            "conditions": self.conditions.as_data(),
            "others": self.others,
        }

    def draw(self, on: Servers) -> None:
        """Print the result as a table."""
        rows = [
            _row(self.measurement.value, self.values_ms),
            *(
                _row(f"  {part}", [each.parts_ms[part] for each in self.found])
                for part in self.found[0].parts_ms
            ),
        ]
        title = f"{self.name}: {self.measurement.title}, {len(self.found)} times; {on.kafka}"
        report.draw(title, ("ms", "median", "p95", "max"), rows)
        notes = Counter(each.note for each in self.found)
        parts = [f"{note}: {count} times" for note, count in notes.items() if note]
        print("; ".join([*parts, f"other processes used {self.others:.2f} cores meanwhile"]))
        print("each, ms: " + " ".join(f"{value:.0f}" for value in self.values_ms))
        print(report.in_words(self.conditions.as_data()))


def measure(name: str, wanted: Measurement, on: Servers, conditions: Conditions) -> Measured:
    """Run one measurement on a job and processes of its own."""
    seconds = _START_S + wanted.times * _PER_DISTURBANCE_S
    found = list[Disturbance]()
    conditions = replace(conditions, waiting_groups=wanted.waiting_groups)
    if wanted.weights:
        conditions = replace(conditions, weights=wanted.weights, aggregation="replicas")
    drill = Drill(on, name, conditions, seconds=seconds, coordinators=wanted.coordinators)
    with closing(drill):
        neighbours = Neighbours(lambda: [*on.pids.values(), *drill.pids()])
        for each in wanted.disturb(drill, wanted.times):
            found.append(each)
            values = " ".join(f"{value:.0f}" for value in each.values_ms)
            print(f"{name} {len(found)}/{wanted.times}: {values} ms {each.note}", flush=True)
        return Measured(name, wanted, conditions, found, neighbours.cores())


def main() -> int:
    """Measure, report, and check the bars."""
    standard, names = Conditions(), [*measurements(Conditions()), *OTHERS]
    example = "python load/recovery.py --only worker --kills 5 --json recovery.json"
    parser = report.parser(__doc__, example)
    parser.add_argument(
        "--only", choices=names, nargs="+", default=names, help="measurements to run; default: all"
    )
    parser.add_argument(
        "--kills", type=int, help="repeats of each measurement; default: 30, 10, 10, 10, 30, 10, 3"
    )
    parser.add_argument(
        "--workers", type=int, help="number of workers; default: 4, for thaw 2 and then 8"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=standard.group_size,
        help="batches per update (K); default: 4, for thaw the number of workers",
    )
    given = parser.parse_args()
    workers: int = given.workers or standard.workers
    conditions = Conditions(workers, given.group_size)
    machine, found = report.machine(), list[Measured | job_starts.JobStarts | thaws.Thaws]()
    with servers(given.kafka, tasks=(ENTRYPOINT,)) as on:
        for each, wanted in measurements(conditions).items():
            if each in given.only:
                chosen = wanted._replace(times=given.kills or wanted.times)
                found.append(measure(each, chosen, on, conditions))
        if job_starts.JobStarts.name in given.only:
            found.append(job_starts.measure(on, given.kills or job_starts.TIMES))
        if thaws.Thaws.name in given.only:
            fleets = (workers,) if given.workers else thaws.FLEETS
            found.append(thaws.measure(on, conditions, fleets, given.kills or thaws.TIMES))
    for measured in found:
        measured.draw(on)
    result = {
        "kafka": on.kafka,
        "measurements": {measured.name: measured.as_data() for measured in found},
    }
    missed = [words for measured in found for words in measured.missed]
    return report.conclude(given.json, machine, result, missed)


def _row(name: str, values: list[float]) -> tuple[str, ...]:
    return (name, *(f"{value:,.0f}" for value in report.spread(values, _SPREAD).values()))


if __name__ == "__main__":
    sys.exit(report.run(main))
