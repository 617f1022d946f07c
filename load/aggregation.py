"""Measures aggregation among members: update rate, repair time, copying a joiner's state.

    python load/aggregation.py                                # exits 1 if a bar is missed
    python load/aggregation.py --only kill_median_ms --json out/aggregation.json

Most figures measure the collective layer alone: real processes, a real Redis, gloo over 127.0.0.1,
and gradients that cost nothing. This process plays the leader, and no records are read or audited.
All processes share this machine's processors, so wall times are upper bounds for the same number of
machines. `leader_…` measures a whole job on real servers, 4 workers with 1 MB, whose leader ends
itself at each of the points of `load.faults.leader_points`; `ddp_…` compares such a job without
faults with plain DDP.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGSTOP, Signals
from statistics import median
from typing import Any

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from common.embedded.redis import EmbeddedRedis
from common.testing.counting import ENTRYPOINT
from load.faults.disturbances import end_leaders
from load.faults.drill import Conditions, Drill
from load.harness import report
from load.harness.stack import NotMeasuredError, await_until, servers
from load.throughput.members import START_S, Member, Pace
from load.throughput.ranks import run_ranks

_MB = 250_000  # float32 weights
_BLOWS = 30
_STOPS = 10
_COPIES = 5
_DDP = Path(__file__).parent / "throughput" / "plain_ddp.py"
# Comparison with DDP: number of workers or ranks, updates of each side, seconds per gradient.
_SIDE, _UPDATES, _GRADIENT_S = 4, 30, 0.02
_SIDE_S = 200.0
# Minimum time that the backlog lasts. Twelve leaders end and are replaced in this time.
_POINTS_S = 400.0
_FOREVER = 10**9  # updates
# The leader's next poll notices a worker's death, because it breaks the connection to Redis.
_LOOK_S = 0.05
# A frozen member breaks no connection. The leader waits for this time plus this many update times,
# then ends the group, and waits a little longer to see which members stay silent.
_LATE_S, _LATE_UPDATES, _SILENT_S = 0.3, 5, 0.4
_names = count()


@contextmanager
def _fleet(size: int, weights: int) -> Iterator[tuple[EmbeddedRedis, list[Member]]]:
    """Start members, and a Redis for them. At exit, all members in the list are ended."""
    members = list[Member]()
    with EmbeddedRedis() as redis:
        try:
            for number in range(size):
                members.append(Member(f"m{number}", redis.url, weights))
            yield redis, members
        finally:
            for member in members:
                member.end()


def _asked(
    members: Sequence[Member], method: str, argument: int
) -> tuple[str, Mapping[Member, Future[Any]]]:
    """Let the members create a group with a new name, and call a method in it."""
    name = f"g{next(_names)}"
    peers = [member.peer for member in members]
    for rank, member in enumerate(members):
        member.ask("make", name, peers, rank).result(START_S)
    return name, {member: member.ask(method, name, argument) for member in members}


def _end(name: str, left: Mapping[Member, Future[Any]], patience_s: float) -> None:
    """Wait for a member's error, as a leader would, and abort the group on all remaining members.

    Raises:
        NotMeasuredError: If a member continues in the group.
    """
    wait(left.values(), patience_s, FIRST_EXCEPTION)
    for member in left:
        member.ask("abort", name)
    over, not_over = wait(left.values(), START_S)
    if not_over or not all(answer.exception() for answer in over):
        raise NotMeasuredError("a member continued in a group that had ended")


def _pace(size: int, weights: int, updates: int) -> list[Pace]:
    with _fleet(size, weights) as (_, members):
        _, asked = _asked(members, "updates", updates)
        return [answer.result(START_S + updates) for answer in asked.values()]


def _per_s(size: int, weights: int, updates: int) -> float:
    seconds = zip(*(each.seconds for each in _pace(size, weights, updates)), strict=True)
    return 1 / float(median(map(max, seconds)))


@cache
def _repaired_ms(blow: Signals, blows: int) -> list[float]:
    """Return the times from each signal to the end of the survivors' next update, in ms."""
    random, found = Random(1), list[float]()  # noqa: S311 -- when to strike, no secret
    with _fleet(4, _MB) as (redis, members):
        pace = _asked(members, "updates", 50)[1][members[0]].result(START_S)
        late_s = _LATE_S + _LATE_UPDATES * median(pace.seconds)
        patience_s = _LOOK_S if blow == SIGKILL else late_s
        for number in range(blows):
            name, asked = _asked(members, "updates", _FOREVER)
            time.sleep(random.uniform(0.3, 0.5))
            victim = random.choice(members)
            left = [member for member in members if member is not victim]
            struck = time.monotonic()
            victim.signal(blow)
            _end(name, {member: asked[member] for member in left}, patience_s)
            if blow == SIGSTOP:
                time.sleep(max(0.0, struck + patience_s + _SILENT_S - time.monotonic()))
            _, again = _asked(left, "updates", 0)
            for answer in again.values():
                answer.result(START_S)
            found.append(1e3 * (time.monotonic() - struck))
            victim.end()
            members[:] = [*left, Member(f"m{number + 4}", redis.url, _MB)]
    return found


def copy_s() -> report.Figure:
    """Measure the time to copy weights and Adam state to a joiner. Others wait no longer."""
    found = list[float]()
    with _fleet(2, 100 * _MB) as (_, members):
        for _ in range(_COPIES):
            _, copied = _asked(members, "copy", 3)
            found.append(max(answer.result(START_S) for answer in copied.values()))
    return report.Figure("s, a joiner's copy of 3 x 100 MB", median(found), 2, most=1.0, goal=0.5)


