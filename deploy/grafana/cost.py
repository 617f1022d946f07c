"""The dashboard of cost: a job's machines, their cost, and its deadline."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Lines, Query, Stat, States, annotation
from deploy.grafana.queries import lately, newest, selected

COST = Dashboard(
    "cost",
    "A job's machines, their cost compared with on-demand machines, and whether the job will meet"
    " its deadline.",
    # Now.
    Stat(
        "USD per hour",
        "Current cost of all running machines, in US dollars per hour. Normal: the cost in the"
        " plan, which `doll provisioning show` prints.",
        Query(newest("doll_cost_usd_per_hour"), "USD/h"),
        unit="currencyUSD",
    ),
    Stat(
        "Spent",
        "Total cost of all machines since the job began, in US dollars. Each second counts at its"
        " price.",
        Query(newest("doll_spent_usd_total"), "spent"),
        unit="currencyUSD",
    ),
    Stat(
        "Cost relative to on-demand",
        "Total cost divided by the estimated cost of the same updates on on-demand machines alone."
        " Normal: 20 to 80 %. At 100 % or more, spot machines save nothing: alert"
        " DollCostAboveOnDemand.",
        Query(f"{newest('doll_spent_usd_total')} / {newest('doll_on_demand_only_usd')}", "share"),
        unit="percentunit",
        steps={None: "green", 0.8: "orange", 1.0: "red"},
    ),
    Stat(
        "Cost per million records",
        "Total cost divided by the millions of records in updates, in US dollars, to compare jobs."
        " Normal: it falls after machines have started.",
        Query(newest("doll_cost_usd_per_million_records"), "USD"),
        unit="currencyUSD",
    ),
    Stat(
        "Time to spare",
        "Time until the deadline minus the time that the current plan needs. Below 0, the job"
        " misses its deadline unless the plan changes: alert DollDeadlineAtRisk. Empty if the job"
        " has no deadline.",
        Query(
            newest("doll_deadline_left_seconds") + " - " + newest("doll_planned_time_left_seconds"),
            "to spare",
        ),
        unit="s",
        steps={None: "red", 0: "green"},
    ),
    Stat(
        "Capacity over arrivals",
        "Work that the machines can do divided by the work that arrives (Proposition 1 of the"
        " paper). Normal: above 100 %. Below, the machines do not keep up; for a moment after a"
        " preemption this is expected.",
        Query(newest("doll_fleet_capacity_ratio"), "capacity"),
        unit="percentunit",
        steps={None: "red", 1.0: "green"},
    ),
    # Over time.
    Lines(
        "Cost, and cost on demand",
        "Total cost so far, and what the same updates would have cost on on-demand machines alone."
        " Normal: the actual cost is lower. The difference is the saving.",
        Query(newest("doll_spent_usd_total"), "spent"),
        Query(newest("doll_on_demand_only_usd"), "on demand only"),
        unit="currencyUSD",
    ),
    Lines(
        "Cost per hour",
        "Current cost of all running machines. It jumps when machines start, end or are preempted,"
        " and changes gradually with prices.",
        Query(newest("doll_cost_usd_per_hour"), "USD/h"),
        unit="currencyUSD",
    ),
    Lines(
        "Cost per update",
        "Total cost divided by the number of updates. Normal: it falls at first, then stays"
        " constant. If it rises, machines run but train little.",
        Query(newest("doll_cost_usd_per_update"), "USD"),
        unit="currencyUSD",
    ),
    Lines(
        "Prices by pool",
        "Price of one machine per hour in each pool. Every price change causes a new plan.",
        Query(newest("doll_price_usd_per_hour", "pool"), "{{pool}}"),
        unit="currencyUSD",
    ),
    Lines(
        "Machines",
        "Machines that are paid for, by pool, and machines that the plan requires, by kind."
        " Normal: they agree, except for minutes after a preemption. If wanted machines stay"
        " missing, the provider refuses to start them: see the provisioner's log.",
        Query(newest("doll_machines_running", "pool"), "{{pool}}"),
        Query(newest("doll_machines_wanted", "kind"), "wanted: {{kind}}"),
    ),
    Lines(
        "Machines that ended (1 h)",
        "Machines that ended in the last hour, by cause. Normal: preempted (as often as the pool's"
        " availability implies) and released by plans. For failed, refused or lost, see the logs"
        " of the provisioner and of the machines.",
        Query(lately("doll_machines_ended_total", "cause", window="1h"), "{{cause}}"),
    ),
    Lines(
        "Availability of spot pools",
        "Estimated share of time that a spot machine of the pool is available (alpha), with its 90"
        " % interval. The interval narrows with observations. If the availability falls, the plan"
        " uses more on-demand machines.",
        Query(newest("doll_estimated_availability_ratio", "pool", "bound"), "{{pool}} {{bound}}"),
        unit="percentunit",
    ),
    Lines(
        "Estimated arrival rate",
        "Estimated arrival rate of records in all streams, with its 90 % interval. The interval is"
        " wide at first; plans made then are guesses.",
        Query(newest("doll_estimated_arrival_records_per_second", "bound"), "{{bound}}"),
        unit="suffix: records/s",
    ),
    Lines(
        "Estimated time of a gradient",
        "Estimated time to compute the gradient of one batch, with its 90 % interval. It rises"
        " with slower machines or a larger batch size b.",
        Query(newest("doll_estimated_gradient_seconds", "bound"), "{{bound}}"),
        unit="s",
    ),
    Lines(
        "Time left",
        "Time until the deadline, and the time that the current plan needs. Normal: the plan needs"
        " less. Empty if the job has no stop.deadline_s.",
        Query(newest("doll_deadline_left_seconds"), "until the deadline"),
        Query(newest("doll_planned_time_left_seconds"), "needed by the plan"),
        unit="s",
    ),
    Lines(
        "Plans (5 min)",
        'New plans in the last 5 minutes. Normal: a few. "feasible: no" means that no choice of'
        " machines meets the deadline; use more workers, a later deadline or fewer updates (alert"
        " DollDeadlineAtRisk).",
        Query(lately("doll_plans_total", "feasible"), "feasible: {{feasible}}"),
    ),
    States(
        "Renting provisioner",
        "The provisioner that rents machines for the job. Normal: the same one for a long time. If"
        " none rents, machines keep running and cost money, but no plan changes (alert"
        " DollNoProvisioner).",
        Query(f"max by (instance) ({selected('doll_provisioning')})", "{{instance}}"),
        steps={None: "gray", 1: "green"},
        names=("stands by", "rents"),
    ),
    annotations=(
        annotation("Plans", f"{lately('doll_plans_total', window='1m')} > 0", "a new plan", "blue"),
    ),
)
