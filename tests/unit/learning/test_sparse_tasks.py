"""Sparse tasks learn the same as plain loops over the rows, and send only touched rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import scipy.sparse
import torch

from common.core.vectors import SparseVector
from common.data.codecs import codec_of
from common.data.columns import bucket_of
from common.data.records import batches
from common.errors import UserError
from common.jobs.build import trainer_of
from common.jobs.job_file import parse_job
from common.learning.gradients import GradientComputer
from common.learning.optimizers import OptimizerSettings
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model, make_task
from common.learning.trainer import Trainer
from common.wire.vectors import smallest
from load.harness.rows import read_clicks, read_ratings
from tests.unit.learning.examples import CPU

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.core.messages import Vector
    from common.data.records import Records
    from common.learning.tasks import Task

DATA = Path(__file__).parents[4] / "shared" / "data"
CLICKS = DATA / "ctr" / "criteo-kaggle-train-head-1400.csv.gz"
RATINGS = DATA / "ratings" / "ml-latest-small-centred.csv.gz"
FEATURES, B, K = 10_000, 32, 4
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def clicks(*, real: bool) -> Records:
    if real:
        return read_clicks(CLICKS, FEATURES)
    random = np.random.default_rng(0)
    return {
        "index": (random.zipf(1.3, (600, 39)) % FEATURES).astype(np.int32),
        "value": random.exponential(size=(600, 39)).astype(np.float32),
        "label": random.integers(0, 2, 600),
    }


def ratings(*, real: bool) -> Records:
    if real:
        return read_ratings(RATINGS)
    random = np.random.default_rng(0)
    return {
        "user": random.integers(0, 300, 2000).astype(np.int32),
        "item": random.integers(0, 200, 2000).astype(np.int32),
        "rating": random.normal(size=2000).astype(np.float32),
    }


def real_or_made(path: Path) -> pytest.MarkDecorator:
    there = pytest.mark.skipif(not path.exists(), reason="the recorded rows are not here")
    return pytest.mark.parametrize("real", [False, pytest.param(True, marks=there)])


def learned(
    task: Task, records: Records, optimizer: OptimizerSettings, updates: int
) -> tuple[Vector, Vector, list[Any]]:
    """Return first and last weights of this many updates of K batches, and the vectors sent."""
    computer = GradientComputer(task, build_model(task, 0), CPU)
    first = computer.model.vector.copy()
    trainer = Trainer(first, computer.model.parameter_count, optimizer)
    sent, stream = [], batches(records, B, np.random.default_rng(0), shuffled=False)
    for number in range(updates):
        computer.load(trainer.weights())
        for batch in (next(stream) for _ in range(K)):
            found = computer.compute([batch])
            sent.append(smallest(found.vector))
            trainer.add(number, sent[-1], found.samples)
        trainer.apply(number)
    return first, np.frombuffer(bytes(trainer.weights()), np.float32), sent


@real_or_made(CLICKS)
def test_sparse_logistic_regression_equals_a_plain_loop(*, real: bool) -> None:
    records = clicks(real=real)
    task = make_task("sparse-logistic", {"features": FEATURES, "entries": 39})
    _, found, sent = learned(task, records, OptimizerSettings("sgd", 0.1), 4)

    count = len(records["label"])
    rows = scipy.sparse.csr_matrix(
        (
            records["value"].ravel().astype(np.float64),
            records["index"].ravel(),
            np.arange(0, 39 * count + 1, 39),
        ),
        shape=(count, FEATURES),
    )
    weights, bias = np.zeros(FEATURES), 0.0
    for start in range(0, 4 * K * B, K * B):
        some, labels = rows[start : start + K * B], records["label"][start : start + K * B]
        errors = 1 / (1 + np.exp(-(some @ weights + bias))) - labels
        weights, bias = weights - 0.1 * (some.T @ errors) / (K * B), bias - 0.1 * errors.mean()
    np.testing.assert_allclose(found, np.append(weights, bias), rtol=1e-4, atol=1e-6)
    touched = max(len(np.unique(records["index"][at : at + B])) for at in range(0, 4 * K * B, B))
    assert all(isinstance(vector, SparseVector) for vector in sent)
    assert max(vector.values.size for vector in sent) <= touched + 1


@real_or_made(RATINGS)
def test_matrix_factorisation_equals_a_plain_loop(*, real: bool) -> None:
    records = ratings(real=real)
    users, items = (int(records[name].max()) + 1 for name in ("user", "item"))
    options = {"users": users, "items": items, "rank": 5, "regularisation": 0.08}
    settings = OptimizerSettings("momentum", 2.0, {"momentum": 0.9, "nesterov": True})
    task = make_task("matrix-factorisation", options)
    first, found, sent = learned(task, records, settings, 4)

    rows = first.astype(np.float64).reshape(-1, 5)  # users, then items
    speed = np.zeros_like(rows)
    for start in range(0, 4 * K * B, K * B):
        user, item, rating = (
            records[name][start : start + K * B] for name in ("user", "item", "rating")
        )
        gradient = np.zeros_like(rows)
        for who, what, how in zip(user, users + item, rating, strict=True):
            error = rows[who] @ rows[what] - how
            gradient[who] += error * rows[what] + 0.08 * rows[who]
            gradient[what] += error * rows[who] + 0.08 * rows[what]
        gradient /= K * B
        speed = 0.9 * speed + gradient
        rows -= 2.0 * (gradient + 0.9 * speed)
    np.testing.assert_allclose(found.reshape(-1, 5), rows, rtol=1e-4, atol=1e-6)
    assert {vector.values.shape[1] for vector in sent} == {5}
    assert max(len(vector.blocks) for vector in sent) <= 2 * B


def tensors(**columns: npt.NDArray[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(column) for name, column in columns.items()}


@pytest.mark.parametrize(
    ("name", "options", "wrong", "expected"),
    [
        (
            "sparse-logistic",
            {"features": 8, "entries": 1},
            {"index": [[8]]},
            "index: a number is outside",
        ),
        (
            "sparse-logistic",
            {"features": 8, "entries": 1},
            {"index": [[-1]]},
            "index: a number is outside",
        ),
        (
            "sparse-logistic",
            {"features": 8, "entries": 1},
            {"label": [2]},
            "label: a number is outside",
        ),
        (
            "matrix-factorisation",
            {"users": 8, "items": 8},
            {"user": [9]},
            "user: a number is outside",
        ),
        (
            "matrix-factorisation",
            {"users": 8, "items": 8},
            {"item": [-2]},
            "item: a number is outside",
        ),
    ],
)
def test_index_without_a_weight_is_rejected_by_field(
    name: str, options: dict[str, int], wrong: dict[str, list[Any]], expected: str
) -> None:
    task = make_task(name, options)
    records = {"index": [[1]], "label": [1], "user": [1], "item": [1]} | wrong
    columns = tensors(
        **{field: np.array(column) for field, column in records.items()},
        value=np.ones((1, 1), np.float32),
        rating=np.ones(1, np.float32),
    )
    with pytest.raises(ValueError, match=expected):
        task.losses(task.forward(build_model(task, 0), columns), columns)


def test_entry_of_value_0_has_no_gradient() -> None:
    task = make_task("sparse-logistic", {"features": 1000, "entries": 2})
    computer = GradientComputer(task, build_model(task, 0), CPU)
    batch = {
        "index": np.array([[5, 0]]),
        "value": np.array([[2, 0]], np.float32),
        "label": np.array([1]),
    }
    assert np.flatnonzero(computer.compute([batch]).vector).tolist() == [5, 1000]  # and the bias


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_sparse_gradient_bits_do_not_depend_on_earlier_computations(device: str) -> None:
    where = torch.device(device)
    for task, records in (
        (make_task("sparse-logistic", {"features": FEATURES, "entries": 39}), clicks(real=False)),
        (make_task("matrix-factorisation", {"users": 300, "items": 200}), ratings(real=False)),
    ):
        fresh, used = (GradientComputer(task, build_model(task, 0), where) for _ in range(2))
        used.compute([records])
        assert np.array_equal(used.compute([records]).vector, fresh.compute([records]).vector)


JOB = """
name: clicks
streams: [clicks]
records:
  fields:
    index: {dtype: int32, shape: [39]}
    value: {dtype: float32, shape: [39]}
    label: {dtype: int64}
