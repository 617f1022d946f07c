"""The dashboard of cost: a job's machines, their cost, and its deadline."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Lines, Query, Stat, States, annotation
from deploy.grafana.queries import lately, newest, selected

COST = Dashboard(
    "cost",
    "What machines a job has, what they cost against on-demand ones, and whether it is in time.",
    # Now.
    Stat(
        "USD per hour",
        "Of all machines that run now. Normal: what the plan expects; `doll provisioning show`.",
        Query(newest("doll_cost_usd_per_hour"), "USD/h"),
        unit="currencyUSD",
    ),
    Stat(
        "Spent",
        "Since the job began, by the second and at the prices of the time.",
        Query(newest("doll_spent_usd_total"), "spent"),
        unit="currencyUSD",
    ),
    Stat(
        "Of on-demand machines alone",
        "Spent over what the same updates would have cost on demand. Normal: 20 to 80 %. From 100 %"
        " on, spot machines do not pay: alert DollCostAboveOnDemand.",
        Query(f"{newest('doll_spent_usd_total')} / {newest('doll_on_demand_only_usd')}", "share"),
        unit="percentunit",
        steps={None: "green", 0.8: "orange", 1.0: "red"},
    ),
    Stat(
        "Per million records",
        "Spent over records in updates: to compare jobs. Falls after the start-up of machines.",
        Query(newest("doll_cost_usd_per_million_records"), "USD"),
        unit="currencyUSD",
    ),
    Stat(
        "Time to spare",
        "Until the deadline, less what the plan needs. Below 0 the deadline will be missed unless"
        " the plan changes: alert DollDeadlineAtRisk. Empty without a deadline.",
        Query(
            newest("doll_deadline_left_seconds") + " - " + newest("doll_planned_time_left_seconds"),
            "to spare",
        ),
        unit="s",
        steps={None: "red", 0: "green"},
    ),
    Stat(
        "Capacity over arrivals",
        "What machines can do over what arrives (Proposition 1). Normal: above 1. Below: they do"
        " not keep up; for a moment after a preemption that is as it must be.",
        Query(newest("doll_fleet_capacity_ratio"), "capacity"),
        unit="percentunit",
        steps={None: "red", 1.0: "green"},
    ),
    # Over time.
    Lines(
        "Spent, and on demand alone",
        "Normal: spent stays below. The distance is what was saved.",
        Query(newest("doll_spent_usd_total"), "spent"),
        Query(newest("doll_on_demand_only_usd"), "on demand alone"),
        unit="currencyUSD",
    ),
    Lines(
        "Cost per hour",
        "Of all machines that run. Steps: machines come, go, or are preempted; slopes: prices.",
        Query(newest("doll_cost_usd_per_hour"), "USD/h"),
        unit="currencyUSD",
    ),
    Lines(
        "Cost per update",
        "Spent over updates made. Normal: falls at first, then is flat. Rises: machines run and"
        " little is trained.",
        Query(newest("doll_cost_usd_per_update"), "USD"),
        unit="currencyUSD",
    ),
    Lines(
        "Prices by pool",
        "Of one machine and hour. A plan is made anew whenever one changes.",
        Query(newest("doll_price_usd_per_hour", "pool"), "{{pool}}"),
        unit="currencyUSD",
    ),
    Lines(
        "Machines",
        "Those paid for by pool, and those that the plan wants by kind. Normal: they agree, but for"
        " minutes after a preemption. Wanted for long and not there: pools refuse; see the log.",
        Query(newest("doll_machines_running", "pool"), "{{pool}}"),
        Query(newest("doll_machines_wanted", "kind"), "wanted: {{kind}}"),
    ),
    Lines(
        "Machines that ended, in an hour",
        "Normal: preempted as often as availability says, released by plans. failed, refused, lost:"
        " see the provisioner's log, and the machines'.",
        Query(lately("doll_machines_ended_total", "cause", window="1h"), "{{cause}}"),
    ),
    Lines(
        "Availability of spot pools",
        "What is believed of alpha, and where it lies with 90 %. Narrows as machines are watched."
        " Falls: the plan buys more on demand.",
        Query(newest("doll_estimated_availability_ratio", "pool", "bound"), "{{pool}} {{bound}}"),
        unit="percentunit",
    ),
    Lines(
        "Arrivals",
        "Records per second of all streams, as believed, and where they lie with 90 %. Wide at"
        " first: plans before are guesses.",
        Query(newest("doll_estimated_arrival_records_per_second", "bound"), "{{bound}}"),
        unit="suffix: records/s",
    ),
    Lines(
        "A batch's gradient",
        "Seconds, as believed, and where they lie with 90 %. Rises: slower machines, or larger b.",
        Query(newest("doll_estimated_gradient_seconds", "bound"), "{{bound}}"),
        unit="s",
    ),
    Lines(
        "Time left",
        "Until the deadline, and what the plan needs. Normal: the plan stays below. Empty without"
        " stop.deadline_s.",
        Query(newest("doll_deadline_left_seconds"), "until the deadline"),
        Query(newest("doll_planned_time_left_seconds"), "by the plan"),
        unit="s",
    ),
    Lines(
        "Plans in 5 minutes",
        "Normal: a few. feasible no: nothing meets the deadline; more workers, a later deadline or"
        " fewer updates (alert DollDeadlineAtRisk).",
        Query(lately("doll_plans_total", "feasible"), "feasible: {{feasible}}"),
    ),
    States(
        "Who rents",
        "Normal: one replica for a long time. None: machines run on and cost, and no plan changes"
        " (alert DollNoProvisioner).",
        Query(f"max by (instance) ({selected('doll_provisioning')})", "{{instance}}"),
        steps={None: "gray", 1: "green"},
        names=("stands by", "rents"),
    ),
    annotations=(
        annotation("Plans", f"{lately('doll_plans_total', window='1m')} > 0", "a new plan", "blue"),
    ),
)
