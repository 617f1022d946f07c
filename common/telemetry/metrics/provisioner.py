"""Metrics of a provisioner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import time
from typing import TYPE_CHECKING

from common.telemetry.metrics.registry import MetricSet, counter, gauge, of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from common.spot.provisioning.report import FleetReport

_AVAILABILITY = "availability."


class ProvisionerMetrics(MetricSet):
    """Metrics of one job, computed at a scrape from the newest report.

    Args:
        clock: Returns the time in seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time) -> None:
        super().__init__()
        self.registry.register(self)
        # None while another replica rents.
        self.report: FleetReport | None = None
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. Those of machines come only if this replica rents."""
        report, now_s = self.report, self._clock()

        yield gauge(
            "doll_provisioning",
            "1 if this provisioner rents the job's machines; 0 if it stands by to replace the one"
            " that does.",
            float(report is not None),
        )
        yield gauge(
            "doll_machines_running",
            "Number of the job's machines in the pool (machines of one kind at one price) that run"
            " and are paid for.",
            of(report, lambda it: it.running),
            "pool",
        )
        yield gauge(
            "doll_machines_wanted",
            "Number of machines that the current plan requires, by kind: `spot` or `on_demand`.",
            of(report, lambda it: {"spot": it.spot, "on_demand": it.on_demand}),
            "kind",
        )
        yield counter(
            "doll_machines_ended_total",
            "Total number of machines that ended since the job began, by cause: `preempted` (the"
            " provider took a spot machine back), `released` (no longer needed), `failed` (an"
            " error on the machine), `refused` (the provider did not start it) or `lost` (it"
            " disappeared for an unknown reason, or somebody else stopped or ended it).",
            of(report, lambda it: it.ended),
            "cause",
        )
        yield counter(
            "doll_machines_never_reported_total",
            "Total number of the job's machines in the pool (machines of one kind at one price)"
            " that were released because their workers never sent a heartbeat.",
            of(report, lambda it: it.never_reported),
            "pool",
        )
        yield counter(
            "doll_plans_total",
            "Total number of plans for the job's machines. The label `feasible` is `no` if no"
            " choice of machines meets the deadline, otherwise `yes`.",
            of(
                report,
                lambda it: {"yes" if ok else "no": plans for ok, plans in it.planned.items()},
            ),
            "feasible",
        )
        yield gauge(
            "doll_price_usd_per_hour",
            "Current price of one machine of the pool (machines of one kind at one price), in US"
            " dollars per hour.",
            of(report, lambda it: it.prices),
            "pool",
        )
        yield gauge(
            "doll_cost_usd_per_hour",
            "Current cost of all of the job's running machines, in US dollars per hour.",
            of(report, lambda it: it.usd_per_hour),
        )
        yield counter(
            "doll_spent_usd_total",
            "Total cost of all of the job's machines since the job began, in US dollars.",
            of(report, lambda it: it.spent_usd(now_s)),
        )
        yield gauge(
            "doll_on_demand_only_usd",
            "Estimated cost of the job's updates so far if all machines had been on demand, in US"
            " dollars.",
            of(report, lambda it: it.on_demand_only_usd),
        )
        yield gauge(
            "doll_cost_usd_per_update",
            "Total cost of the job's machines so far divided by the job's number of updates, in US"
            " dollars.",
            of(report, lambda it: it.usd_per_update(now_s)),
        )
        yield gauge(
            "doll_cost_usd_per_million_records",
            "Total cost of the job's machines so far per million records that the model was"
            " trained on, in US dollars.",
            of(report, lambda it: it.usd_per_million(now_s)),
        )
        yield gauge(
            "doll_estimated_arrival_records_per_second",
            "Estimated arrival rate of records in all of the job's streams, in records per second."
            " The label `bound` is `value` for the estimate, `low` and `high` for the ends of its"
            " 90 % interval.",
            of(report, lambda it: _bounds(it, "arrivals_per_s")),
            "bound",
        )
        yield gauge(
            "doll_estimated_gradient_seconds",
            "Estimated time to compute the gradient of one batch, in seconds. The label `bound` is"
            " `value` for the estimate, `low` and `high` for the ends of its 90 % interval.",
            of(report, lambda it: _bounds(it, "gradient_s")),
            "bound",
        )
        yield gauge(
            "doll_estimated_availability_ratio",
            "Estimated share of time (0 to 1) that a spot machine of the pool (machines of one"
            " kind at one price) is available. The label `bound` is `value` for the estimate,"
            " `low` and `high` for the ends of its 90 % interval.",
            of(report, _availability),
            *("pool", "bound"),
        )
        yield gauge(
            "doll_fleet_capacity_ratio",
            "Work that the job's machines can do divided by the work that arrives (Proposition 1"
            " of the DOLL paper, Jiang, Zhang and Joe-Wong); below 1, the machines cannot keep up.",
            of(report, lambda it: it.stability),
        )
        yield gauge(
            "doll_deadline_left_seconds",
            "Time until the job's deadline, in seconds; negative after the deadline.",
            of(report, lambda it: it.deadline_left_s(now_s)),
        )
        yield gauge(
            "doll_planned_time_left_seconds",
            "Time until the job is done according to the current plan, in seconds; 0 if the job"
            " takes longer than planned.",
            of(report, lambda it: it.planned_left_s(now_s)),
        )


def _bounds(report: FleetReport, quantity: str) -> Mapping[str, float | None]:
    found = report.believed.get(quantity)
    return {} if found is None else {"value": found.value, "low": found.low, "high": found.high}


def _availability(report: FleetReport) -> Mapping[tuple[str, ...], float | None]:
    return {
        (quantity.removeprefix(_AVAILABILITY), bound): value
        for quantity in report.believed
        if quantity.startswith(_AVAILABILITY)
        for bound, value in _bounds(report, quantity).items()
    }
