"""What a provisioner tells: of the jobs whose machines it rents, and which those are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import time
from typing import TYPE_CHECKING

from common.telemetry.metrics import catalogue
from common.telemetry.metrics.meters import Meters

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    from common.spot.provisioning.report import FleetReport
    from common.telemetry.metrics.metric import Metric

    Values = Iterable[tuple[tuple[str, ...], float | None]]  # further labels, and what is told


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


def _by_label(values: Iterable[tuple[str, float | None]]) -> Values:
    return [((label,), value) for label, value in values]


def _alone(told: Callable[[FleetReport, float], float | None]) -> Callable[..., Values]:
    """Without further labels."""
    return lambda report, now_s: [((), told(report, now_s))]


_TOLD: dict[Metric, Callable[[FleetReport, float], Values]] = {
    catalogue.MACHINES_RUNNING: lambda report, _: _by_label(report.running.items()),
    catalogue.MACHINES_WANTED: lambda report, _: _by_label(
        [("spot", report.spot), ("on_demand", report.on_demand)]
    ),
    catalogue.MACHINES_ENDED: lambda report, _: _by_label(report.ended.items()),
    catalogue.PLANS: lambda report, _: [
        (("yes" if feasible else "no",), plans) for feasible, plans in report.planned.items()
    ],
    catalogue.PRICE: lambda report, _: _by_label(report.prices.items()),
    catalogue.ESTIMATE: lambda report, _: [
        ((quantity, bound), value)
        for quantity, it in report.believed.items()
        for bound, value in (("value", it.value), ("low", it.low), ("high", it.high))
    ],
    catalogue.COST_PER_HOUR: _alone(lambda report, _: report.usd_per_hour),
    catalogue.SPENT: _alone(lambda report, now_s: report.spent_usd(now_s)),
    catalogue.ON_DEMAND_ONLY: _alone(lambda report, _: report.on_demand_only_usd),
    catalogue.COST_PER_UPDATE: _alone(lambda report, now_s: report.usd_per_update(now_s)),
    catalogue.COST_PER_MILLION: _alone(lambda report, now_s: report.usd_per_million(now_s)),
    catalogue.CAPACITY: _alone(lambda report, _: report.stability),
    catalogue.DEADLINE_LEFT: _alone(lambda report, now_s: report.deadline_left_s(now_s)),
    catalogue.PLANNED_LEFT: _alone(lambda report, now_s: report.planned_left_s(now_s)),
}
