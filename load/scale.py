"""Measures growth of cost with partitions, jobs, workers, a job's history and Kafka's distance.

    python load/scale.py                      # exits 1 if a cost grows faster than its cause
    python load/scale.py --only history       # one series; --quick: fewer and smaller sizes of each
    python load/scale.py --only jobs --plot scale.png   # also draws it

Each series changes one size and nothing else, on new servers for each size. A cost is shown at
every size, and per unit: the increase per unit over the smallest size, or the cost itself if it is
already per unit or must not depend on the size. Other load on the machine hardly affects processor
seconds and counts, but it does affect other seconds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from matplotlib.figure import Figure
from rich.progress import track

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from common.embedded.services import EmbeddedService, stop_all
from common.errors import UnavailableError
from common.jobs.operations import JobOperations
from common.kafka.names import updates_topic
from common.kafka.opening import open_log
from common.kafka.port import Log, NewTopic
from common.kafka.read import read_decoded
from common.redis.board import open_board
from common.storage.snapshot_file import from_bytes
from common.testing.costless import ENTRYPOINT
from load.harness import history, report
from load.harness.counting import costless_spec
from load.harness.outside import Outside
from load.harness.processor import Processor, used_s
from load.harness.stack import NotMeasuredError, await_until, check, events, servers
from load.jobs import measure_idle
from load.rounds import TOPIC, Fleet, Scenario, measure
from load.throughput.backlog import produce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from common.jobs.spec import JobSpec
    from common.redis.port import Board

_JOB = "scale"
# b and K: an update of 1,024 records.
_BATCH_SIZE, _GROUP_SIZE = 256, 4
# Number of restarts and of takeovers. The longest counts.
_TIMES = 3
_SETTLES_S = 5.0
_IDLE_S = 20.0
_LED_S = 120.0
_ROUNDS_S = 10.0
# Records, each a batch. More than workers use in a measurement.
_BACKLOG = 400_000
_ZERO = bytes(4)  # a record: a float32


# --- costs and sizes ------------------------------------------------------------------------------


class Cost(NamedTuple):
    """A quantity that may grow with a size, and its bars."""

    name: str  # includes the unit
    digits: int
    # Smaller costs, or differences of costs, are taken for this value.
    noise: float
    most: float = inf  # at the largest size
    # Each unit adds to the cost. If False, the cost must not depend on the size.
    adds: bool = True
    # Maximum cost per unit at the largest size, relative to the least at the other sizes.
    grows: float = 2.0

    def per_unit(self, sizes: Sequence[int], values: Sequence[float]) -> list[float]:
        """Return the cost per unit at each size. If `adds`, the smallest size is the baseline."""
        if not self.adds:
            return [max(value, self.noise) for value in values]
        steps = zip(sizes[1:], values[1:], strict=True)
        return [max(value - values[0], self.noise) / (size - sizes[0]) for size, value in steps]


@dataclass(frozen=True)
class Series:
    """A size to change, and the costs to observe."""

    unit: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    # Measures costs by name, given the Kafka and the size.
    measure: Callable[[str, int], Mapping[str, float]]
    costs: tuple[Cost, ...]


class Coordinators:
    """Coordinators of one job, with one leader."""

    def __init__(self, start: Callable[[str], EmbeddedService], board: Board) -> None:
        self._start = start
        self._board = board
        self._services = list[EmbeddedService]()

    @property
    def leader(self) -> EmbeddedService:
        """The service started last, which leads once the others have ended."""
        return self._services[-1]

    def begin(self) -> dict[str, float]:
        """Start a coordinator while none runs, and wait until it leads."""
        before, began = self._epoch(), time.monotonic()
        self._next()
        return self._led("restart", before, began, 0.0)

    def restart(self) -> dict[str, float]:
        """Kill the leader without a standby, and start another coordinator."""
        self.leader.kill()
        return self.begin()

    def take_over(self) -> dict[str, float]:
        """Kill the leader while another coordinator stands by."""
        leader = self.leader
        standby = self._next()
        await_until(lambda: bool(events(standby, "standby")), _LED_S, "another stands by")
        # Let the standby load the rest of its code.
        time.sleep(1.0)
        before, used, began = self._epoch(), used_s(standby.pid), time.monotonic()
        leader.kill()
        return self._led("takeover", before, began, used)

    def longest(self) -> dict[str, float]:
        """Restart and take over several times each. Returns the longest."""
        each = [do() for do in (self.restart, self.take_over) for _ in range(_TIMES)]
        return {name: max(one.get(name, 0.0) for one in each) for name in each[0] | each[-1]}

    def close(self) -> None:
        """Stop all services."""
        stop_all(self._services)

    def _next(self) -> EmbeddedService:
        self._services.append(self._start(f"coordinator-{len(self._services)}"))
        return self.leader

    def _led(self, what: str, before: int, began: float, used: float) -> dict[str, float]:
        def led() -> bool:
            check([self.leader])
            return self._epoch() > before

        await_until(led, _LED_S, f"{self.leader.name} leads")
        seconds = time.monotonic() - began
        return {f"{what}, s": seconds, f"{what}, processor s": used_s(self.leader.pid) - used}

    def _epoch(self) -> int:
        try:
            leader_status = self._board.get_leader_status()
        except UnavailableError:
            return -1
        return -1 if leader_status is None else leader_status.epoch


def job(batch_size: int = _BATCH_SIZE, group_size: int = _GROUP_SIZE) -> JobSpec:
    """Return a job whose gradients cost nothing."""
    return costless_spec(_JOB, TOPIC, batch_size=batch_size, group_size=group_size)


def make_stream(log: Log, partitions: int) -> None:
    """Create the topic that the job reads. A busy broker needs a while for 1,000 partitions."""

    def made() -> bool:
        try:
            log.create_topics([NewTopic(TOPIC, partitions)])
        except UnavailableError:
            return False
        return len(log.ends(log.partitions(TOPIC))) == partitions

    await_until(made, _LED_S, f"a topic of {partitions:,} partitions")


def with_partitions(kafka: str, size: int) -> dict[str, float]:
    """Measure a stream of `size` partitions, the worker that reads it and its coordinators."""
    with ExitStack() as stack:
        on = stack.enter_context(servers(kafka, tasks=(ENTRYPOINT,)))
        board = stack.enter_context(closing(open_board(on.settings, _JOB)))
        make_stream(on.log, size)
        began, used = time.monotonic(), time.process_time()
        on.submit(job())
        found = {
            "submission, s": time.monotonic() - began,
            "submission, processor s": time.process_time() - used,
        }
        coordinators = Coordinators(partial(on.start, "coordinator"), board)
        stack.callback(coordinators.close)
        coordinators.begin()
        worker = on.start("worker", "worker")
        stack.callback(stop_all, [worker])
        found["largest audit record, KB"] = _largest_update(on.log, board, size) / 1e3
        found |= coordinators.longest()
        time.sleep(_SETTLES_S)
        watched = {"leader": coordinators.leader, "worker": worker}
        processor = Processor({name: service.pid for name, service in watched.items()})
        time.sleep(_IDLE_S)
        cores = processor.cores()
        check(watched.values())
        for name, service in watched.items():
            found[f"idle {name}, cores"] = cores[name]
            found[f"{name}, MB"] = psutil.Process(service.pid).memory_info().rss / 1e6
    return found


def _largest_update(log: Log, board: Board, partitions: int) -> int:
    """Make an update from all partitions. Returns bytes of the updates topic's largest record."""
    written = 0

    def claimed() -> bool:
        leader_status = board.get_leader_status()
        least = written // _BATCH_SIZE * _BATCH_SIZE
        return leader_status is not None and sum(leader_status.claimed.values()) >= least

    def kept() -> bool:
        # True once a snapshot has the update, so that the next leader need not make it again.
        return any(from_bytes(data).snapshot.made.version for data in board.snapshots())

    with closing(log.writer()) as writer:
        while written < _BATCH_SIZE * _GROUP_SIZE:
            for number in range(max(partitions, _BATCH_SIZE)):
                writer.append(TOPIC, _ZERO, partition=number % partitions)
                written += 1
            writer.flush(_LED_S)
            await_until(claimed, _LED_S, "all records are claimed")
    await_until(kept, _LED_S, "a snapshot of an update")
    return max(size or 0 for _, size in read_decoded(log, updates_topic(_JOB), len))


