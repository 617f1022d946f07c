"""Whether a backlog in two streams is learned as well as the same rows shuffled into one topic.

    python load/fairness.py                 # exits 1 where two streams are worse by more than 0.03
    python load/fairness.py --kafka embedded --rows 4000 --json out/fairness.json

NSL-KDD's connections, normal ones in one stream and attacks in another: a worker that reads one
partition after the other learns first that all is well, and then that all is an attack. Both
jobs are real ones, on real processes, and have all their records before they begin; a fifth of the
rows, which nobody trains on, is what the models are asked about.
"""

from __future__ import annotations

import csv
import io
import sys
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by path: this checkout's packages

from common.data.fields import concatenate
from common.data.readers import read_bytes
from common.data.records import Records, count, take
from common.embedded.services import stop_all
from common.errors import UserError
from common.jobs.build import codec_of, task_of
from common.learning.evaluate import evaluate
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model
from common.runtime.connect import open_log
from load.harness import report
from load.harness.counting import CountingJob, spec_of
from load.harness.stack import NotMeasuredError, Servers, await_until, check, servers
from load.throughput.backlog import partitions_for, produce

if TYPE_CHECKING:
    import argparse

    from common.jobs.spec import JobSpec

_ROOT = Path(__file__).parents[1]
_DATA = _ROOT.parent / "shared" / "data" / "streams" / "nsl-kdd-train-20percent.csv.gz"
_LABEL, _DIFFICULTY = 41, 42  # columns; the second says how many classifiers were right
_NORMAL = "normal"
_TRAINED = 0.8  # of the rows; the rest is held out
_SEED = 7
_AT_MOST_WORSE = 0.03
_DRAIN_S = 240.0


class Case(NamedTuple):
    """One job to measure: its streams, and which rows are in each, in order."""

    name: str
    streams: dict[str, np.ndarray[Any, np.dtype[np.int64]]]


def connections(data: Path, rows: int | None) -> Records:
    """Features and a label of each connection: 0 is normal, 1 an attack.

    Numbers span nine decades (bytes) and are taken by their logarithm.

    Args:
        data: NSL-KDD's CSV, compressed by gzip or not.
        rows: So many of them, drawn evenly; None for all.

    Raises:
        UserError: If there is no such file, or it is not such a table.
    """
    try:
        text = read_bytes(data).decode(errors="replace")
    except UserError as error:
        wanted = "name NSL-KDD's KDDTrain+_20Percent.txt, gzipped or not, by --data"
        raise UserError(f"{error}; {wanted}") from error
    table = [row for row in csv.reader(io.StringIO(text)) if row]
    if not table or len(table[0]) <= _LABEL:
        raise UserError(f"{data}: holds no NSL-KDD, whose rows have {_DIFFICULTY + 1} cells")
    if rows is not None and rows < len(table):
        chosen = np.random.default_rng(_SEED).choice(len(table), rows, replace=False)
        table = [table[row] for row in sorted(chosen)]
    cells = np.array(table)
    features = np.hstack([_numbers(column) for column in cells[:, :_LABEL].T])
    label = (cells[:, _LABEL] != _NORMAL).astype(np.int64)
    return {"features": np.log1p(np.abs(features)).astype(np.float32), "label": label}


