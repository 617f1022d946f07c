"""An MLflow server from the package index passes the tracking contract, and no metric is lost.

MLflow's own client then finds the job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import closing
from functools import partial
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING

import httpx2
import pytest
from msgspec.structs import replace

from common.config.settings import Settings
from common.embedded.process import free_port
from common.storage.s3 import S3Blobs
from common.tracking.mlflow import MlflowServer
from tests.contract.test_blobs import BUCKET, REGION, s3_server
from tests.contract.test_tracking import (
    history,
    test_impossible_request_is_refused_with_its_reason,
    test_many_points_are_sent_in_several_requests,
    test_repeated_point_is_stored_once_and_last_tags_win,
    test_run_can_finish_and_resume,
    test_run_is_found_again_only_by_its_full_identity,
    test_versions_are_found_by_tags_and_have_aliases,
)
from tests.integration.test_clients import environment, ran
from tests.unit.services.test_evaluator import NAME
from tests.unit.services.test_tracker import Tracked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.contract.test_tracking import Tracker

__all__ = [  # a fixture, and tests
    "s3_server",
    "test_impossible_request_is_refused_with_its_reason",
    "test_many_points_are_sent_in_several_requests",
    "test_repeated_point_is_stored_once_and_last_tags_win",
    "test_run_can_finish_and_resume",
    "test_run_is_found_again_only_by_its_full_identity",
    "test_versions_are_found_by_tags_and_have_aliases",
]
MLFLOW = "mlflow==3.17.2"
PATIENCE_S = 900.0  # its packages are 850 MB
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


class MlflowProcess:
    """A server and its files.

    Args:
        folder: Folder of its packages and files.
    """

    def __init__(self, folder: Path) -> None:
        # MLflow reads S3 by boto3.
        self.programs = environment(folder, MLFLOW, "boto3")
        self._folder = folder
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it with all stored data."""
        log = self._folder / "log"
        with log.open("ab") as file:
            self._process = process = subprocess.Popen(  # noqa: S603 -- our own command line
                [
                    *(str(self.programs / "mlflow"), "server", "--workers", "1"),
                    *("--host", "127.0.0.1", "--port", str(self._port)),
                    *("--backend-store-uri", f"sqlite:///{self._folder}/kept.db"),
                    *("--artifacts-destination", str(self._folder / "artifacts")),
                ],
                cwd=self._folder,
                env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until = monotonic() + PATIENCE_S
        while not self._is_healthy():
            assert process.poll() is None, log.read_text()
            assert monotonic() < until, log.read_text()
            Event().wait(0.2)

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Stop it."""
        self.kill()

    def _is_healthy(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health").is_success
        except httpx2.HTTPError:
            return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowProcess]:
    with closing(MlflowProcess(tmp_path_factory.mktemp("mlflow"))) as process:
        process.start()
        yield process


@pytest.fixture
def tracker(server: MlflowProcess) -> Iterator[Tracker]:
    with (
        httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        closing(MlflowServer(server.url, answer_s=PATIENCE_S)) as tracking,
    ):
        yield tracking, partial(history, client)


def test_killed_mlflow_receives_everything_once_and_its_client_finds_the_job(
    server: MlflowProcess, tmp_path: Path, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server)
    # server              runs │ killed │ runs again, with another evaluator
    # evaluated versions  1    │ 2, 3   │ 4
    tracking = MlflowServer(server.url, answer_s=PATIENCE_S)
    tracked = Tracked(tracking=tracking, blobs=S3Blobs(BUCKET, "models/", s3_server, REGION))
    settings = Settings(blobs=f"s3://{BUCKET}/models", mlflow=server.url)
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
    tracked.record = replace(tracked.record, wanted="stopped", finished=True)
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
