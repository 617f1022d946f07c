"""Compares sparse training to a target loss with plain PyTorch DDP on the same cores.

    python load/sparse.py          # exits 1 if any cost is not below DDP's
    python load/sparse.py --only clicks_like --kafka embedded --json out/sparse.json

This is MLLess's comparison: the same rows, optimizer, b and K = p, until the loss on test rows is
the same. Our services send a gradient's nonzero elements and the model's significant changes
through Redis; DDP adds up dense gradients in a ring. Both have their rows before the clock starts,
and both stand still during evaluations on the test rows.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack, closing, contextmanager
from math import inf
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

from common.learning.checkpoint import weights_in

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.progress import track

from common.core.spans import Partition
from common.data.codecs import codec_of
from common.embedded.process import family
from common.embedded.services import EmbeddedService, stop_all
from common.kafka.names import control_topic, updates_topic
from common.kafka.read import read_decoded
from common.redis.board import open_board
from load.harness import report
from load.harness.counting import spec_of
from load.harness.processor import used_s
from load.harness.stack import NotMeasuredError, Servers, check, servers
from load.throughput.backlog import partitions_for, produce
from load.throughput.learning import LOOK_EVERY, MOST_UPDATES, SETS, Judge, Learning
from load.throughput.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from common.core.messages import ModelId
    from common.data.records import Records
    from common.jobs.spec import JobSpec
    from common.redis.port import Board

_DDP = Path(__file__).parent / "throughput" / "ddp.py"
_TOPIC = "rows"
# The recommended value of the documentation.
_SIGNIFICANCE = 1.5
# Sets with bars. The results of the small real sets are only shown.
_REQUIRED = ("clicks_like", "ratings_like")
_DDP_S = 600.0
_VERSION_S = 60.0  # timeout of the next version
# Interval between polls for a version.
_LOOK_S = 0.002
# Updates of another job before the clock starts, because a broker compiles its code during use.
_WARM_UP = 200


class Side(NamedTuple):
    """Cost of one side to reach the target."""

    # Time since the first evaluation on the test rows.
    seconds: float
    bytes: float  # counted from the beginning
    # Processor time of each process since the first evaluation.
    processor_s: Mapping[str, float]
    updates: int
    metric: float

    @property
    def cost_s(self) -> float:
        """Processor-seconds of all processes."""
        return sum(self.processor_s.values())


class Mark(NamedTuple):
    """A reading of all counters."""

    at_s: float
    processor_s: dict[str, float]  # each process
    redis_bytes: int
    # Ends of the topics that a job writes itself.
    topics: dict[str, int]


def ratios(ours: Side, ddp: Side) -> dict[str, float]:
    """Return our costs relative to DDP's."""
    return {
        "time_ratio": ours.seconds / ddp.seconds,
        "bytes_ratio": ours.bytes / ddp.bytes,
        "cost_ratio": ours.cost_s / ddp.cost_s,
    }


def job_of(name: str, learning: Learning, train: Records) -> JobSpec:
    """Return a job that learns like DDP and offers its versions for evaluation."""
    fields = {
        field: {"dtype": str(column.dtype), "shape": list(column.shape[1:])}
        for field, column in train.items()
    }
    optimizer = learning.optimizer
    return spec_of(
        fields,
        name=name.replace("_", "-"),
        streams=[_TOPIC],
        task={"name": learning.task, **learning.options},
        batch_size=learning.batch_size,
        group_size=learning.workers,
        optimizer={
            "name": optimizer.name,
            "learning_rate": optimizer.learning_rate,
            **optimizer.options,
        },
        compression={"significance": _SIGNIFICANCE},
        evaluation={"every_updates": LOOK_EVERY},
    )


def run_ddp(name: str, workers: int) -> Side:
    """Run one rank per worker until the target is reached.

    Raises:
        NotMeasuredError: If a rank fails, or the target is not reached.
    """
    found = run_ranks(_DDP, [name], workers, _DDP_S)
    return Side(
        found[0]["seconds"],
        sum(each["bytes"] for each in found),
        {f"rank-{rank}": each["processor_s"] for rank, each in enumerate(found)},
        found[0]["updates"],
        found[0]["metric"],
    )


