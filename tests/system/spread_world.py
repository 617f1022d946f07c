"""Workers and jobs in virtual time, to measure the rule of `common.core.job_placement`.

Each worker sees a view that may be seconds old, and follows `next_step`. For comparison, a central
scheduler that sees everything at once carries out the same plan. Jobs have their own arrivals
(Pareto, and a fifth have none), streams stop and resume with a burst, and workers are preempted.

    python -m tests.system.spread_world        # the table of docs/explain/scheduling.md; minutes
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from common.core.job_placement import JobDemand, PlacementView, WorkerPlacement, next_step, plan

STEP_S = 0.5
# Time to leave a group, join another, and get the first status.
JOIN_S = 3.0
SPEED_PER_S = 100.0  # records of one worker
# Mean time between polls of a worker. Each varies by up to a quarter.
LOOK_S = 1.0
# Mean time between preemptions, and between the times at which a stream stops or resumes.
EVENT_S = 300.0
# Time until another machine replaces a preempted one.
BACK_S = 30.0
NAMES = ("job", "moves/worker", "starved_s", "drained_s", "trained_%")


@dataclass(frozen=True)
class Setting:
    """Parameters of a world."""

    workers: int
    jobs: int
    seed: int = 1
    central: bool = False
    seconds: float = 3600.0
    # Share of what all workers could train; 0: no arrivals.
    load: float = 0.7
    backlog: float = 0.0  # records per job at the start
    stale_s: float = 3.0  # age of the oldest view in use
    faults: bool = True  # preemptions
    idle_share: float = 0.2  # jobs without arrivals


class Result(NamedTuple):
    """Results of a run."""

    moves: int
    # Longest time that a job with work had no worker.
    starved_s: float
    # Time at which all records were trained; None if records keep arriving.
    drained_s: float | None
    trained: float  # share of what arrived


@dataclass
class _Worker:
    look_at: float
    since: float
    job: str = ""
    busy_until: float = 0.0  # end of its join
    goes: str = ""


@dataclass
class _Job:
    rate: float
    left: float
    flows: bool = True
    unserved_s: float = 0.0


@dataclass
class World:
    """One world; `run` simulates it to its end."""

    setting: Setting
    now: float = 0.0
    moves: int = 0
    starved_s: float = 0.0
    offered: float = 0.0
    done: float = 0.0
    due: list[float] = field(default_factory=list)  # return times of machines

    def __post_init__(self) -> None:
        """Draw jobs and workers."""
        it, self.random = self.setting, random.Random(self.setting.seed)  # noqa: S311 -- a seed's story
        drawn = [
            0.0
            if it.jobs > 2 and self.random.random() < it.idle_share
            else self.random.paretovariate(1.2)
            for _ in range(it.jobs)
        ]
        total = it.load * it.workers * SPEED_PER_S / max(sum(drawn), 1e-9)
        self.jobs = {f"j{n}": _Job(total * each, it.backlog) for n, each in enumerate(drawn)}
        self.offered = it.backlog * it.jobs
        self.workers = {
            f"w{n}": _Worker(self.random.random() * LOOK_S, 0.0) for n in range(it.workers)
        }
        self.born = it.workers
        self.views = deque[PlacementView](maxlen=int(it.stale_s / STEP_S) + 2)

    def run(self) -> Result:
        """Simulate the world."""
        while self.now < self.setting.seconds:
            self._befall()
            self._train()
            self.views.append(self._view())
            if self.setting.central:
                self._schedule()
            else:
                self._look()
            self.now += STEP_S
            if not self.setting.load and all(job.left < 1 for job in self.jobs.values()):
                return self._result(self.now)
        return self._result(None)

    def _result(self, drained_s: float | None) -> Result:
        return Result(self.moves, self.starved_s, drained_s, self.done / max(self.offered, 1.0))

    def _befall(self) -> None:
        """Stop a stream, or resume it with a minute's burst; preempt or return a machine."""
        if self.random.random() < STEP_S / EVENT_S:
            job = self.random.choice(list(self.jobs.values()))
            job.flows = not job.flows
            if job.flows:
                job.left += 60 * job.rate
                self.offered += 60 * job.rate
        if self.setting.faults and self.random.random() < STEP_S / EVENT_S:
            del self.workers[self.random.choice(list(self.workers))]
            self.due.append(self.now + BACK_S)
        while self.due and self.due[0] <= self.now:
            self.due.pop(0)
            self.workers[f"w{self.born}"] = _Worker(self.now + self.random.random(), self.now)
            self.born += 1

    def _train(self) -> None:
        here = Counter(it.job for it in self.workers.values() if it.busy_until <= self.now)
        for name, job in self.jobs.items():
            arrived = job.rate * STEP_S if job.flows else 0.0
            job.left += arrived
            self.offered += arrived
            trained = min(job.left, here[name] * SPEED_PER_S * STEP_S)
            job.left -= trained
            self.done += trained
            starves = job.left >= 1.0 and not here[name]
            job.unserved_s = job.unserved_s + STEP_S if starves else 0.0
            self.starved_s = max(self.starved_s, job.unserved_s)

    def _view(self) -> PlacementView:
        return PlacementView(
            tuple(
                JobDemand(
                    job=name,
                    backlog=int(job.left),
                    arrivals_per_s=job.rate if job.flows else 0.0,
                    worker_records_per_s=SPEED_PER_S,
                    most_workers=64,
                    unserved_s=job.unserved_s,
                )
                for name, job in self.jobs.items()
            ),
            tuple(
                WorkerPlacement(name, job=it.job, stay_s=self.now - it.since, goes=it.goes)
                for name, it in self.workers.items()
            ),
        )

    def _schedule(self) -> None:
        """Carry out all moves of one plan at once."""
        if self.now % LOOK_S < STEP_S:
            for name, job in plan(self.views[-1]).items():
                self._move(self.workers[name], job)

    def _look(self) -> None:
        for name, worker in self.workers.items():
            if worker.look_at > self.now:
                continue
            worker.look_at = self.now + LOOK_S * self.random.uniform(0.75, 1.25)
            view = self.random.choice(self.views)
            if all(it.worker != name for it in view.workers):
                continue
            me = WorkerPlacement(
                name, job=worker.job, stay_s=self.now - worker.since, goes=worker.goes
            )
            others = tuple(it for it in view.workers if it.worker != name)
            step = next_step(replace(view, workers=(*others, me)), name)
            worker.goes = step.goes
            if step.now:
                self._move(worker, step.goes)

    def _move(self, worker: _Worker, job: str) -> None:
        worker.job, worker.goes, worker.since = job, "", self.now
        worker.busy_until = self.now + JOIN_S
        self.moves += 1


def main() -> None:
    """Print the table."""
    for workers, jobs in ((4, 100), (16, 100)):
        for central in (False, True):
            setting = Setting(workers, jobs, central=central, load=0.0, backlog=200.0, faults=False)
            print(setting, World(setting).run(), flush=True)  # noqa: T201 -- a table
    for workers, jobs in ((4, 10), (16, 50), (16, 10), (64, 10), (64, 200)):
        for central in (False, True):
            setting = Setting(workers, jobs, central=central)
            print(setting, World(setting).run(), flush=True)  # noqa: T201 -- a table


if __name__ == "__main__":
    main()