@cache
def _ended_leaders(kafka: str) -> tuple[list[float], int]:
    """Return ms from each leader's end to its successor's first order, and updates rolled back."""
    found = list[float]()
    conditions = replace(Conditions(), weights=_MB, aggregation="replicas")
    with (
        # Forked processes start sooner, and twelve of them are restarted.
        servers(kafka, tasks=(ENTRYPOINT,), forks=True) as on,
        tempfile.TemporaryDirectory(prefix="doll-points-") as folder,
    ):
        replica = ("load.faults.leader_points", folder)
        drill = Drill(on, "points", conditions, seconds=_POINTS_S, coordinators=3, replica=replica)
        with closing(drill):
            for each in end_leaders(drill, Path(folder)):
                found += each.values_ms
                parts = ", ".join(f"{ms:.0f} {part}" for part, ms in each.parts_ms.items())
                print(f"{each.note}: {each.values_ms[0]:.0f} ms: {parts}", flush=True)
            return found, drill.taken_back()


def _ddp_per_s(weights: int) -> float:
    """Return the updates per second of plain DDP."""
    words = [str(weights), str(_GRADIENT_S), str(_UPDATES)]
    return 1 / max(float(each["update_s"]) for each in run_ranks(_DDP, words, _SIDE, _SIDE_S))


def _job_per_s(kafka: str, weights: int) -> float:
    """Return the updates per second of a job that reads from Kafka and audits each update."""
    conditions = Conditions(
        _SIDE, _SIDE, gradient_s=_GRADIENT_S, weights=weights, aggregation="replicas"
    )
    with servers(kafka, tasks=(ENTRYPOINT,)) as on:
        drill = Drill(on, "side", conditions, seconds=_SIDE_S)
        with closing(drill):
            drill.await_even()
            first = len(drill.witness.rounds())
            last = first + _UPDATES
            await_until(lambda: len(drill.witness.rounds()) > last, _SIDE_S, "updates")
            began = [each.began_at for each in drill.witness.rounds()[first:]]
            return 1 / float(median(np.diff(began)))


def _beside_ddp(kafka: str, megabytes: int) -> report.Figure:
    """Measure a job and then plain DDP: the same model, machine, and gradients of timed waits."""
    weights = megabytes * _MB
    found = _job_per_s(kafka, weights) / _ddp_per_s(weights)
    name = f"updates/s by those of plain DDP, {_SIDE} x {megabytes} MB, gradients of 20 ms"
    return report.Figure(name, found, 2, least=0.75, goal=0.9)


_KILLED = f"ms from SIGKILL to the next update, 4 x 1 MB, {_BLOWS} times"
_STOPPED = f"ms from SIGSTOP to the next update, 4 x 1 MB, {_STOPS} times"
FIGURES: dict[str, Callable[[], report.Figure]] = {
    # An update is an all-reduce, a digest and Adam's step. `processor_20` has a goal, but no bar.
    "updates_100mb": lambda: report.Figure(
        "updates/s, 4 x 100 MB", _per_s(4, 100 * _MB, 8), 2, least=1.0, goal=1.5
    ),
    "updates_1mb": lambda: report.Figure(
        "updates/s, 4 x 1 MB", _per_s(4, _MB, 200), 1, least=40, goal=80
    ),
    "processor_20": lambda: report.Figure(
        "ms of processor a member and update, 20 x 1 MB",
        1e3 * median(each.processor_s for each in _pace(20, _MB, 50)),
        2,
        goal=6,
    ),
    # Signals arrive in the middle of updates. A SIGSTOP breaks no connection, so the leader waits
    # for the longest time that an update may take.
    "kill_median_ms": lambda: report.Figure(
        f"{_KILLED}: median", median(_repaired_ms(SIGKILL, _BLOWS)), most=150, goal=100
    ),
    "kill_longest_ms": lambda: report.Figure(
        "the same: longest", max(_repaired_ms(SIGKILL, _BLOWS)), most=300, goal=200
    ),
    "stop_longest_ms": lambda: report.Figure(
        f"{_STOPPED}: longest", max(_repaired_ms(SIGSTOP, _STOPS)), most=1500, goal=800
    ),
    "copy_s": copy_s,
}
ON_SERVERS: dict[str, Callable[[str], report.Figure]] = {
    "leader_longest_ms": lambda kafka: report.Figure(
        "ms from a leader's end to the next one's orders, at each point of its work: longest",
        max(_ended_leaders(kafka)[0]),
        most=400,
        goal=300,
    ),
    "leader_taken_back": lambda kafka: report.Figure(
        "the same: versions taken back", _ended_leaders(kafka)[1], most=0
    ),
    "ddp_25mb": lambda kafka: _beside_ddp(kafka, 25),
    "ddp_100mb": lambda kafka: _beside_ddp(kafka, 100),
}


def main() -> int:
    """Measure, report, and check the bars."""
    parser = report.parser(__doc__, "python load/aggregation.py --only kill_median_ms")
    names = [*FIGURES, *ON_SERVERS]
    parser.add_argument("--only", choices=names, nargs="+", default=names)
    given = parser.parse_args()
    on_servers = {name: partial(measure, given.kafka) for name, measure in ON_SERVERS.items()}
    return report.measure_figures("Aggregation among workers", given, FIGURES | on_servers)


if __name__ == "__main__":
    sys.exit(report.run(main))