def with_jobs(kafka: str, size: int) -> dict[str, float]:
    """Measure `size` jobs without work on one coordinator."""
    with servers(kafka, tasks=("common.testing.counting:CountingTask",)) as on:
        data = measure_idle(on, size).data
    return {
        "threads": data["threads"],
        "MB above an empty coordinator": data["more_mb"],
        "idle coordinator, cores": data["cores"],
        "all are led after, s": data["led_s"],
    }


def with_workers(kafka: str, size: int) -> dict[str, float]:
    """Measure `size` workers, with one batch of each in an update."""
    with ExitStack() as stack:
        on = stack.enter_context(servers(kafka, tasks=(ENTRYPOINT,), forks=True))
        produce(on.log, TOPIC, size, [_ZERO], _BACKLOG)
        fleet = stack.enter_context(closing(Fleet(on)))
        scenario = Scenario(_JOB, 100, size, group_size=size)
        found = measure(scenario, fleet, _BACKLOG, _ROUNDS_S)
        batch_us = 1e6 / (found.pace.updates_per_s * size)
    ours = ("workers", "coordinator", "redis", "kafka")
    return {
        "a batch, processor µs": sum(found.cores[name] for name in ours) * batch_us,
        **{f"of it {name}, µs": found.cores[name] * batch_us for name in ours},
        "batches/s": 1e6 / batch_us,
    }


