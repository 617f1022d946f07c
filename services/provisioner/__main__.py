"""Start a provisioner: `python -m services.provisioner --help`, or `doll provisioner`."""

from __future__ import annotations

import argparse
import socket
import sys
import uuid
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.config.market_file import load_market
from common.errors import UserError
from common.jobs.store import JobBook
from common.runtime.connect import open_boards, open_fleet, open_log, open_prices
from common.runtime.jobs import Jobs
from common.runtime.service import END_S, follow_jobs, run
from common.runtime.supervisor import Supervisor
from common.telemetry.logging import event_logger
from common.telemetry.metrics.provisioner import ProvisionerMetrics
from common.telemetry.metrics.serving import Pulses, serve
from common.telemetry.metrics.supervision import SupervisionMetrics
from services.provisioner.loop import JobProvisioner, Replica

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from common.config.market_file import Market
    from common.config.settings import Settings
    from common.jobs.store import JobRecord
    from services.provisioner.loop import Openers


def main() -> int:
    """Run until told to end; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.provisioner",
        description="Rents machines for jobs that ask for them, from the market in DOLL_MARKET.",
        epilog="example: DOLL_MARKET=market.yaml python -m services.provisioner --name p1",
    )
    parser.add_argument(
        "--name", default=socket.gethostname(), help="for people; default: the host"
    )
    name = parser.parse_args().name
    name = f"{name}-{uuid.uuid4().hex[:8]}"  # no two lives of a process are one candidate
    return run("provisioner", name, partial(_provision, name))


def _provision(name: str, settings: Settings, stopping: threading.Event) -> None:
    market = _market_of(settings)
    metrics, pulses = ProvisionerMetrics(), Pulses()
    if settings.metrics_port:
        serve(metrics.meters, pulses, settings.metrics_host, settings.metrics_port)
    opened = partial(_opened, name, settings, market, metrics, pulses)
    follow_jobs("provisioner", opened, stopping, pulses)


def _market_of(settings: Settings) -> Market:
    if not settings.market:
        raise UserError("DOLL_MARKET: must name the file of the machines that can be rented")
    return load_market(Path(settings.market))


@contextmanager
def _opened(
    name: str, settings: Settings, market: Market, metrics: ProvisionerMetrics, pulses: Pulses
) -> Iterator[tuple[Jobs, JobBook]]:
    logger = event_logger("provisioner")
    with ExitStack() as opened:
        log = opened.enter_context(closing(open_log(settings, name)))
        book = opened.enter_context(closing(JobBook(log)))
        book.read()
        boards = opened.enter_context(closing(open_boards(settings)))
        supervisor = Supervisor(SupervisionMetrics(metrics.meters), pulses, logger)
        opened.callback(supervisor.close, END_S)
        replica = Replica(
            name=name,
            market=market,
            log=log,
            board=boards.board,
            openers=partial(openers, settings),
            metrics=metrics,
            logger=logger,
        )
        yield Jobs(supervisor, partial(JobProvisioner, replica), begins), book


def openers(settings: Settings, market: Market, job: str) -> Openers:
    """How to open the fleet of a job, and the prices."""
    return partial(open_fleet, settings, market, job), partial(open_prices, settings, market)


def begins(record: JobRecord, new: bool) -> bool:  # noqa: FBT001 -- as `Jobs` asks it
    """Whether to provision a job: a stopped one too, at first, for it may have left machines."""
    return record.spec.provisioning is not None and (new or record.wanted == "running")


if __name__ == "__main__":
    sys.exit(main())
