"""Processes of one machine do not inherit the metrics port that one of them was given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.config.settings import Settings
from common.embedded.services import start_machine
from common.embedded.stack import EmbeddedStack
from load.harness.stack import await_until

STARTS_S = 30.0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_rented_process_does_not_inherit_the_metrics_port(
    tmp_path: Path,
) -> None:
    settings = Settings(metrics_port=9102, kafka="127.0.0.1:1", threads=1)
    child = start_machine("digits", settings, tmp_path, "w1", {"FLEET_MACHINE": "m1"})
    its = Path(f"/proc/{child.pid}/environ")
    try:
        # Before exec, the child has the environment of the fork's parent.
        await_until(lambda: "FLEET_MACHINE=m1" in its.read_text(), STARTS_S, "the machine starts")
        environment = its.read_text().split("\0")
    finally:
        child.kill()
    assert {"DOLL_KAFKA=127.0.0.1:1", "DOLL_THREADS=1", "FLEET_MACHINE=m1"} <= set(environment)
    assert not [each for each in environment if each.startswith("DOLL_METRICS")]


def test_stack_of_several_services_has_no_shared_metrics_port(tmp_path: Path) -> None:
    base = Settings(metrics_port=9102, log_level="warning")
    with EmbeddedStack(
        base, kafka="127.0.0.1:1", redis="redis://127.0.0.1:1", blobs=tmp_path
    ) as it:
        assert (it.settings.metrics_port, it.settings.log_level) == (0, "warning")
