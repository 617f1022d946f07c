"""A job in an MLflow server that is killed and comes back, as MLflow's own client then finds it."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.adapters.blobs.s3 import S3Blobs
from common.adapters.mlflow import MlflowServer
from common.config.settings import Settings
from tests.contract.mlflow_process import PATIENCE_S, MlflowProcess
from tests.contract.test_blobs import BUCKET, REGION, s3_server
from tests.integration.test_clients import ran
from tests.unit.services.test_evaluator import NAME
from tests.unit.services.test_tracker import Tracked

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["s3_server"]  # a fixture
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(PATIENCE_S)]

ASKED = """
import json, os, sys
import mlflow
url, s3, name = sys.argv[1:]
os.environ |= {"MLFLOW_S3_ENDPOINT_URL": s3, "AWS_DEFAULT_REGION": "us-east-1"}
mlflow.set_tracking_uri(url)
client = mlflow.MlflowClient()
[run] = client.search_runs(["0"], "tags.`doll.job` = '" + name + "'")
points = client.get_metric_history(run.info.run_id, "test/loss")
versions = {alias: client.get_model_version_by_alias(name, alias) for alias in ("newest", "best")}
folder = mlflow.artifacts.download_artifacts(f"models:/{name}@best")
print(json.dumps({
    "status": run.info.status,
    "learning_rate": run.data.params["optimizer.learning_rate"],
    "points": [(point.step, point.value) for point in points],
    "aliases": {alias: version.tags["doll.version"] for alias, version in versions.items()},
    "offsets": json.loads(versions["best"].tags["doll.offsets"]),
    "files": sorted(os.listdir(folder)),
}))
"""


def test_a_server_that_is_killed_is_told_all_once_and_its_own_client_finds_it(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, s3_server: str
) -> None:
    # judged   1  |  killed   2   3  | back, another evaluator   4
    with closing(MlflowProcess(tmp_path_factory)) as server:
        server.start()
        tracking = MlflowServer(server.url)
        tracked = Tracked(tracking=tracking, blobs=S3Blobs(BUCKET, "models/", s3_server, REGION))
        settings = Settings(blobs=f"s3://{BUCKET}/models", s3_endpoint=s3_server)
        tracked.learn(1)
        tracked.save(1, loss=0.25)
        tracked.start(settings).turn()
        server.kill()
        tracked.learn(2, 3)
        tracked.begun[-1].turn()
        assert (tracked.count("failed_total"), tracked.count("waiting")) == (1.0, 4.0)
        tracked.save(3, loss=0.5)
        server.start()
        tracked.start(settings)
        while tracked.begun[-1].turn() and tracked.count("waiting"):
            pass
        tracked.learn(4)
        assert tracked.record is not None
        tracked.record = tracked.record._replace(wanted="stopped", finished=True)
        while tracked.begun[-1].turn() is not None:
            pass

        python = server.programs / "python"
        said = ran(python, "-c", ASKED, server.url, s3_server, NAME, folder=tmp_path)
        found = json.loads(said.splitlines()[-1])
        for tracker in tracked.begun:
            tracker.close()
        tracked.world.end()
    assert found["points"] == [[n, 1.0 / n] for n in (1, 2, 3, 4)]
    assert (found["status"], found["learning_rate"]) == ("FINISHED", "0.1")
    assert found["aliases"] == {"newest": "3", "best": "1"}
    assert found["offsets"] == {"left": {"0": 8, "1": 4}}
    assert "trainer.safetensors" in found["files"]
