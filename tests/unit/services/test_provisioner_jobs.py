"""Which jobs a provisioner looks after: the fault of one is no affair of the others."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from common.config import Settings
from common.metrics.provisioner import ProvisionerMetrics
from common.metrics.serving import Pulses
from common.telemetry import event_logger
from common.testing.log import MemoryLog
from common.topics import control_topic, updates_topic
from services.provisioner.__main__ import AGAIN_S, Jobs
from tests.unit.services.test_provisioner_settings import JOB, MARKET, record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common.core.spans import Partition
    from common.testing.log_readers import MemoryTail

RENTED = f"{JOB}provisioning: {{workers: 3}}\n"
DIGITS = {"digits": record(RENTED)}


class BrokenLog(MemoryLog):
    """Has a fault of ours."""

    def tail(
        self, partition: Partition, position: int, on_ready: Callable[[], None] | None = None
    ) -> MemoryTail:
        """See the port."""
        del on_ready
        raise ValueError(f"{partition}@{position}")


def jobs_of(log: MemoryLog, folder: Path, now_s: list[float]) -> Jobs:
    """A provisioner whose fleet cannot be opened: its directory is a file."""
    for topic in (control_topic("digits"), updates_topic("digits"), "a"):
        log.create_topic(topic, 2)
    (folder / "machines").write_text("not a directory")
    settings = Settings(
        redis=f"unix://{folder}/none.sock",
        market=str(folder / "market.yaml"),
        fleet_directory=str(folder / "machines"),
    )
    logger = event_logger("provisioner")
    market = MARKET.model_copy(update={"spot": MARKET.spot[:1]})  # no recorded prices here
    return Jobs(
        "p1",
        settings,
        market,
        log=log,
        metrics=ProvisionerMetrics(),
        pulses=Pulses(),
        logger=logger,
        clock=lambda: now_s[0],
    )


def ended() -> None:
    """Wait until the job's thread has ended."""
    for thread in threading.enumerate():
        if thread.name == "digits":
            thread.join(20.0)
            assert not thread.is_alive()


def test_a_job_whose_fleet_cannot_be_opened_is_told_of_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [100.0]
    jobs = jobs_of(MemoryLog(), tmp_path, now_s)
    jobs.follow(DIGITS)
    ended()
    for _ in range(3):
        jobs.follow(DIGITS)  # and does not raise
    assert caplog.messages.count("job_not_provisioned") == 1

    now_s[0] += AGAIN_S
    (tmp_path / "machines").unlink()  # somebody has mended it
    jobs.follow(DIGITS)
    assert any(thread.name == "digits" for thread in threading.enumerate())
    jobs.end()
    ended()
    assert caplog.messages.count("job_not_provisioned") == 1


def test_a_fault_of_ours_ends_the_process(tmp_path: Path) -> None:
    jobs = jobs_of(BrokenLog(), tmp_path, [100.0])
    (tmp_path / "machines").unlink()
    jobs.follow(DIGITS)
    ended()
    with pytest.raises(ValueError, match="digits"):
        jobs.follow(DIGITS)