class Meter:
    """Counts the cost of a job on servers that nothing else uses.

    Args:
        pids: Process ids of all processes that work for the job, by name.
    """

    def __init__(self, on: Servers, job: str, pids: Mapping[str, int]) -> None:
        self._log = on.log
        self._topics = (control_topic(job), updates_topic(job))
        self._redis = redis.Redis.from_url(on.settings.redis)
        self._pids = pids

    def mark(self) -> Mark:
        """Read all counters."""
        at_s = perf_counter()
        return Mark(
            at_s,
            {name: used_s(pid) for name, pid in self._pids.items()},
            self.redis_bytes(),
            {topic: self._log.bounds(Partition(topic, 0)).end for topic in self._topics},
        )

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Freeze all processes in this context."""
        pids = [each for pid in self._pids.values() for each in family(pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def sent(self, since: int, mark: Mark) -> int:
        """Return the bytes sent through Redis, plus the job's own records, written and read.

        Args:
            since: Bytes that Redis had sent and received when the job was submitted.
            mark: Reading at the end.
        """
        records = sum(
            size or 0
            for topic, end in mark.topics.items()
            for offset, size in read_decoded(self._log, topic, len)
            if offset < end
        )
        return mark.redis_bytes - since + 2 * records

    def redis_bytes(self) -> int:
        """Return the bytes that Redis has sent and received."""
        stats = self._redis.info("stats")
        return int(stats["total_net_input_bytes"] + stats["total_net_output_bytes"])


def run_ours(name: str, learning: Learning, kafka: str) -> Side:
    """Run the services until the target is reached, on servers of their own.

    Raises:
        NotMeasuredError: If a service ends, or the target is not reached.
    """
    split = learning.data()
    spec = job_of(name, learning, split.train)
    values = codec_of(spec.records).encode(split.train)
    rows = MOST_UPDATES * learning.workers * learning.batch_size
    with ExitStack() as stack:
        on = stack.enter_context(servers(kafka))
        partitions = partitions_for(values, rows, embedded=kafka == "embedded")
        produce(on.log, _TOPIC, partitions, values, rows)
        services = on.start_all(learning.workers)
        stack.callback(stop_all, services)
        pids = {service.name: service.pid for service in services} | on.pids
        meter = Meter(on, spec.name, pids)
        _warm_up(on, spec, services)
        since = meter.redis_bytes()
        on.submit(spec)
        board = stack.enter_context(closing(open_board(on.settings, spec.name)))
        judge = Judge(learning, split.test)
        known: ModelId | None = None
        first: Mark | None = None
        looks, metric, still_s = 0, inf, 0.0
        while metric > learning.target:
            known, model = _next_version(board, known, services)
            mark = meter.mark()
            mark = mark._replace(at_s=mark.at_s - still_s)
            with meter.standing_still():
                began_s = perf_counter()
                metric = judge.metric(weights_in(model)[0])
                still_s += perf_counter() - began_s
            looks += 1
            if first is None and known.version:
                first = mark
            if known.version > MOST_UPDATES:
                raise NotMeasuredError(f"{name}: {metric:.4f} after {known.version} updates")
        if known is None or first is None or first is mark:
            raise NotMeasuredError(f"{name}: the target was reached before the clock started")
        # Exclude the models stored and fetched for evaluation, because DDP is evaluated in its own
        # process.
        judged = len(model) * (known.version // LOOK_EVERY + 1 + looks)
        used = {who: s - first.processor_s[who] for who, s in mark.processor_s.items()}
        sent = meter.sent(since, mark) - judged
        return Side(mark.at_s - first.at_s, sent, used, known.version, metric)


def _warm_up(on: Servers, spec: JobSpec, services: Sequence[EmbeddedService]) -> None:
    """Train another job of the same kind for `_WARM_UP` updates."""
    other = spec.model_copy(update={"name": "warm-up"})
    on.submit(other)
    with closing(open_board(on.settings, other.name)) as board:
        known = None
        while known is None or known.version < _WARM_UP:
            known, _ = _next_version(board, known, services)
    on.stop_jobs(other.name)


def _next_version(
    board: Board, known: ModelId | None, services: Sequence[EmbeddedService]
) -> tuple[ModelId, bytes]:
    until = monotonic() + _VERSION_S
    while (found := board.offered_model(known)) is None:
        check(services)
        if monotonic() > until:
            raise NotMeasuredError(f"no version after {known} in {_VERSION_S:g} s")
        sleep(_LOOK_S)
    return found


def main() -> int:
    """Measure, report, and check the bars."""
    parser = report.parser(__doc__, "python load/sparse.py --only clicks_like --workers 4")
    parser.add_argument(
        "--only", choices=SETS, nargs="+", default=list(SETS), help="data sets; default: all"
    )
    parser.add_argument(
        "--workers", type=int, default=8, help="number of workers, and K [default: 8]"
    )
    given = parser.parse_args()
    machine = report.machine()
    result = dict[str, Any]()
    figures = list[report.Figure]()
    sides = list[tuple[str, ...]]()
    for name in track(given.only, "sets", transient=True):
        learning = SETS[name].among(given.workers)
        ddp, ours = run_ddp(name, given.workers), run_ours(name, learning, given.kafka)
        found = ratios(ours, ddp)
        result[name] = found | {"ours": ours._asdict(), "ddp": ddp._asdict()}
        bar = 1.0 if name in _REQUIRED else inf
        figures += [
            report.Figure(f"{name}: {key}", value, 3, most=bar) for key, value in found.items()
        ]
        sides += [_row(name, "DDP", ddp), _row(name, "ours", ours)]
    columns = ("", "seconds", "MB", "processor s", "updates", "test loss or RMSE")
    report.draw(f"To the target, p = {given.workers}, {given.kafka}", columns, sides)
    answer = report.Found("Ours over DDP's", figures, {})
    answer.draw()
    return report.conclude(given.json, machine, result, answer.short())


def _row(name: str, who: str, side: Side) -> tuple[str, ...]:
    numbers = (f"{side.seconds:,.2f}", f"{side.bytes / 1e6:,.1f}", f"{side.cost_s:,.2f}")
    return (f"{name}, {who}", *numbers, f"{side.updates:,}", f"{side.metric:.4f}")


if __name__ == "__main__":
    sys.exit(report.run(main))
