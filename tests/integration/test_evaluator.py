"""An evaluator beside a training job, as processes on servers, reports true results."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.core.audit import audit
from common.core.messages import Drifted, Evaluated, ModelId
from common.data.codecs import codec_of
from common.embedded.services import EmbeddedService, stop_all
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.kafka.names import control_topic, updates_topic
from common.kafka.opening import open_log
from common.kafka.port import NewTopic
from common.kafka.read import read_decoded
from common.learning.checkpoint import weights_in
from common.learning.evaluate import evaluate
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model, task_of
from common.redis.board import open_board
from common.wire.messages import decode_audit, decode_claim
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.config.settings import Settings
    from common.core.messages import AuditRecord
    from common.data.fields import Columns

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

EVERY = 5  # updates
PER_UPDATE = 128  # K * b
HELD_OUT = 500


class Training:
    """A job on two streams that only share the model.

    Records of one stream have a random number as their first feature, those of the other as their
    second. The label is the number's sign, until a test swaps the labels.
    """

    def __init__(self, name: str, settings: Settings, folder: Path) -> None:
        self._settings = settings.model_copy(update={"threads": 1})
        self._folder = folder
        self.streams = (f"{name}-a", f"{name}-b")
        self.spec = parse_job(
            f"""
            name: {name}
            streams: [{", ".join(self.streams)}]
            records:
              codec: tensor
              fields: {{features: {{dtype: float32, shape: [2]}}, label: {{dtype: int64}}}}
            task: {{name: logistic-regression, classes: 2}}
            batch_size: 32
            group_size: 4
            optimizer: {{name: sgd, learning_rate: 1.0}}
            evaluation:
              every_updates: {EVERY}
              stream: {name}-held-out
              records: {HELD_OUT}
            """.replace("\n            ", "\n")
        )
        self.log = open_log(settings)
        for stream in (*self.streams, f"{name}-held-out"):
            self.log.create_topics([NewTopic(stream)])
        with closing(JobOperations(self.log)) as job_store:
            self.first = job_store.submit(self.spec).first
        self.board = open_board(settings, name)
        self._writer = self.log.writer()
        self._chance = np.random.default_rng(1)
        self.offered = dict[ModelId, bytes]()
        self.held_out = self._records(0, HELD_OUT)
        self._write(f"{name}-held-out", self.held_out)
        self._services = list[EmbeddedService]()
        for kind in ("coordinator", "worker"):
            self.start(kind, f"{kind[0]}1")

    def start(self, kind: str, name: str) -> EmbeddedService:
        """Start a process."""
        service = EmbeddedService(kind, name, self._settings, self._folder, forks=True)
        self._services.append(service)
        return service

    def close(self) -> None:
        """Stop all processes, and the job."""
        with closing(JobOperations(self.log)) as job_store:
            job_store.patch(self.spec.name, "the test is over", wanted="stopped")
        stop_all([each for each in self._services if each.exit_code is None])
        self._writer.close()
        self.board.close()

    def produce(self, updates: int, *, turned: bool = False) -> None:
        """Write records for this number of updates. `turned` swaps the second stream's labels."""
        each = updates * PER_UPDATE // 2
        for index, stream in enumerate(self.streams):
            self._write(stream, self._records(index, each, turned=turned and index == 1))

    def train(self, updates: int, *, turned: bool = False) -> None:
        """Write in steps, so that each version is evaluated before the next is offered."""
        for _ in range(updates // EVERY):
            before = len(self.evaluations())
            self.produce(EVERY, turned=turned)
            await_condition(lambda n=before: len(self.evaluations()) > n, "it is evaluated")  # type: ignore[misc]

    def evaluations(self) -> list[Evaluated]:
        """Return results on the test set. Records which versions were offered."""
        found = self.board.offered_model()
        if found is not None:
            self.offered[found[0]] = found[1]
        return [each for _, each in self.updates() if isinstance(each, Evaluated) and each.test]

    def updates(self) -> list[tuple[int, AuditRecord | None]]:
        """Read the updates topic."""
        return read_decoded(self.log, updates_topic(self.spec.name), decode_audit)

    def _records(self, place: int, count: int, *, turned: bool = False) -> Columns:
        features = np.zeros((count, 2), np.float32)
        features[:, place] = self._chance.normal(size=count)
        label = (features.sum(1) > 0).astype(np.int64)
        return {"features": features, "label": 1 - label if turned else label}

    def _write(self, topic: str, columns: Columns) -> None:
        for value in codec_of(self.spec.records).encode(columns):
            self._writer.append(topic, value)
        assert self._writer.flush(30.0)


@pytest.fixture
def training(
    settings: Settings, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Training]:
    made = Training(f"judged-{len(request.node.name)}", settings, tmp_path)
    yield made
    made.close()


def test_evaluations_are_correct_and_find_the_stream_that_changed(
    training: Training,
) -> None:
    training.start("evaluator", "e1")
    training.train(60)
    training.train(30, turned=True)

    records = training.updates()
    evaluations = training.evaluations()
    # The model learns, and the results on the test set improve.
    best = max(each.test["accuracy"] for each in evaluations)
    assert evaluations[0].records == HELD_OUT
    assert best > 0.95
    assert all(each.model.version % EVERY == 0 for each in evaluations)
    # Other code computes the same results from the same weights.
    task = task_of(training.spec, ())
    model = FlatModel(build_model(task, 0))
    checked = 0
    for each in evaluations:
        weights = training.offered.get(each.model)
        if weights is not None:
            expected = evaluate(task, model, weights_in(weights)[0], training.held_out, HELD_OUT)
            assert each.test == pytest.approx(expected, rel=1e-5)
            checked += 1
    assert checked >= 5
    # Both streams' records were predicted before the model learned from them.
    predicted = [
        each for _, each in records if isinstance(each, Evaluated) and len(each.prequential) == 2
    ]
    assert len(predicted) >= 10
    # One stream drifted.
    drifts = [each for _, each in records if isinstance(each, Drifted)]
    assert {drift.stream for drift in drifts} == {training.streams[1]}
    assert all(drift.before < drift.after for drift in drifts)
    assert drifts[0].model.version > 50
    # The evaluator's records change nothing in the audit.
    claims = read_decoded(training.log, control_topic(training.spec.name), decode_claim)
    whole = audit(training.first, claims, records)
    bare = [(at, None if isinstance(it, Evaluated | Drifted) else it) for at, it in records]
    assert whole.flaws == ()
    assert whole == audit(training.first, claims, bare)


@pytest.mark.parametrize("settings", ["embedded"], indirect=True)
def test_killed_evaluator_resumes_with_the_newest_version(training: Training) -> None:
    first = training.start("evaluator", "e1")
    training.train(20)
    first.kill()
    before = len(training.evaluations())
    training.produce(4 * EVERY)  # no evaluator evaluates these
    await_condition(
        lambda: max(model.version for model in _seen(training)) >= 30,
        "versions pass without evaluation",
    )
    training.start("evaluator", "e2")
    await_condition(lambda: len(training.evaluations()) > before, "the newest version is evaluated")
    training.train(10)

    versions = [each.model.version for each in training.evaluations()]
    assert versions == sorted(set(versions))  # none twice
    assert versions[before] >= 30


def _seen(training: Training) -> dict[ModelId, bytes]:
    training.evaluations()
    return training.offered
