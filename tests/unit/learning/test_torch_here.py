"""Without PyTorch, features that need it fail with an error that names them. The rest works."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from common.errors import UserError
from common.kafka.port import NewTopic
from common.learning.torch_here import need_torch
from common.spot.experiments.experiment import learner_of
from common.spot.experiments.spec import Experiment
from tests.unit.cli.conftest import World
from tests.unit.cli.test_job import JOB
from tests.unit.spot.experiments.test_experiment import SMALL

if TYPE_CHECKING:
    from pathlib import Path

OWN = "my_package.tasks:MyTask"


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Pretend that PyTorch is not installed.
    monkeypatch.setitem(sys.modules, "torch", None)


def test_need_torch_passes_with_torch() -> None:
    need_torch("this")


@pytest.mark.usefixtures("without_torch")
def test_need_torch_without_torch_explains_the_installation() -> None:
    with pytest.raises(UserError, match=r"^this needs PyTorch, .*pip install 'doll\[worker\]'"):
        need_torch("this")


@pytest.mark.usefixtures("without_torch")
def test_job_of_a_built_in_task_is_submitted_without_torch() -> None:
    world = World()
    world.log.create_topics([NewTopic("clinic-a")])
    world.run("job", "submit", "-", typed=JOB)
    assert "digits" in world.run("job", "list").stdout


@pytest.mark.usefixtures("without_torch")
def test_job_of_a_custom_task_is_submitted_unchecked_without_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOLL_TASKS", OWN)
    world = World()
    world.log.create_topics([NewTopic("clinic-a")])
    own = JOB.replace("name: image-classifier, classes: 10", f"entrypoint: '{OWN}'")
    world.run("job", "submit", "-", typed=own)
    assert "digits" in world.run("job", "list").stdout


@pytest.mark.usefixtures("without_torch")
def test_experiment_without_torch_is_rejected_only_if_it_learns(tmp_path: Path) -> None:
    assert learner_of(Experiment.model_validate(SMALL), tmp_path, 0) is None
    learning = Experiment.model_validate({**SMALL, "mode": "protocol", "learning": {}})
    with pytest.raises(UserError, match="a simulation that learns needs PyTorch"):
        learner_of(learning, tmp_path, 0)
