"""Start a provisioner: `python -m services.provisioner --help`, or `doll provisioner`."""

from __future__ import annotations

import gc

# Runs before the other imports: see `keep_imports`.
if __name__ == "__main__":
    gc.disable()

import sys
import uuid
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.config.program import command_line
from common.errors import UserError
from common.redis.boards import open_boards
from common.runtime.jobs import follow_jobs
from common.runtime.service import run
from common.spot.connect import open_fleet, open_prices
from common.spot.market.market_file import Market
from common.telemetry.metrics.registry import ProcessMetrics
from services.provisioner.loop import JobProvisioner, ProvisionerProcess

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.jobs.store import JobRecord
    from common.runtime.jobs import MakePart, OpenedKafka
    from common.runtime.service import ServiceProcess
    from services.provisioner.loop import Openers


def main() -> int:
    """Run until asked to end; return the exit status."""
    name = command_line("provisioner").name
    # A restarted process is another candidate.
    return run("provisioner", f"{name}-{uuid.uuid4().hex[:8]}", _provision)


def _provision(process: ServiceProcess) -> None:
    settings = process.settings
    if not settings.market:
        raise UserError("DOLL_MARKET: must be set to the path of a market file")
    market = Market.load(Path(settings.market))
    metrics = ProcessMetrics("provisioner")

    def parts(opened: OpenedKafka) -> MakePart:
        replica = ProvisionerProcess(
            name=process.name,
            market=market,
            log=opened.log,
            board=boards.board,
            openers=partial(openers, settings),
            metrics=metrics,
            logger=process.logger,
        )
        return partial(JobProvisioner, replica)

    with closing(open_boards(settings)) as boards:
        follow_jobs(process, metrics, parts, begins)


def openers(settings: Settings, market: Market, job: str) -> Openers:
    """Return functions that open the fleet of a job, and the prices."""
    return partial(open_fleet, settings, market, job), partial(open_prices, settings, market)


def begins(record: JobRecord, new: bool) -> bool:  # noqa: FBT001 -- as `Jobs` asks it
    """Return True if a job needs a provisioner.

    A stopped job that is new to this process may still have machines to release.
    """
    return record.spec.provisioning is not None and (new or record.wanted == "running")


if __name__ == "__main__":
    sys.exit(main())
