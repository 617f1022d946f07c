"""Training on tables by a job file of docs/examples alone is as good as scikit-learn's.

Both get the same mini-batches in the same order, and predict each before they train on it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.feature_extraction import FeatureHasher
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import roc_auc_score
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from common.core.messages import Schema
from common.data.codecs import codec_of
from common.data.fields import Columns, concatenate
from common.data.registered import RegisteredCodec
from common.data.tables import row_records
from common.jobs.build import trainer_of
from common.jobs.job_file import parse_job
from common.learning.gradients import GradientComputer
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model, task_of
from tests.tables import job_file, needs_tables, table
from tests.unit.data.test_registered import framed, message_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.core.messages import SchemaKind

pytestmark = needs_tables
# Allowed lead of the baseline.
BETTER = 0.01


class Learned(NamedTuple):
    """Result of training on a table."""

    rows: list[bytes]  # sent by `doll produce --rows`
    records: Columns
    # (n,) scores of class 1, by the version before each mini-batch.
    scores: npt.NDArray[np.float64]
    update: int  # records of a mini-batch


def learned(
    example: str, count: int, leave_out: Sequence[str] = (), texts: Sequence[str] = ()
) -> Learned:
    """Train on the rows of a table as a worker and a coordinator would."""
    spec = parse_job(job_file(example).read_text())
    rows = row_records(table(example, count), example, leave_out, texts)["row"].tolist()
    decoded = codec_of(spec.records).decode(rows)
    assert decoded.skipped == []
    records = concatenate([decoded.records])
    task, trainer = task_of(spec, ()), trainer_of(spec, ())()
    model = FlatModel(build_model(task, spec.seed))
    computer = GradientComputer(task, build_model(task, spec.seed), torch.device("cpu"))
    update, scores = spec.batch_size * spec.group_size, list[npt.NDArray[np.float64]]()
    for begin in range(0, len(rows), update):
        batches = [
            {name: column[start : start + spec.batch_size] for name, column in records.items()}
            for start in range(begin, min(begin + update, len(rows)), spec.batch_size)
        ]
        model.load(trainer.weights())
        model.module.eval()
        with torch.inference_mode():
            for batch in batches:
                tensors = {name: torch.from_numpy(column) for name, column in batch.items()}
                outputs = task.forward(model.module, tensors)
                scores.append(
                    (outputs if outputs.ndim == 1 else outputs[:, 1] - outputs[:, 0]).numpy()
                )
        computer.load(trainer.weights())
        for batch in batches:
            found = computer.compute([batch])
            trainer.add(begin, found.vector, found.samples)
        trainer.apply(begin)
    return Learned(rows, records, np.concatenate(scores), update)


def baseline(found: Learned, model: Any, features: Any) -> npt.NDArray[np.float64]:  # noqa: ANN401 -- of scikit-learn, which is not typed
    """Return the (n,) decisions of a scikit-learn model, 0 before its first mini-batch."""
    labels, scores = found.records["label"], np.zeros(len(found.rows))
    scaler = StandardScaler() if isinstance(features, np.ndarray) else None
    for begin in range(0, len(labels), found.update):
        part = slice(begin, begin + found.update)
        if begin:
            seen = scaler.transform(features[part]) if scaler else features[part]
            scores[part] = model.predict(seen) if scaler else model.decision_function(seen)
        given = (
            scaler.partial_fit(features[part]).transform(features[part])
            if scaler
            else features[part]
        )
        model.partial_fit(given, labels[part], classes=[0, 1])
    return scores


@pytest.fixture(autouse=True)
def _one_thread() -> Any:  # noqa: ANN401 -- a generator
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_prices_example_is_as_accurate_as_scikit_learn() -> None:
    found = learned("prices", 10_000)
    labels, features = found.records["label"], found.records["features"]
    best = max(
        (
            baseline(found, SGDClassifier(loss="log_loss", random_state=0, **rate), features)
            == labels
        ).mean()
        for rate in ({}, {"learning_rate": "constant", "eta0": 0.01})
    )
    accuracy = ((found.scores > 0) == labels).mean()
    assert accuracy > 0.78
    assert best < accuracy + BETTER


def test_connections_example_is_as_accurate_as_scikit_learn() -> None:
    found = learned("connections", 8_000)
    labels = found.records["label"]
    columns = [
        each.reshape(len(labels), -1) for name, each in found.records.items() if name != "label"
    ]
    model = MLPClassifier((64,), learning_rate_init=3e-3, random_state=0)
    best = (baseline(found, model, np.concatenate(columns, axis=1)) == labels).mean()
    accuracy = ((found.scores > 0) == labels).mean()
    assert accuracy > 0.93
    assert best < accuracy + BETTER


def test_connections_decode_equally_from_json_avro_and_protobuf() -> None:
    """The job files differ only in the codec, so the models must be equal."""
    rows = [
        json.loads(row)
        for row in row_records(table("connections", 499), "connections", ())["row"].tolist()
    ]
    text = job_file("connections").read_text()
    expected = codec_of(parse_job(text).records).decode([json.dumps(row).encode() for row in rows])
    types = [
        (name, "string" if isinstance(cell, str) else ["null", "double"])
        for name, cell in rows[0].items()
    ]
    fields = [{"name": name, "type": type_} for name, type_ in types]
    schema = {"type": "record", "name": "Connection", "fields": fields}
    message, connection = message_of(rows[0])
    written: dict[SchemaKind, tuple[str, list[bytes]]] = {
        "AVRO": (json.dumps(schema), [framed(1, schema, row) for row in rows]),
        "PROTOBUF": (
            message,
            [b"\0\0\0\0\1\0" + connection(**row).SerializeToString() for row in rows],
        ),
    }
    for kind, (described_by, values) in written.items():
        codec = codec_of(parse_job(text.replace("codec: json", f"codec: {kind.lower()}")).records)
        assert isinstance(codec, RegisteredCodec)
        codec.learn(1, Schema(kind, described_by))
        decoded = codec.decode(values)
        assert decoded.skipped == expected.skipped == []
        assert list(decoded.records) == list(expected.records)
        for name, column in expected.records.items():
            np.testing.assert_array_equal(decoded.records[name], column, strict=True)


def test_clicks_example_with_hashing_is_as_accurate_as_scikit_learn() -> None:
    found = learned("clicks", 1_400, ["Id"], ["C*"])
    labels, later = found.records["label"], slice(400, None)
    cells = [json.loads(row) for row in found.rows]
    hashed = FeatureHasher(100_000).transform(
        {
            f"{name}={cell}" if isinstance(cell, str) else name: 1.0
            if isinstance(cell, str)
            else float(np.sign(cell) * np.log1p(abs(cell)))
            for name, cell in row.items()
            if name != "Label" and cell is not None
        }
        for row in cells
    )
    best = max(
        roc_auc_score(labels[later], baseline(found, model, hashed)[later])
        for model in (
            SGDClassifier(loss="log_loss", random_state=0),
            SGDClassifier(loss="log_loss", random_state=0, learning_rate="constant", eta0=0.01),
        )
    )
    auc = roc_auc_score(labels[later], found.scores[later])
    assert auc > 0.65
    assert best < auc + BETTER
