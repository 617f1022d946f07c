"""An MLflow server of the package index in an environment of its own; it may go and come back."""

from __future__ import annotations

import os
import signal
import subprocess
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING

import httpx2

from common.embedded.process import free_port
from tests.integration.test_clients import environment

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MLFLOW = "mlflow==3.17.2"
PATIENCE_S = 900.0  # its packages are 850 MB


class MlflowProcess:
    """A server and what it keeps.

    Args:
        factory: Of folders; its session has one environment.
    """

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.programs = _installed(factory.getbasetemp() / "mlflow")
        self._folder = factory.mktemp("mlflow-server")
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with all that it kept."""
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
        """End it without notice."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End it for good."""
        self.kill()

    def _is_healthy(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health").is_success
        except httpx2.HTTPError:
            return False


def _installed(folder: Path) -> Path:
    """Where the programs are; installed when they are first asked for."""
    programs = folder / "env" / "bin"
    if not folder.exists():
        folder.mkdir()
        environment(folder, MLFLOW, "boto3")  # by which its client reads S3
    return programs
