"""What a provisioner tells: of the jobs whose machines it rents, and which those are."""

from __future__ import annotations

from time import time
from typing import TYPE_CHECKING

from common.telemetry.metrics import catalogue
from common.telemetry.metrics.meters import Meters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    from common.provisioning.report import FleetReport
    from common.telemetry.metrics.metric import Metric

    Values = Iterator[tuple[tuple[str, ...], float | None]]  # further labels, and what is told


class ProvisionerMetrics:
    """The metrics of one provisioner; may be shared between threads.

    Args:
        clock: Seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time) -> None:
        self.meters = Meters("provisioner")
        self._clock = clock
        self._reports = dict[str, "FleetReport | None"]()
        self.meters.registry.register(self)

    def tell(self, job: str, report: FleetReport | None) -> None:
        """Say how a job stands, until the next report or `forget`; None: another is in charge."""
        self._reports[job] = report

    def forget(self, job: str) -> None:
        """Report on a job no longer."""
        self._reports.pop(job, None)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """What the registry asks at each scrape."""
        now_s, reports = self._clock(), self._reports.copy()
        charge = self.meters.family(catalogue.PROVISIONING)
        for job, report in reports.items():
            charge.add_metric([job], float(report is not None))
        yield charge
        for metric, values in _TOLD.items():
            family = self.meters.family(metric)
            for job, report in reports.items():
                for labels, value in () if report is None else values(report, now_s):
                    if value is not None:
                        family.add_metric([job, *labels], value)
            yield family


def _running(report: FleetReport, _: float) -> Values:
    for pool, machines in report.running.items():
        yield (pool,), machines


def _wanted(report: FleetReport, _: float) -> Values:
    yield ("spot",), report.spot
    yield ("on_demand",), report.on_demand


def _ended(report: FleetReport, _: float) -> Values:
    for cause, machines in report.ended.items():
        yield (cause,), machines


def _planned(report: FleetReport, _: float) -> Values:
    for feasible, plans in report.planned.items():
        yield ("yes" if feasible else "no",), plans


def _prices(report: FleetReport, _: float) -> Values:
    for pool, usd_per_hour in report.prices.items():
        yield (pool,), usd_per_hour


def _believed(report: FleetReport, _: float) -> Values:
    for quantity, it in report.believed.items():
        for bound, value in (("value", it.value), ("low", it.low), ("high", it.high)):
            yield (quantity, bound), value


def _plain(told: Callable[[FleetReport, float], float | None]) -> Callable[..., Values]:
    """Without further labels."""

    def values(report: FleetReport, now_s: float) -> Values:
        yield (), told(report, now_s)

    return values


_TOLD: dict[Metric, Callable[[FleetReport, float], Values]] = {
    catalogue.MACHINES_RUNNING: _running,
    catalogue.MACHINES_WANTED: _wanted,
    catalogue.MACHINES_ENDED: _ended,
    catalogue.PLANS: _planned,
    catalogue.PRICE: _prices,
    catalogue.ESTIMATE: _believed,
    catalogue.COST_PER_HOUR: _plain(lambda report, _: report.usd_per_hour),
    catalogue.SPENT: _plain(lambda report, now_s: report.spent_usd(now_s)),
    catalogue.ON_DEMAND_ONLY: _plain(lambda report, _: report.on_demand_only_usd),
    catalogue.COST_PER_UPDATE: _plain(lambda report, now_s: report.usd_per_update(now_s)),
    catalogue.COST_PER_MILLION: _plain(lambda report, now_s: report.usd_per_million(now_s)),
    catalogue.CAPACITY: _plain(lambda report, _: report.stability),
    catalogue.DEADLINE_LEFT: _plain(lambda report, now_s: report.deadline_left_s(now_s)),
    catalogue.PLANNED_LEFT: _plain(lambda report, now_s: report.planned_left_s(now_s)),
}
