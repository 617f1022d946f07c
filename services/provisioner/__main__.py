"""Start a provisioner: `python -m services.provisioner --help`, or `doll provisioner`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import uuid
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from common.config import Settings, read_settings
from common.connections import open_board, open_fleet, open_log, open_prices
from common.errors import DollError, UnavailableError, UserError
from common.jobs.store import JobBook, JobRecord
from common.market import Market, load_market
from common.metrics.provisioner import ProvisionerMetrics
from common.metrics.serving import Pulses, serve
from common.provisioning.events import SettingsChanged, WantedChanged
from common.telemetry import Changes, EventLogger, Outage, event_logger, set_up_logging
from common.termination import end_with, on_termination
from services.provisioner.loop import JobProvisioner
from services.provisioner.settings import provisioner_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.events import Wanted
    from common.ports import Log
    from common.provisioning.settings import ProvisionerSettings

EXIT_OK = 0
EXIT_FAILED = 1  # a fault; whoever supervises this process starts it again
EXIT_USAGE = 2  # settings make no sense; starting again will not help
JOBS_S = 0.5  # between looks at the jobs topic
AGAIN_S = 5.0  # until a job is tried again whose fleet or topics cannot be used
END_S = 10.0  # for all jobs to end in order

LEASE = "{job}~provisioning"  # no job's name has a ~, so this board is nobody's else


class Running:
    """One job whose machines this replica rents, or would rent."""

    def __init__(self, provisioner: JobProvisioner, settings: ProvisionerSettings) -> None:
        self.provisioner = provisioner
        self.settings = settings
        self.wanted: Wanted = "running"
        self.fault: BaseException | None = None
        self.again_at_s = 0.0  # when to begin anew after a fault; on the clock of `Jobs`
        self.thread = threading.Thread(target=self._run, name=settings.job, daemon=True)

    def _run(self) -> None:
        try:
            self.provisioner.run()
        except BaseException as fault:  # noqa: BLE001 -- raised again in the main thread
            self.fault = fault


class Jobs:
    """The jobs whose machines this replica rents, one thread each."""

    def __init__(  # noqa: PLR0913 -- the parts of the process, each used once
        self,
        name: str,
        settings: Settings,
        market: Market,
        *,
        log: Log,
        metrics: ProvisionerMetrics,
        pulses: Pulses,
        logger: EventLogger,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._told = Changes()
        self._name = name
        self._settings = settings
        self._market = market
        self._source = log
        self._metrics = metrics
        self._pulses = pulses
        self._log = logger
        self._running = dict[str, Running]()

    def follow(self, jobs: dict[str, JobRecord]) -> None:
        """Begin with new jobs, and tell the others what is wanted of them.

        Raises:
            BaseException: What ended a job's thread, if it was no fault of the job or the world.
        """
        for job, record in jobs.items():
            running = self._running.get(job)
            if running is not None and running.thread.is_alive():
                self._tell(running, record.wanted, record.reason, self._settings_of(record))
            elif running is not None and running.fault is not None:
                self._after(running.fault, running, record)
            elif record.wanted == "running" and record.spec.provisioning is not None:
                self._begin(record)
            elif running is None and record.spec.provisioning is not None:
                self._begin(record)  # it may have left machines behind
        for job in self._running.keys() - jobs.keys():
            self._tell(self._running[job], "stopped", "the job was deleted", None)

    def _after(self, fault: BaseException, running: Running, record: JobRecord) -> None:
        """Begin anew, in a while, with a job that cannot go on; the others do not notice."""
        if not isinstance(fault, DollError):
            raise fault  # ours: better dead and replayed than alive and wrong
        job = record.spec.name
        if not running.again_at_s:
            running.again_at_s = self._clock() + AGAIN_S
            self._tell_fault(job, str(fault))
        if self._clock() >= running.again_at_s:
            self._begin(record)

    def _tell_fault(self, job: str, reason: str) -> None:
        if self._told(job, reason):
            self._log.error("job_not_provisioned", job=job, reason=reason)

    def end(self) -> None:
        """End all threads in order; the machines stay."""
        for running in self._running.values():
            running.provisioner.stop()
        for running in self._running.values():
            running.thread.join(END_S)

    def _begin(self, record: JobRecord) -> None:
        settings = self._settings_of(record)
        if settings is None:
            return
        job = record.spec.name
        asked = record.spec.provisioning
        market = self._market.of_type(asked.instance_type) if asked else self._market
        provisioner = JobProvisioner(
            self._name,
            settings,
            record.first,
            log=self._source,
            board=open_board(self._settings, LEASE.format(job=job)),
            openers=(
                partial(open_fleet, self._settings, market, job),
                partial(open_prices, self._settings, market),
            ),
            metrics=self._metrics,
            pulses=self._pulses,
            logger=self._log,
        )
        running = Running(provisioner, settings)
        running.wanted = record.wanted
        provisioner.hear(WantedChanged(record.wanted, record.reason))
        self._running[job] = running
        running.thread.start()

    def _tell(
        self,
        running: Running,
        wanted: Wanted,
        reason: str,
        settings: ProvisionerSettings | None,
    ) -> None:
        if settings is not None and settings != running.settings:
            running.settings = settings
            running.provisioner.hear(SettingsChanged(settings))
        if wanted != running.wanted:
            running.wanted = wanted
            running.provisioner.hear(WantedChanged(wanted, reason))

    def _settings_of(self, record: JobRecord) -> ProvisionerSettings | None:
        try:
            return provisioner_settings(record, self._market)
        except UserError as error:
            self._tell_fault(record.spec.name, str(error))
            return None


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
    arguments = parser.parse_args()
    stopping = threading.Event()
    on_termination(stopping.set)
    name = f"{arguments.name}-{uuid.uuid4().hex[:8]}"  # no two lives of a process are one candidate
    try:
        settings = read_settings(os.environ)
        set_up_logging(settings, service="provisioner", replica=name)
        if settings.owner_pid:
            end_with(settings.owner_pid)
        _provision(name, settings, _market_of(settings), stopping)
    except UserError as error:
        print(f"provisioner: {error}", file=sys.stderr)  # noqa: T201 -- to whoever started it
        return EXIT_USAGE
    except Exception:  # noqa: BLE001 -- the outermost loop: better dead and replayed
        event_logger("provisioner").exception("provisioner_failed")
        return EXIT_FAILED
    return EXIT_OK


def _market_of(settings: Settings) -> Market:
    if not settings.market:
        raise UserError("DOLL_MARKET: must name the file of the machines that can be rented")
    return load_market(Path(settings.market))


def _provision(name: str, settings: Settings, market: Market, stopping: threading.Event) -> None:
    logger = event_logger("provisioner")
    outage = Outage(logger, "kafka")
    metrics, pulses = ProvisionerMetrics(), Pulses()
    pulse = pulses.begin("the main loop")
    if settings.metrics_port:
        serve(metrics.meters, pulses, settings.metrics_host, settings.metrics_port)
    jobs: Jobs | None = None
    book: JobBook | None = None
    while not stopping.is_set():
        pulse.beat()
        try:
            if jobs is None or book is None:
                log = open_log(settings, name)
                found = JobBook(log)
                found.read()  # all of it: by its first records alone, a stopped job seems to run
                book = found
                jobs = Jobs(
                    name,
                    settings,
                    market,
                    log=log,
                    metrics=metrics,
                    pulses=pulses,
                    logger=logger,
                )
            jobs.follow(book.refresh(JOBS_S))
            outage.quiet()
        except UnavailableError as error:
            outage.met(error)
            stopping.wait(JOBS_S)
    if jobs is not None:
        jobs.end()


if __name__ == "__main__":
    sys.exit(main())
