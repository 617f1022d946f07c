"""Measures the whole pipeline's throughput relative to plain PyTorch on the same machine.

    python load/pipeline.py                   # the CNN; exits 1 if the median is below 0.85
    python load/pipeline.py --case logistic   # against one consumer that reads and decodes

Blocks of reference and pipeline alternate, and the side that is not measured stands still: the
baseline waits on a pipe, or the job is paused and its processes are frozen. So neither slows the
other, and none works ahead. A pipeline's block is counted from update to update in the audit trail,
once every worker claims new batches again. The number of batches that wait in the workers is the
same at its start as at its end.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from common.data.codecs import codec_of
from common.embedded.services import stop_all
from common.jobs.operations import JobOperations
from common.kafka.stream import open_stream_log
from common.redis.board import open_board
from load.harness import report
from load.harness.processor import Block, Processor
from load.harness.stack import (
    NotMeasuredError,
    Servers,
    await_until,
    check,
    freeze,
    servers,
    thaw,
)
from load.harness.updates import UpdatesMeter
from load.throughput.backlog import check_left, partitions_for, produce
from load.throughput.cases import CASES, Case, find_records
from load.throughput.reference import BASELINE, PlainLoops, Reference, SingleConsumer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from common.jobs.spec import JobSpec

_WORKERS = 2
_TOPIC = "records"
_REQUIRED = 0.85
# Minimum processor time of a worker, as a share of the busiest worker's.
_LEAST_SHARE = 0.5
# Time without an update after which a paused job has none in flight.
_QUIET_S = 0.5
_TIMEOUT_S = 60.0
# Training before a block, after every worker has claimed a new batch.
_WARM_S = 2.0
# Size of a backlog relative to the need, in case the pipeline is faster than its reference.
_RESERVE = 1.3
# Records/s that size the backlog of the logistic case.
_LOGISTIC_PER_S = 300_000.0


class Pipeline:
    """The job on its processes, frozen except during measurements."""

    def __init__(self, on: Servers, job: JobSpec, records: int) -> None:
        self._board = open_board(on.settings, job.name)
        self._job_store = JobOperations(on.log)
        self._job = job.name
        self._records = records
        self._job_store.submit(job)
        self.kafka = on.kafka
        self.services = on.start_all(_WORKERS)
        self._pids = {service.name: service.pid for service in self.services} | on.pids
        self._meter = UpdatesMeter(on.log, job.name)
        self._warm()
        self._rest()

    def run(self, seconds: float) -> Block:
        """Thaw, warm up, measure, and freeze again."""
        for service in self.services[1:]:
            thaw(service)
        await_until(lambda: len(self._board.heartbeats()) == _WORKERS, _TIMEOUT_S, "workers alive")
        thaw(self.services[0])
        self._job_store.patch(self._job, "measured", wanted="running")
        self._warm()
        processor = Processor(self._pids)
        pace = self._meter.measure(seconds)
        block = Block(pace.samples_per_s, processor.cores())
        check_left(self._board, self._records)
        self._rest()
        return block

    def close(self) -> None:
        """Stop everything."""
        for service in self.services:
            thaw(service)
        stop_all(self.services)
        self._meter.close()
        self._job_store.close()

    def _warm(self) -> None:
        """Train until every worker has batches again, then for `_WARM_S`."""
        leader_status = self._board.get_leader_status()
        decided = leader_status.control_position if leader_status is not None else 0
        try:
            workers = (service.name for service in self.services[1:])
            self._meter.await_workers(workers, decided, _TIMEOUT_S)
        except NotMeasuredError:
            check(self.services)
            raise
        self._meter.measure(_WARM_S)

    def _rest(self) -> None:
        self._job_store.patch(self._job, "the reference is measured", wanted="paused")
        self._meter.await_quiet(_QUIET_S, _TIMEOUT_S)
        for service in self.services:
            freeze(service)


@dataclass
class Pairs:
    """Paired blocks of both sides."""

    reference: list[Block]
    pipeline: list[Block]

    @property
    def ratios(self) -> list[float]:
        """Ratio of each pair, by records per second."""
        pairs = zip(self.reference, self.pipeline, strict=True)
        return [mine.records_per_s / other.records_per_s for other, mine in pairs]


def measure(reference: Reference, pipeline: Pipeline, pairs: int, block_s: float) -> Pairs:
    """Measure pairs of blocks. Every other pair begins with the pipeline, so drift cancels."""
    found = Pairs([], [])
    for number in range(pairs):
        if number % 2:
            found.pipeline.append(pipeline.run(block_s))
            found.reference.append(reference.run(block_s))
        else:
            found.reference.append(reference.run(block_s))
            found.pipeline.append(pipeline.run(block_s))
        print(f"pair {number + 1}: ratio {found.ratios[-1]:.3f}", flush=True)
    return found


@contextmanager
def set_up(given: argparse.Namespace) -> Iterator[tuple[Pipeline, Reference]]:
    """Start everything, and produce the backlog before any clock runs."""
    case = CASES[given.case]
    with ExitStack() as stack:
        on = stack.enter_context(servers(given.kafka))
        log, job = on.log, case.job(f"load-{case.name}", _TOPIC)
        codec, reference = codec_of(job.records), None
        per_s = _LOGISTIC_PER_S
        if case.name == "cnn":
            words = case.name, str(given.data or "")
            reference = stack.enter_context(closing(PlainLoops(BASELINE, words, _WORKERS)))
            per_s = _RESERVE * reference.run(min(given.block_seconds, 2.0)).records_per_s
        records = int(per_s * (given.pairs + 1) * (given.block_seconds + 2 * _WARM_S))
        print(f"{on.kafka}: producing a backlog of {records:,} records", flush=True)
        values = codec.encode(find_records(case, given.data, seed=0))
        partitions = partitions_for(values, records, embedded=given.kafka == "embedded")
        produce(log, _TOPIC, partitions, values, records)
        pipeline = stack.enter_context(closing(Pipeline(on, job, records)))
        alone = stack.enter_context(closing(open_stream_log(on.settings, "load")))
        yield pipeline, reference or SingleConsumer(alone, [_TOPIC], codec)


def main() -> int:
    """Measure, report, and check the bars."""
    parser = report.parser(__doc__)
    parser.add_argument("--case", choices=CASES, default="cnn")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--block-seconds", type=float, default=10.0)
    parser.add_argument("--data", type=Path, help="folder with MNIST; default: random images")
    parser.add_argument(
        "--require", type=float, help="required median ratio; default for cnn: 0.85"
    )
    given = parser.parse_args()
    required: float = _REQUIRED if given.case == "cnn" else 0.0
    if given.require is not None:
        required = given.require
    machine = report.machine()
    with set_up(given) as (pipeline, reference):
        pairs = measure(reference, pipeline, given.pairs, given.block_seconds)
    ratios = report.spread(pairs.ratios)
    result: dict[str, Any] = {
        "ratio": ratios["median"],
        "required": required,
        "ratios": pairs.ratios,
        "spread": ratios,
        "case": given.case,
        "reference": reference.name,
        "reference_blocks": [_as_data(block) for block in pairs.reference],
        "pipeline_blocks": [_as_data(block) for block in pairs.pipeline],
        "kafka": pipeline.kafka,
        "workers": _WORKERS,
        "block_s": given.block_seconds,
    }
    _print(pairs, result, CASES[given.case])
    missed = _uneven(pairs.pipeline)
    verdict = f"median ratio {ratios['median']:.3f}, required {required:.2f}"
    if ratios["median"] < required:
        missed.append(verdict)
    else:
        print(verdict)
    return report.conclude(given.json, machine, result, missed)


def _uneven(blocks: list[Block]) -> list[str]:
    """Return the blocks that gave a worker much less to do than another."""
    found = list[str]()
    for number, block in enumerate(blocks, 1):
        cores = [block.cores[f"worker-{worker}"] for worker in range(_WORKERS)]
        if min(cores) < _LEAST_SHARE * max(cores):
            used = ", ".join(f"{each:.2f}" for each in cores)
            found.append(
                f"block {number}: the workers used {used} cores, required at least"
                f" {_LEAST_SHARE:g} of the most"
            )
    return found


def _as_data(block: Block) -> dict[str, Any]:
    return block._asdict() | {"cpu_us_per_record": block.cpu_us_per_record}


def _print(pairs: Pairs, result: dict[str, Any], case: Case) -> None:
    sides = ((result["reference"], pairs.reference), ("the pipeline", pairs.pipeline))
    rows = [_row(f"{name}, records/s", [b.records_per_s for b in side]) for name, side in sides]
    rows += [
        _row(f"{name}, CPU µs", [b.cpu_us_per_record for b in side], 1) for name, side in sides
    ]
    rows += [_row(f"{name}: others", [b.cores["others"] for b in side], 2) for name, side in sides]
    rows.append(_row("ratio of each pair", pairs.ratios, 3))
    title = (
        f"{case.name}: b={case.batch_size}, K={case.group_size}, {_WORKERS} workers of one"
        f" thread; {result['kafka']}; {len(pairs.ratios)} pairs of {result['block_s']:g} s"
    )
    report.draw(title, ("", "min", "quartile", "median", "quartile", "max"), rows)
    print("CPU µs: processor time per record; others: cores that other processes used meanwhile")
    used = ", ".join(f"{name} {cores:.2f}" for name, cores in pairs.pipeline[-1].cores.items())
    print(f"cores used in the pipeline's last block: {used}")
    least = min(pairs.ratios) / result["ratio"]
    print(f"least ratio of a pair over the median: {least:.2f}")


def _row(name: str, values: list[float], digits: int = 0) -> tuple[str, ...]:
    return (name, *(f"{value:,.{digits}f}" for value in report.spread(values).values()))


if __name__ == "__main__":
    sys.exit(report.run(main))
