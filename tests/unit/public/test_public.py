"""The package `doll`: its names, and that an import loads only what is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

import doll

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

ROOT = Path(__file__).parents[3]
DOLL = ROOT / "common" / "public" / "doll"
JOB = ROOT / "docs" / "examples" / "digits.yaml"
BATCH = {"x": np.ones((4, 3), np.float32), "y": np.full(4, 2.0, np.float32)}


class Line:
    """A task as a user would write it."""

    def build(self) -> nn.Module:
        """Build three weights and a bias, all of them 0."""
        line = nn.Linear(3, 1)
        nn.init.zeros_(line.weight)
        nn.init.zeros_(line.bias)
        return line

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return predictions (n,)."""
        found: Tensor = module(records["x"]).squeeze(1)
        return found

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return squared errors (n,)."""
        return (outputs - records["y"]) ** 2

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return absolute errors (n,)."""
        return {"absolute_error": (outputs - records["y"]).abs()}


class Mean(Line):
    """Returns one loss for all records."""

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return a mean, which is wrong."""
        return super().losses(outputs, records).mean()


def test_check_task_tries_a_batch_without_any_server() -> None:
    task: doll.Task = Line()
    assert doll.check_task(task, BATCH) == doll.TaskCheck(4, 4, 4.0, {"absolute_error": 2.0})


def test_check_task_accepts_tensors_lists_and_arrays() -> None:
    tensors = {name: torch.from_numpy(column) for name, column in BATCH.items()}
    frozen = {name: column.copy() for name, column in BATCH.items()}
    for column in frozen.values():
        column.flags.writeable = False
    for batch in (tensors, {n: c.tolist() for n, c in BATCH.items()}, frozen):
        assert doll.check_task(Line(), batch) == doll.check_task(Line(), BATCH)
    assert doll.check_task(Line(), {"x": tensors["x"].clone().requires_grad_(), "y": [2.0] * 4})
    wrong: tuple[list[object], ...] = ([[1.0], [1.0, 2.0]], ["a"] * 4, [None] * 4)
    for each in wrong:
        with pytest.raises(doll.UserError, match='batch: "x" cannot be read as numbers'):
            doll.check_task(Line(), {"x": each, "y": [2.0] * 4})


def test_check_task_counts_only_trainable_parameters() -> None:
    class Frozen(Line):
        def build(self) -> nn.Module:
            line = super().build()
            line.get_parameter("weight").requires_grad_(False)  # noqa: FBT003 -- torch's
            return line

    assert doll.check_task(Frozen(), BATCH).parameters == 1


def test_check_task_rejects_reserved_metric_name_and_detached_loss() -> None:
    class Named(Line):
        def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {"loss": outputs - records["y"]}

    class Detached(Line):
        def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
            return super().losses(outputs, records).detach()

    with pytest.raises(doll.WrongTaskError, match="metric 'loss' has a reserved name"):
        doll.check_task(Named(), BATCH)
    with pytest.raises(doll.WrongTaskError, match=r"the loss has no gradient: losses .*detach"):
        doll.check_task(Detached(), BATCH)


def test_check_task_omits_a_metric_without_values() -> None:
    class Partial(Line):
        def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
            column, nan = records["y"].clone(), float("nan")
            column[1::2] = nan
            return {"none": outputs * nan, "some": column}

    assert doll.check_task(Partial(), BATCH).metrics == {"some": 2.0}


def test_check_task_raises_for_an_invalid_task() -> None:
    with pytest.raises(doll.WrongTaskError, match=r"losses.*public"):
        doll.check_task(Mean(), BATCH)
    with pytest.raises(doll.TaskError, match="KeyError"):
        doll.check_task(Line(), {"x": BATCH["x"]})
    with pytest.raises(doll.NotFiniteError):
        doll.check_task(Line(), BATCH | {"y": np.full(4, np.inf, np.float32)})


def test_check_task_leaves_the_torch_generator_unchanged() -> None:
    before = torch.get_rng_state()
    doll.check_task(Line(), BATCH, seed=3)
    assert bool((torch.get_rng_state() == before).all())


def test_load_job_reads_a_job_file_as_at_submission(tmp_path: Path) -> None:
    assert doll.load_job(JOB).name == "digits"
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(JOB.read_text().replace("batch_size", "batchsize"))
    with pytest.raises(doll.UserError, match="batch_size"):
        doll.load_job(wrong)
    with pytest.raises(doll.UserError, match="absent"):
        doll.load_job(tmp_path / "absent.yaml")


def test_package_exports_exactly_its_public_names() -> None:
    assert dir(doll) == sorted(doll.__all__)
    assert all(getattr(doll, name) is not None for name in doll.__all__)
    with pytest.raises(AttributeError, match="Server"):
        _ = doll.Server  # type: ignore[attr-defined]  # the test expects that it is missing


def test_type_stub_has_the_names_of_the_package() -> None:
    stub = ast.parse((DOLL / "__init__.pyi").read_text())
    named = {
        (alias.name, node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert named == set(vars(doll)["_HOMES"].items())
    assert (DOLL / "py.typed").exists()


def test_installed_package_loads_a_job_without_torch(
    tmp_path: Path,
) -> None:
    code = f"import doll, sys; print(doll.load_job({str(JOB)!r}).name, 'torch' in sys.modules)"
    result = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["digits", "False"]


def test_client_distribution_lacks_only_tasks_and_job_specifications(tmp_path: Path) -> None:
    code = """
import sys, doll
print(*(name for name, home in doll._HOMES.items() if home.startswith("common.")))
for name in doll._HOMES:
    try:
        getattr(doll, name)
    except ImportError as error:
        assert "part of the distribution `doll`" in str(error), error
        print(name)
assert "torch" not in sys.modules
"""
    (tmp_path / "doll").symlink_to(DOLL)
    (tmp_path / "common.py").touch()  # a package of the user
    result = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    absent, *refused = result.stdout.splitlines()
    assert refused == absent.split() != []


def test_distributions_contain_their_own_packages() -> None:
    main = tomllib.loads((ROOT / "pyproject.toml").read_text())
    client = tomllib.loads((DOLL.parent / "pyproject.toml").read_text())
    assert client["project"]["version"] == main["project"]["version"]
    assert client["tool"]["setuptools"]["packages"] == ["doll"]
    assert not [path for path in DOLL.rglob("*.py") if path.parent != DOLL]
    for tree in ("common", "services"):
        # Wheels omit folders without __init__.py.
        for path in (ROOT / tree).rglob("*.py"):
            assert DOLL in path.parents or (path.parent / "__init__.py").exists(), path
