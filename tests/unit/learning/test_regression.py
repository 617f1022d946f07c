"""`linear-regression` learns what scikit-learn's `SGDRegressor` learns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import SGDRegressor
from sklearn.preprocessing import StandardScaler

from common.core.settings import RateSchedule
from common.errors import UserError
from common.jobs.job_file import parse_job
from common.learning.gradients import GradientComputer
from common.learning.optimizers import OptimizerSettings
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model, make_task, task_of
from common.learning.trainer import Trainer
from tests.ulps import assert_within_ulps

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec

RATE = 0.02
# `invscaling` of scikit-learn divides the rate of step t by t to the power of 0.5.
SCHEDULE = RateSchedule("inverse_sqrt", updates=1)
PASSES = 20
# Each of 442 steps rounds an error, which may be as large as the largest target.
ULPS = 8
CASES = [
    ("squared", None, {"loss": "squared_error"}),
    ("huber", 100.0, {"loss": "huber", "epsilon": 100.0}),
    ("huber", None, {"loss": "huber", "epsilon": 1.0}),
    ("absolute", None, {"loss": "epsilon_insensitive", "epsilon": 0.0}),
]


def diabetes() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return ten features of 442 patients, (442, 10), and the disease's progression, (442,)."""
    features, target = load_diabetes(return_X_y=True, scaled=False)
    return StandardScaler().fit_transform(features).astype(np.float32), target.astype(np.float32)


def learned(loss: str, delta: float | None, passes: int) -> npt.NDArray[np.float32]:
    """Return the weights and the bias, (11,), after a step for each record."""
    features, target = diabetes()
    options: dict[str, Any] = {"features": 10, "target": "progression", "loss": loss}
    task = make_task("linear-regression", options | ({} if delta is None else {"delta": delta}))
    network = build_model(task, 0)
    model = FlatModel(network)
    settings = OptimizerSettings("sgd", RATE)
    trainer = Trainer(model.vector.copy(), model.parameter_count, settings)
    computer = GradientComputer(task, network, torch.device("cpu"))
    for step in range(passes * len(target)):
        at = step % len(target)
        record = {"features": features[at : at + 1], "progression": target[at : at + 1]}
        computer.load(trainer.weights())
        found = computer.compute([record])
        assert isinstance(found.vector, np.ndarray)
        trainer.step(torch.from_numpy(found.vector), found.samples, scale=SCHEDULE.share(step))
    return np.frombuffer(bytes(trainer.weights()), np.float32)


def of_scikit_learn(options: dict[str, Any], passes: int) -> SGDRegressor:
    """Return the model of scikit-learn after the same steps, computed in float64."""
    features, target = diabetes()
    model = SGDRegressor(
        **options,
        penalty=None,
        learning_rate="invscaling",
        eta0=RATE,
        power_t=0.5,
        max_iter=passes,
        tol=None,
        shuffle=False,
    )
    return model.fit(features.astype(np.float64), target.astype(np.float64))


@pytest.mark.parametrize(("loss", "delta", "options"), CASES)
def test_one_pass_gives_the_weights_of_scikit_learn(
    loss: str, delta: float | None, options: dict[str, Any]
) -> None:
    model, (_, target) = of_scikit_learn(options, 1), diabetes()
    weights = [*model.coef_, *model.intercept_]
    assert_within_ulps(learned(loss, delta, 1), weights, ULPS, target.max())


@pytest.mark.parametrize(("loss", "delta", "options"), CASES[:2])
def test_several_passes_explain_as_much_variance_as_scikit_learn(
    loss: str, delta: float | None, options: dict[str, Any]
) -> None:
    features, target = diabetes()
    *weights, bias = learned(loss, delta, PASSES)
    residual = target - (features @ np.array(weights) + bias)
    explained = 1 - (residual**2).mean() / target.var()
    theirs = of_scikit_learn(options, PASSES).score(features, target)
    assert theirs > 0.4
    assert abs(explained - theirs) < 0.02


JOB = """
name: houses
streams: [houses]
records:
  codec: json
  fields:
    area: {dtype: float32}
    town: {dtype: float32, one_hot: [a, b, c]}
    price: {dtype: float64}
task: {name: linear-regression, target: price, TASK}
batch_size: 2
group_size: 1
optimizer: {name: sgd, learning_rate: 0.1}
"""


def job(task: str) -> JobSpec:
    return parse_job(JOB.replace("TASK", task))


@pytest.mark.parametrize(
    ("task", "count"),
    [("loss: huber", 4), ("inputs: [town], normalise: true", 3), ("inputs: [area]", 1)],
)
def test_fields_besides_the_target_are_joined(task: str, count: int) -> None:
    spec = job(task)
    assert spec.task_options["features"] == count
    made = task_of(spec, ())
    records = {
        "area": torch.ones(2),
        "town": torch.eye(3)[:2],
        "price": torch.tensor([3.0, -4.0], dtype=torch.float64),
    }
    outputs = made.forward(build_model(made, 0), records)
    assert outputs.tolist() == [0, 0]
    half = [2.5, 3.5] if "huber" in task else [4.5, 8.0]
    assert made.losses(outputs, records).tolist() == half
    assert made.metrics(outputs, records)["absolute_error"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("target: cost", "records.fields.cost: is missing; linear-regression requires it"),
        ("target: town", "records.fields.town: must be a number without a shape"),
        ("inputs: [rooms]", "task.inputs: must be fields of the records"),
        ("target: price, loss: hinge", "hinge"),
        ("target: price, delta: 2", "delta: requires `loss: huber`, got 'squared'; remove it"),
    ],
)
def test_invalid_regression_is_refused_by_field(task: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        parse_job(JOB.replace("target: price, TASK", task))
