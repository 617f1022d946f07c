"""Many small jobs on few workers: how soon all are drained, and how long one waits for a worker."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from common.embedded.services import stop_all
from common.errors import UnavailableError
from common.jobs.build import codec_of
from common.runtime.connect import open_boards, open_log
from load.harness.counting import CountingJob, counting_job
from load.harness.report import Figure, Found
from load.harness.stack import NotMeasuredError, await_until, check, events

if TYPE_CHECKING:
    from common.ports.servers import Board, Log
    from load.harness.stack import Servers

DRAINED_S = 240.0  # all jobs, after their records came
WAITS_S = 120.0  # a job with work and nobody for it, where that is time enough for everybody's turn
_LED_S = 180.0
_FLUSH_S = 60.0
_LONGEST_S = 900.0


@dataclass
class _Watched:
    """A job, seen by what its leader says of it."""

    job: CountingJob
    board: Board
    records: int
    drained_at: float | None = None
    alone_since: float | None = None
    waited_s: float = 0.0

    def look(self, now: float) -> None:
        """See who works for it, and whether that is done."""
        try:
            leader_status = self.board.get_leader_status()
        except UnavailableError:
            return
        if leader_status is None or self.drained_at is not None:
            return
        first = self.job.record.first
        claimed = sum(leader_status.claimed[place] - begin for place, begin in first.items())
        if claimed == self.records and leader_status.waiting == 0:
            self.drained_at = now
        if self.drained_at is not None or leader_status.live:
            self.alone_since = None
        elif self.alone_since is None:
            self.alone_since = now
        else:
            self.waited_s = max(self.waited_s, now - self.alone_since)


def measure_spread(on: Servers, jobs: int = 100, records: int = 200, workers: int = 4) -> Found:
    """Submit jobs, let a coordinator lead all, then give each its records.

    Raises:
        NotMeasuredError: If something did not run as it should.
    """
    log = open_log(on.settings, "load")
    with ExitStack() as stack:
        boards = stack.enter_context(closing(open_boards(on.settings)))
        watched = [
            _Watched(job, boards.board(job.name), records)
            for job in (
                CountingJob(counting_job(f"spread-{number}", records, 0.0), on.settings, log, 1)
                for number in range(jobs)
            )
        ]
        services = [on.start("coordinator", "spread-coordinator")]
        services += [on.start("worker", f"spread-worker-{number}") for number in range(workers)]
        stack.callback(stop_all, services)
        stack.callback(on.stop_jobs, *(each.job.name for each in watched))
        await_until(
            lambda: all(each.board.get_leader_status() is not None for each in watched),
            _LED_S,
            "a leader of every job",
        )
        _produce(log, watched)
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
        f"{each.job.name}: {proof.trained} of {records} trained"
        for each, proof in zip(watched, proofs, strict=True)
        if proof.trained != records
    ]
    data = {
        "jobs": jobs,
        "records": records,  # of each job
        "workers": workers,
        "drained_s": max(took_s),  # since the last record came
        "first_s": min(took_s),  # until the first job was drained
        "waited_s": max(each.waited_s for each in watched),
        "turn_s": max(took_s) * workers / max(moves, 1),  # of a worker at one job, in the mean
        "moves": moves,  # of all workers
    }
    fits = jobs * data["turn_s"] / workers <= WAITS_S
    figures = (
        Figure("all jobs drained, s", data["drained_s"], 1, DRAINED_S),
        Figure("the first one, s", data["first_s"], 1),
        Figure("longest wait for a worker, s", data["waited_s"], 1, WAITS_S if fits else inf),
        Figure("a worker's turn at a job, mean s", data["turn_s"], 1),
        Figure("moves", moves),
    )
    title = f"{jobs} jobs of {records} records on {workers} workers; {on.kafka}"
    faults = [f"the audit says: {flaw}" for flaw in flaws]
    return Found(title, figures, {**data, "flaws": flaws}, faults)


def _produce(log: Log, watched: list[_Watched]) -> None:
    with closing(log.writer()) as writer:
        for each in watched:
            spec = each.job.record.spec
            values = codec_of(spec).encode({"id": np.arange(each.records)})
            for number, value in enumerate(values):
                writer.append(spec.streams[number % len(spec.streams)], value)
            writer.poll()
        if not writer.flush(_FLUSH_S):
            raise NotMeasuredError(f"Kafka did not take all records in {_FLUSH_S:g} s")
