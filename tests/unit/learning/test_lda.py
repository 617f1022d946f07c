"""LDA makes the updates of Hoffman, Blei and Bach, written here as in their paper."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.special import gammaln, psi

from common.data.readers import read_records
from common.data.records import batches
from common.errors import UserError
from common.jobs.job_file import parse_job
from common.learning.gradients import GradientComputer
from common.learning.optimizers import OptimizerSettings
from common.learning.tasks import build_model, make_task
from common.learning.trainer import Trainer
from tests.ulps import assert_within_ulps
from tests.unit.learning.examples import CPU

if TYPE_CHECKING:
    from common.data.records import Records

ARTICLES = Path(__file__).parents[4] / "shared" / "data" / "bag-of-words" / "ap.dat.gz"
ROUND, RHO, TOPICS, B, K = 0, 0.3, 6, 4, 2
THERE = pytest.mark.skipif(not ARTICLES.exists(), reason="the recorded articles are not here")
Numbers: TypeAlias = npt.NDArray[np.float64]


def documents(*, real: bool) -> tuple[Records, int]:
    """Return documents, and the size of their vocabulary."""
    if real:
        return read_records(ARTICLES), 10_473
    random = np.random.default_rng(0)
    several = [random.choice(200, random.integers(3, 30), replace=False) for _ in range(80)]
    index, value = np.zeros((80, 30), np.int32), np.zeros((80, 30), np.float32)
    for row, words in enumerate(several):
        index[row, : len(words)] = words
        value[row, : len(words)] = random.integers(1, 5, len(words))
    return {"index": index, "value": value}, 200


def e_step(
    topics: Numbers, words: npt.NDArray[np.int32], counts: Numbers, alpha: float
) -> tuple[Numbers, float]:
    """Run Algorithm 2, lines 4 to 10; return the document's statistics and part of the bound."""
    gamma = np.ones(TOPICS)
    beta = np.exp(psi(topics) - psi(topics.sum(1, keepdims=True)))[:, words]
    for _ in range(100):
        last = gamma
        theta = np.exp(psi(gamma) - psi(gamma.sum()))
        gamma = alpha + theta * (beta @ (counts / (theta @ beta)))
        if np.abs(gamma - last).mean() < 1e-3:
            break
    theta = np.exp(psi(gamma) - psi(gamma.sum()))
    bound = counts @ np.log(theta @ beta) + (alpha - gamma) @ np.log(theta)
    bound += (gammaln(gamma) - gammaln(alpha)).sum() + gammaln(alpha * TOPICS)
    statistics = np.zeros_like(topics)
    statistics[:, words] = theta[:, None] * beta * (counts / (theta @ beta))
    return statistics, bound - gammaln(gamma.sum())


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=THERE)])
def test_lda_updates_equal_online_variational_bayes(*, real: bool) -> None:
    records, words = documents(real=real)
    entries = records["index"].shape[1]
    options = {"words": words, "entries": entries, "topics": TOPICS, "documents": 2000}
    task = make_task("lda", {**options, "alpha": 0.1, "eta": 0.05})
    computer = GradientComputer(task, build_model(task, 0), CPU)
    trainer = Trainer(computer.model.vector, words * TOPICS, OptimizerSettings("sgd", RHO))
    topics = computer.model.vector.astype(np.float64).reshape(words, TOPICS).T  # lambda
    stream = batches(records, B, np.random.default_rng(0), shuffled=False)
    for _ in range(3):
        computer.load(trainer.weights())
        statistics, bounds, costs = np.zeros_like(topics), list[float](), 0.0
        for batch in islice(stream, K):
            found = computer.compute([batch])
            trainer.add(ROUND, found.vector, found.samples)
            costs += found.loss_sum
            for index, counts in zip(batch["index"], batch["value"].astype(float), strict=True):
                there = counts > 0
                part, bound = e_step(topics, index[there], counts[there], 0.1)
                statistics += part
                bounds.append(-bound / counts.sum())
        trainer.apply(ROUND)
        topics = (1 - RHO) * topics + RHO * (0.05 + 2000 / (K * B) * statistics)  # eq. 5
        assert costs == pytest.approx(sum(bounds), rel=1e-3)
        learned = np.frombuffer(bytes(trainer.weights()), np.float32).reshape(words, TOPICS).T
        # An E-step ends by a comparison, which float32 and float64 may decide one step apart.
        assert np.abs(learned - topics).sum() < 2e-3 * topics.sum()


def test_lda_document_does_not_depend_on_its_batch() -> None:
    records, words = documents(real=False)
    task = make_task("lda", {"words": words, "entries": 30, "topics": 4, "documents": 80})
    module = build_model(task, 0)
    together = {name: torch.from_numpy(column) for name, column in records.items()}
    wanted = task.forward(module, together)
    for row in (0, 7, 79):
        alone = {name: column[row : row + 1] for name, column in together.items()}
        assert_within_ulps(task.forward(module, alone)[0].detach(), wanted[row].detach(), 4)


def test_lda_cost_falls_over_repeated_updates() -> None:
    records, words = documents(real=False)
    task = make_task("lda", {"words": words, "entries": 30, "topics": 4, "documents": 80})
    computer = GradientComputer(task, build_model(task, 0), CPU)
    trainer = Trainer(computer.model.vector, words * 4, OptimizerSettings("sgd", 0.5))
    costs = []
    for _ in range(10):
        computer.load(trainer.weights())
        found = computer.compute([records])
        costs.append(found.loss_sum / found.samples)
        trainer.add(ROUND, found.vector, found.samples)
        trainer.apply(ROUND)
    assert costs[-1] < costs[0] - 0.1


@pytest.mark.parametrize(
    ("index", "value", "weight", "expected"),
    [
        (200, 1.0, 1.0, "index: a number is outside 0..199"),
        (3, -1.0, 1.0, "a count is below zero"),
        (3, 1.0, 0.0, "use a smaller learning rate"),
    ],
)
def test_invalid_lda_records_and_weights_are_rejected(
    index: int, value: float, weight: float, expected: str
) -> None:
    task = make_task("lda", {"words": 200, "entries": 1, "topics": 4, "documents": 80})
    module = build_model(task, 0)
    with torch.no_grad():
        next(module.parameters())[7] *= weight
    with pytest.raises(ValueError, match=expected):
        task.forward(module, {"index": torch.tensor([[index]]), "value": torch.tensor([[value]])})


JOB = """
name: topics
streams: [articles]
records: {fields: {index: {dtype: int32, shape: [9]}, value: {dtype: float32, shape: [9]}}}
task: {name: lda, words: 200, topics: 4, documents: 80}
batch_size: 32
group_size: 4
optimizer: {learning_rate: 0.5}
"""


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("{name: adam, learning_rate: 0.5}", "{learning_rate: 0.5}"),
        ("{learning_rate: 1.5}", "{learning_rate: 0.5}"),
        ("{learning_rate: 0.5, weight_decay: 0.1}", "{learning_rate: 0.5}"),
        ("{learning_rate: 0.5}\nreduction: sum", "{learning_rate: 0.5}"),
    ],
)
def test_lda_job_with_an_unsupported_optimizer_is_rejected(wrong: str, right: str) -> None:
    assert parse_job(JOB).task_options["entries"] == 9
    with pytest.raises(UserError, match="optimizer: lda requires `name: sgd` without weight_decay"):
        parse_job(JOB.replace(right, wrong))
