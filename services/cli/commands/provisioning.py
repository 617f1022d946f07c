"""`doll provisioning` and `doll prices`: a job's rented machines, and prices of machines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path  # noqa: TC003 -- typer reads it when run
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from services.cli import tables
from services.cli.arguments import JobName  # noqa: TC001 -- typer reads it when run
from services.cli.system.outside import service_of, settings_of

if TYPE_CHECKING:
    from common.api.answers import (
        BelievedAnswer,
        CostAnswer,
        PlanInForce,
        PricesAnswer,
        ProvisioningAnswer,
    )

app = typer.Typer(
    no_args_is_help=True,
    help="Show the machines rented for a job and their cost, and request a new plan.",
)


@app.command()
def show(context: typer.Context, job: JobName) -> None:
    """Show a job's planned machines, the reasons, and the cost compared with on-demand machines.

    Example: [bold]doll provisioning show digits[/]
    """
    Console().print(draw(job, service_of(context).provisioning(job)))


@app.command()
def replan(
    context: typer.Context,
    job: JobName,
    reason: Annotated[
        str, typer.Option(help="Reason for the request, recorded with the request.")
    ] = "",
) -> None:
    """Request a new plan for the machines that are rented for a job, within a few seconds.

    Example: [bold]doll provisioning replan digits --reason "the deadline moved"[/]
    """
    service_of(context).replan(job, reason)
    typer.echo(f"a new plan for {job} was requested; see `doll provisioning show {job}`")


def prices(
    context: typer.Context,
    market: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Market file to read prices from. Optional. If unset, the market file of the"
            " admin service.",
        ),
    ] = None,
) -> None:
    """Show the current price of a machine of each pool (kind of machine), in US dollars per hour.

    Example: [bold]doll prices --market docs/examples/market.yaml[/]
    """
    answer = service_of(context).prices() if market is None else _prices(context, market)
    table = Table("pool", "kind", Column("USD per hour", justify="right"), "", box=None)
    for pool in answer.pools:
        price = "-" if pool.usd_per_hour is None else f"{pool.usd_per_hour:.4f}"
        table.add_row(pool.name, pool.kind, price, pool.reason)
    tables.show(table)


def _prices(context: typer.Context, file: Path) -> PricesAnswer:
    """Return prices from the sources that a market file names."""
    from common.spot.api import market_of, prices_answer
    from common.spot.connect import open_prices
    from common.spot.machines import by_pool

    settings = settings_of(context).model_copy(update={"market": str(file)})
    market = market_of(settings)
    return prices_answer(market, by_pool(open_prices(settings, market).look()), time.time())


def draw(job: str, answer: ProvisioningAnswer) -> Group:
    """Draw the plan in force, its cost, and earlier plans."""
    table = Table(Column(style="bold", no_wrap=True), Column(), box=None, show_header=False)
    rows = {
        "policy": f"{answer.policy}, for {answer.workers} workers; {answer.running} machines run"
    }
    if answer.plan is None:
        rows["plan"] = "none yet; check that a provisioner is running"
    else:
        rows |= _plan_rows(answer.plan)
    if answer.cost is not None:
        rows["cost"] = _cost(answer.cost)
    if answer.stability is not None:
        rows["stability"] = (
            f"{answer.stability:.2f} (below 1, updates cannot keep up with arrivals)"
        )
    if answer.believed:
        rows["estimates"] = _believed(answer.believed)
    rows |= {"warning": answer.warning} if answer.warning else {}
    rows |= {"settled": answer.settled} if answer.settled else {}
    for name, value in rows.items():
        table.add_row(name, Text(value, "bold red" if name == "warning" else ""))
    if not answer.plans:
        return Group(Text(job, "bold"), table)
    history = Table("plan", "when", "spot", "on demand", "predicted", "because", box=None)
    for plan in answer.plans:
        when = datetime.fromtimestamp(plan.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
        sizes = str(plan.number), when, str(plan.spot), str(plan.on_demand)
        history.add_row(*sizes, f"${plan.predicted_usd:,.4g}", plan.why)
    return Group(Text(job, "bold"), table, Text(), history)


def _plan_rows(plan: PlanInForce) -> dict[str, str]:
    places = ", ".join(f"{count} on {pool}" for pool, count in plan.places.items())
    feasible = "" if plan.feasible else "infeasible; the closest plan is: "
    return {
        "plan": f"{feasible}{places} (number {plan.number})",
        "limited by": plan.binding,
        "because": plan.reason,
        "decided when": plan.why,
        "expected": f"${plan.expected_cost_usd:,.4g} and {plan.expected_runtime_s:,.0f} s for"
        " the next"
        f" {plan.updates_left:,.0f} updates",
    }


def _cost(cost: CostAnswer) -> str:
    text = f"${cost.spent_usd:,.4g} so far"
    if cost.ratio_to_on_demand is not None:
        text += f", {100 * cost.ratio_to_on_demand:.1f} % of the on-demand cost"
    if cost.predicted_usd is not None:
        text += f"; ${cost.predicted_usd:,.4g} predicted in total"
    if cost.ratio_to_prediction is not None:
        text += f", of which {100 * cost.ratio_to_prediction:.1f} % was spent in the end"
    return f"{text}; ${cost.usd_per_hour:,.4g} an hour now"


def _believed(believed: Mapping[str, BelievedAnswer]) -> str:
    return ", ".join(
        f"{name} {each.value:.4g} ({each.low:.4g} to {each.high:.4g})"
        for name, each in sorted(believed.items())
    )
