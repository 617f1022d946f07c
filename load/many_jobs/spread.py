"""Many small jobs on few workers: how soon all are drained, and how long one waits for a worker."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from common.embedded.services import Service, stop_all
from common.errors import UnavailableError
from common.jobs.build import codec_of
from common.jobs.store import JobBook
from common.runtime.connect import open_boards, open_log
from load.harness import report
from load.harness.counting import CountingJob, counting_job
from load.harness.stack import NotMeasuredError, await_until, check

if TYPE_CHECKING:
    from pathlib import Path

    from common.ports.servers import Board, Log
    from load.harness.stack import Servers

DRAINED_S = 240.0  # all jobs, after their records came
WAITS_S = 120.0  # a job with work and nobody for it, where that is time enough for everybody's turn
_LED_S = 180.0
_FLUSH_S = 60.0
_LONGEST_S = 900.0


@dataclass(frozen=True)
class SpreadFound:
    """What was measured."""

    jobs: int
    records: int  # of each
    workers: int
    drained_s: float  # since the last record came
    first_s: float  # until the first job was drained
    waited_s: float  # the longest time that a job had work and no worker
    turn_s: float  # of a worker at one job, in the mean
    moves: int  # of all workers
    flaws: tuple[str, ...]  # of the audits

    def short(self) -> list[str]:
        """What falls short of what is required."""
        found = [f"the audit says: {flaw}" for flaw in self.flaws]
        if self.drained_s > DRAINED_S:
            found.append(f"drained after {self.drained_s:.0f} s, required {DRAINED_S:.0f} s")
        fits = self.jobs * self.turn_s / self.workers <= WAITS_S
        if fits and self.waited_s > WAITS_S:
            found.append(f"a job waited {self.waited_s:.0f} s, required {WAITS_S:.0f} s")
        return found

    def as_data(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)

    def print(self, kafka: str) -> None:
        """For people."""
        title = f"{self.jobs} jobs of {self.records} records on {self.workers} workers; {kafka}"
        rows = [
            ("all jobs drained, s", f"{self.drained_s:.1f}"),
            ("the first one, s", f"{self.first_s:.1f}"),
            ("longest wait for a worker, s", f"{self.waited_s:.1f}"),
            ("a worker's turn at a job, mean s", f"{self.turn_s:.1f}"),
            ("moves", f"{self.moves}"),
        ]
        report.draw(title, ("", ""), rows)


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
            standing = self.board.get_standing()
        except UnavailableError:
            return
        if standing is None or self.drained_at is not None:
            return
        first = self.job.record.first
        claimed = sum(standing.claimed[place] - begin for place, begin in first.items())
        if claimed == self.records and standing.waiting == 0:
            self.drained_at = now
        if self.drained_at is not None or standing.live:
            self.alone_since = None
        elif self.alone_since is None:
            self.alone_since = now
        else:
            self.waited_s = max(self.waited_s, now - self.alone_since)


def measure_spread(
    on: Servers, folder: Path, jobs: int = 100, records: int = 200, workers: int = 4
) -> SpreadFound:
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
        services = [Service("coordinator", "spread-coordinator", on.settings, folder)]
        services += [
            Service("worker", f"spread-worker-{number}", on.settings, folder)
            for number in range(workers)
        ]
        stack.callback(stop_all, services)
        stack.callback(_stop_jobs, log, [each.job.name for each in watched])
        await_until(
            lambda: all(each.board.get_standing() is not None for each in watched),
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
        moves = sum(service.log.read_text().count("job_selected") for service in services)
        proofs = [each.job.audit() for each in watched]
    flaws = tuple(flaw for proof in proofs for flaw in map(str, proof.flaws))
    flaws += tuple(
        f"{each.job.name}: {proof.trained} of {records} trained"
        for each, proof in zip(watched, proofs, strict=True)
        if proof.trained != records
    )
    return SpreadFound(
        jobs,
        records,
        workers,
        drained_s=max(took_s),
        first_s=min(took_s),
        waited_s=max(each.waited_s for each in watched),
        turn_s=max(took_s) * workers / max(moves, 1),
        moves=moves,
        flaws=flaws,
    )


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


def _stop_jobs(log: Log, names: list[str]) -> None:
    with closing(JobBook(log)) as book:
        for name in names:
            book.want(name, "stopped", "measured")