def _numbers(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A column of numbers as they are, or a column for each of its symbols; (rows, 1 or more)."""
    try:
        return column.astype(np.float64)[:, None]
    except ValueError:
        of_symbols: np.ndarray[Any, Any] = column[:, None] == np.unique(column)
        return of_symbols.astype(np.float64)


def job_of(case: Case, features: int, given: argparse.Namespace) -> JobSpec:
    """The job of a case, which drains by itself."""
    return spec_of(
        {"features": {"dtype": "float32", "shape": [features]}, "label": {"dtype": "int64"}},
        name=case.name,
        streams=list(case.streams),
        task={"name": given.task, "classes": 2},
        optimizer={"name": "sgd", "learning_rate": given.learning_rate},
        batch_size=given.batch_size,
        group_size=given.group_size,
        batch_linger_s=1.0,
        group_linger_s=1.0,
        hot_snapshot={"every_s": 0.3},
    )


def measure(
    case: Case, records: Records, held_out: Records, on: Servers, given: argparse.Namespace
) -> dict[str, Any]:
    """Let one job learn all of its streams, and ask its model about what is held out.

    Raises:
        NotMeasuredError: If it does not drain, or a process ends.
    """
    log = open_log(on.settings, "load")
    spec = job_of(case, records["features"].shape[1], given)
    codec = codec_of(spec)
    partitions = 1
    for stream, rows in case.streams.items():
        values = codec.encode(take(records, rows))
        if given.kafka == "embedded":
            partitions = partitions_for(values, len(values), embedded=True)
        produce(log, stream, partitions, values, len(values))
    job = CountingJob(spec, on.settings, log, partitions)
    started = monotonic()
    try:
        await_until(job.drained, _DRAIN_S, f"{case.name} drains")
    except NotMeasuredError as error:
        raise NotMeasuredError(f"{error}; {job.behind()}") from error
    seconds = monotonic() - started
    proof = job.audit()
    weights = job.weights(proof)
    task = task_of(spec, ())
    asked = concatenate([held_out])
    found = evaluate(task, FlatModel(build_model(task, spec.seed)), weights, asked, 1_000)
    samples = sum(update.samples for update in proof.updates)
    if samples != sum(map(len, case.streams.values())):
        raise NotMeasuredError(f"{case.name} learned {samples:,} records; {job.behind()}")
    on.stop_jobs(case.name)
    return {
        "case": case.name,
        "accuracy": found["accuracy"],  # on held-out rows
        "updates": len(proof.updates),
        "samples": samples,
        "seconds": seconds,
        "streams": {stream: len(rows) for stream, rows in case.streams.items()},
    }


def cases_of(labels: np.ndarray[Any, Any], trained: np.ndarray[Any, Any]) -> tuple[Case, Case]:
    """One shuffled topic, and the same rows as two streams."""
    shuffled = np.random.default_rng(_SEED + 1).permutation(trained)
    streams = {
        "site-normal": trained[labels[trained] == 0],
        "site-attack": trained[labels[trained] == 1],
    }
    return Case("one-shuffled-topic", {"shuffled": shuffled}), Case("two-streams", streams)


def main() -> int:
    """Measure, report, judge."""
    example = "python load/fairness.py --workers 2 --json out/fairness.json"
    parser = report.parser(__doc__, example)
    parser.add_argument("--data", type=Path, default=_DATA, help="NSL-KDD's CSV, gzipped or not")
    parser.add_argument("--rows", type=int, help="use that many of its rows [default: all]")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--task", choices=["logistic-regression", "tabular-mlp"], default="logistic-regression"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="b")
    parser.add_argument("--group-size", type=int, default=4, help="K")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of plain SGD")
    given = parser.parse_args()
    machine = report.machine()
    records = connections(given.data, given.rows)
    order = np.random.default_rng(_SEED).permutation(count(records))
    trained = np.sort(order[: int(_TRAINED * len(order))])
    held_out = take(records, np.sort(order[len(trained) :]))
    found = list[dict[str, Any]]()
    with ExitStack() as stack:
        on = stack.enter_context(servers(given.kafka))
        services = [on.start("coordinator", "coordinator")]
        services += [on.start("worker", f"worker-{number}") for number in range(given.workers)]
        stack.callback(stop_all, services)
        for case in cases_of(records["label"], trained):
            try:
                found.append(measure(case, records, held_out, on, given))
            except NotMeasuredError:
                check(services)
                raise
    columns = {"accuracy": ".3f", "updates": "d", "samples": ",", "seconds": ".1f"}
    rows = [
        (each["case"], *(format(each[key], form) for key, form in columns.items()))
        for each in found
    ]
    title = (
        f"NSL-KDD, {given.task}, b={given.batch_size}, K={given.group_size}, {on.kafka},"
        f" {given.workers} workers"
    )
    report.draw(title, ("", "held-out accuracy", "updates", "records", "seconds"), rows)
    shuffled, streams = (measured["accuracy"] for measured in found)
    worse = shuffled - streams
    words = f"two streams are worse by {worse:.3f}, at most {_AT_MOST_WORSE}"
    result = {"kafka": on.kafka, "worse": worse, "measurements": found}
    return report.conclude(given.json, machine, result, [words] * (worse > _AT_MOST_WORSE))


if __name__ == "__main__":
    sys.exit(report.run(main))
