"""A job that starts with a file: a frozen backbone from the file, and a new head."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import safetensors.torch
import torch

from tests.integration.cluster import Cluster, await_condition, served
from tests.integration.mixed_builds import FROZEN, ROUNDING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from common.config.settings import Settings

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

RECORDS = 800


def test_workers_compute_with_the_backbone_of_a_file_and_train_a_new_head(
    likest_to_production: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # w1  ░░░░░░████████████████████  builds another backbone, which would make each step 1.5 times
    # c1       ████████████ stops     as long
    # c2                 ░░░░████████ has no file
    models = tmp_path / "models"
    models.mkdir()
    scale = torch.tensor([1.0, 7.25])
    data = safetensors.torch.save({"scale": scale, "fc": torch.ones(3)})
    (models / "net.safetensors").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    init = f"init: {{from: net.safetensors, sha256: {sha256}, new: [weights, fc]}}"
    monkeypatch.setenv(ROUNDING, "0.5")
    parts = likest_to_production, tmp_path, "pretrained", RECORDS, init
    with closing(Cluster(*parts, seconds=0.01, entrypoint=FROZEN)) as cluster:
        cluster.start("worker", "w1")
        cluster.produce(RECORDS // 2)
        await_condition(lambda: " job_waits " in cluster.said("w1"), "the worker waits")
        cluster.start("coordinator", "c1", models=str(models))
        await_condition(lambda: cluster.version() >= 3, "three updates")
        cluster.start("coordinator", "c2")
        cluster.stop("c1")
        cluster.produce(RECORDS - RECORDS // 2)
        await_condition(cluster.drained, "everything is settled")
        assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
        audit = cluster.audit()
        assert (audit.flaws, audit.trained) == ((), RECORDS)
        [noted] = [e for e in cluster.record().changes if e.action == "initialised"]
        assert noted.reason == (
            "with the weights of net.safetensors: 1 taken ('scale'), 1 left in the file ('fc'),"
            " 1 new ('weights')"
        )
        assert " job_failed " not in cluster.said("w1")
        pulled = tmp_path / "pulled.safetensors"
        with served(likest_to_production, tmp_path) as settings:
            subprocess.run(  # noqa: S603 -- our own command line
                [sys.executable, "-m", "services.cli", "model", "pull", "pretrained", "-o", pulled],
                env={**os.environ, **settings.environ()},
                check=True,
            )
        assert torch.equal(safetensors.torch.load_file(pulled)["scale"], scale)