def with_history(kafka: str, size: int) -> dict[str, float]:
    """Measure a job with `size` past updates of one batch each."""
    with ExitStack() as stack:
        on = stack.enter_context(servers(kafka, tasks=(ENTRYPOINT,)))
        board = stack.enter_context(closing(open_board(on.settings, _JOB)))
        make_stream(on.log, 1)
        record = on.submit(job(batch_size=1, group_size=1))
        produce(on.log, TOPIC, 1, [_ZERO], size)
        history.write(on.settings, on.log, record, size)
        coordinators = Coordinators(partial(on.start, "coordinator"), board)
        stack.callback(coordinators.close)
        coordinators.begin()
        found = coordinators.longest()
        found["leader, MB"] = psutil.Process(coordinators.leader.pid).memory_info().rss / 1e6
    return found


def with_distance(_: str, size: int) -> dict[str, float]:
    """Measure coordinators with a delay of `size` ms each way to Kafka."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="doll-load-")))
        outside = stack.enter_context(Outside(folder, 1, (ENTRYPOINT,)))
        log = stack.enter_context(closing(open_log(outside.settings, "load")))
        board = stack.enter_context(closing(open_board(outside.settings, _JOB)))
        make_stream(log, 4)
        with closing(JobOperations(log)) as job_store:
            job_store.submit(job())
        outside.kafka_links[0].slow(size / 1e3)
        settings = outside.worker_settings(0)
        start = partial(_started, settings=settings, logs=folder)
        coordinators = Coordinators(start, board)
        stack.callback(coordinators.close)
        coordinators.begin()
        return coordinators.longest()


def _started(name: str, **given: Any) -> EmbeddedService:  # noqa: ANN401 -- of the service
    return EmbeddedService("coordinator", name, **given)


def _leads(*, restart: float = inf, takeover: float, adds: bool = True) -> tuple[Cost, ...]:
    """Return the costs and bars of restarts and takeovers."""
    return (
        Cost("restart, s", 2, 1.0, restart, adds=adds),
        Cost("restart, processor s", 2, 0.2, adds=adds),
        Cost("takeover, s", 2, 0.2, takeover, adds=adds),
        Cost("takeover, processor s", 2, 0.1, adds=adds),
    )


SERIES = {
    "partitions": Series(
        "partition",
        (2, 20, 200, 1280),
        (2, 20, 200),
        with_partitions,
        (
            Cost("submission, s", 2, 0.2),
            Cost("submission, processor s", 3, 0.05),
            *_leads(restart=4.0, takeover=4.0),
            Cost("idle leader, cores", 3, 0.01, 0.05),
            Cost("idle worker, cores", 3, 0.01),
            Cost("leader, MB", 0, 10.0),
            Cost("worker, MB", 0, 10.0),
            # Kafka accepts a megabyte.
            Cost("largest audit record, KB", 1, 0.1, 900.0),
        ),
    ),
    "jobs": Series(
        "job",
        (1, 20, 200),
        (1, 20),
        with_jobs,
        (
            Cost("idle coordinator, cores", 3, 0.01),
            Cost("MB above an empty coordinator", 0, 10.0),
            Cost("threads", 0, 10.0),
            Cost("all are led after, s", 1, 2.0),
        ),
    ),
    "workers": Series(
        "worker",
        (2, 8, 32, 64),
        (2, 8),
        with_workers,
        (
            # A worker's clock alone takes two hundredths of a core, whatever it computes.
            Cost("a batch, processor µs", 0, 10.0, adds=False, grows=4.0),
            Cost("of it workers, µs", 0, 10.0, adds=False, grows=4.0),
            Cost("of it coordinator, µs", 0, 10.0, adds=False, grows=1.5),
            Cost("of it redis, µs", 0, 10.0, adds=False, grows=1.5),
            Cost("of it kafka, µs", 0, 10.0, adds=False, grows=1.5),
            Cost("batches/s", 0, 10.0, adds=False, grows=inf),
        ),
    ),
    "history": Series(
        "update",
        (10_000, 100_000, 1_000_000),
        (2_000, 20_000),
        with_history,
        (*_leads(takeover=2.0, adds=False), Cost("leader, MB", 0, 10.0, adds=False)),
    ),
    "distance": Series("ms", (0, 20, 100), (0, 20), with_distance, _leads(takeover=4.0)),
}


# --- measuring, and comparing with the bars -------------------------------------------------------


def main() -> int:
    """Measure, report, and check the bars."""
    parser = report.parser(__doc__, "python load/scale.py --only jobs workers --json scale.json")
    parser.add_argument("--only", choices=SERIES, nargs="+", default=list(SERIES))
    parser.add_argument("--quick", action="store_true", help="measure fewer and smaller sizes")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the costs into this PNG or SVG file"
    )
    given = parser.parse_args()
    machine = report.machine()
    found: dict[str, dict[int, Mapping[str, float]]] = {}
    short, missing = list[str](), list[str]()
    for name in given.only:
        series = SERIES[name]
        sizes = series.quick if given.quick else series.sizes
        found[name], why = measured(series, track(sizes, name, transient=True), given.kafka)
        missing += [f"{name}: {why}"] * bool(why)
        if len(found[name]) > 1:
            short += _judged(name, found[name])
        elif why:
            del found[name]
    if given.plot is not None and found:
        _plot(found, given.plot)
    status = report.conclude(given.json, machine, {"series": found, "missing": missing}, short)
    for each in missing:
        print(f"not measured: {each}", file=sys.stderr)
    return status or 2 * bool(missing)


def measured(
    series: Series, sizes: Iterable[int], kafka: str
) -> tuple[dict[int, Mapping[str, float]], str]:
    """Measure one size after the other, up to the first that fails on this machine.

    Returns:
        The costs by size, and why later sizes are missing. Empty if none is.
    """
    found: dict[int, Mapping[str, float]] = {}
    for size in sizes:
        try:
            found[size] = series.measure(kafka, size)
        except (NotMeasuredError, UnavailableError) as error:
            return found, f"{size:,}: {error}"
    return found, ""


def _judged(name: str, found: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Print a series. Returns the missed bars."""
    series, sizes = SERIES[name], list(found)
    rows, short = list[tuple[str, ...]](), list[str]()
    for cost in series.costs:
        values = [each[cost.name] for each in found.values()]
        per_unit = cost.per_unit(sizes, values)
        grows = per_unit[-1] / min(per_unit[:-1] or per_unit)
        shown = [f"{value:,.{cost.digits}f}" for value in values]
        unit = f"{per_unit[-1]:.3g}" if cost.adds else ""
        most = "" if cost.most == inf else f"{cost.most:g}"
        allowed = "" if cost.grows == inf else f"{cost.grows:g}"
        rows.append((cost.name, *shown, unit, f"{grows:.2f}", allowed, most))
        if grows > cost.grows:
            short.append(
                f"{name}: {cost.name} grows {grows:.2f} times per {series.unit}, at most {allowed}"
            )
        if values[-1] > cost.most:
            short.append(
                f"{name}: {cost.name}: {values[-1]:.4g} with {sizes[-1]:,}, at most {most}"
            )
    columns = (
        "",
        *(f"{size:,}" for size in sizes),
        f"per {series.unit}",
        "grows",
        "at most",
        "value at most",
    )
    report.draw(name, columns, rows)
    return short


def _plot(found: Mapping[str, Mapping[int, Mapping[str, float]]], path: Path) -> None:
    """Draw every cost as a multiple of the cost at the smallest size."""
    figure = Figure(figsize=(4.2 * len(found), 4.2), layout="constrained")
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (name, by_size) in zip(axes, found.items(), strict=True):
        series, sizes = SERIES[name], list(by_size)
        for cost in series.costs:
            first = max(by_size[sizes[0]][cost.name], cost.noise)
            values = [max(each[cost.name], cost.noise) / first for each in by_size.values()]
            axis.semilogy(values, "o-", markersize=3, label=cost.name)
        alike = [max(size, 1) / max(sizes[0], 1) for size in sizes]
        axis.semilogy(alike, ":", color="0.5", label="as the size")
        axis.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
        axis.set(title=name, xlabel=series.unit)
        axis.legend(fontsize="x-small")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("times the cost of the smallest size")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(report.run(main))