task: {name: sparse-logistic, features: 1000}
batch_size: 32
group_size: 4
optimizer: {learning_rate: 0.1}
"""


def test_sparse_task_takes_features_from_the_job_and_entries_from_records() -> None:
    spec = parse_job(JOB)
    assert spec.task_options == {"features": 1000, "entries": 39}
    assert len(trainer_of(spec, ())().weights()) == 4 * 1001


def test_sparse_task_takes_its_features_from_the_hash_buckets() -> None:
    hashed = JOB.replace("  fields:", "  codec: json\n  hashed: {buckets: 500}\n  fields:")
    spec = parse_job(hashed.replace(", features: 1000", ""))
    assert spec.task_options == {"features": 500, "entries": 39}
    assert '"hashed":{"buckets":500}' in spec.model_dump_json()
    decoded = codec_of(spec.records).decode([b'{"label": 1, "city": "Pune"}'])
    assert decoded.records["index"][0, 0] == bucket_of("city", "Pune", 500)
    assert "hashed" not in parse_job(JOB).model_dump_json()
    with pytest.raises(UserError, match=r"task.features: must be 500 as in the records, got 1000"):
        parse_job(hashed)


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("codec: json", "codec: tensor"),
        ("index: {dtype: int32", "index: {dtype: int16"),
        ("value: {dtype: float32", "value: {dtype: uint8"),
        ("value: {dtype: float32, shape: [39]", "value: {dtype: float32, shape: [38]"),
        ("shape: [39]", "shape: [39, 1]"),
        ("shape: [39]", "shape: []"),
    ],
)
def test_hashed_features_with_unsuitable_fields_are_rejected(there: str, instead: str) -> None:
    hashed = JOB.replace("  fields:", "  codec: json\n  hashed: {buckets: 500}\n  fields:")
    with pytest.raises(UserError, match="records: hashed: requires `codec: json` and two fields"):
        parse_job(hashed.replace(", features: 1000", "").replace(there, instead))


def test_rows_without_ratings_keep_their_initial_weights() -> None:
    task = make_task("matrix-factorisation", {"users": 500, "items": 400, "rank": 3})
    first, found, _ = learned(task, ratings(real=False), OptimizerSettings("sgd", 1.0), 1)
    model = FlatModel(build_model(task, 0))
    assert np.array_equal(first, model.vector)
    assert np.array_equal(found.reshape(-1, 3)[300:500], first.reshape(-1, 3)[300:500])
