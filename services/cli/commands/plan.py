"""`doll plan`: how many workers should run on spot machines, which ones, and what to expect."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 -- typer reads it when run
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from common.errors import UserError
from services.cli.system.outside import service_of

if TYPE_CHECKING:
    from common.api.answers import CurveAnswer, PlanAnswer

_FIELDS_SHOWN = (
    *("feasible", "spot", "on_demand", "expected_cost_usd", "expected_runtime_s"),
    *("cost_ratio_to_on_demand", "binding", "reason"),
)
# Number of ranges or names of workers shown, which fit into a line or two.
_RANGES = 8
# Approximate number of points of the curve, which fit on a screen.
_POINTS = 12
# Maximum width of a bar in characters.
_BAR = 30
# Options that are named differently from their fields.
_OPTIONS = {
    "rate_per_s": "--rate",
    "rates_per_s": "--rates",
    "deadline_s": "--deadline",
    "gradient_s": "--gradient",
    "spot_usd_per_hour": "--spot-price",
    "on_demand_usd_per_hour": "--on-demand-price",
    "cycle_s": "--cycle",
}


def plan(  # noqa: PLR0913 -- the options of a command
    context: typer.Context,
    *,
    workers: Annotated[
        int | None, typer.Option(help="Number of workers (N), all with the same --rate.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Records per second that arrive at each worker.")
    ] = None,
    rates: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with one line per worker: the records per second that arrive at the worker."
            " Used instead of --workers and --rate.",
        ),
    ] = None,
    job: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Take the batch size, the group size, the remaining updates and the remaining"
            " time from this job, and the rates from its recent arrivals. Other options override"
            " these values.",
        ),
    ] = "",
    group_size: Annotated[
        int | None, typer.Option(help="Number of batches per update (K).")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Number of records per batch (b).")] = None,
    updates: Annotated[
        float | None, typer.Option(help="Number of updates of the model that are left to make (J).")
    ] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds left until the deadline.")] = None,
    availability: Annotated[
        float | None,
        typer.Option(help="Share of time, from 0 to 1, that a spot machine is available."),
    ] = None,
    spot_price: Annotated[
        float | None, typer.Option(help="Price of a spot machine, in US dollars per hour.")
    ] = None,
    on_demand_price: Annotated[
        float | None, typer.Option(help="Price of an on-demand machine, in US dollars per hour.")
    ] = None,
    cycle: Annotated[
        float | None,
        typer.Option(
            help="Mean time between two preemptions of the same spot machine, in seconds. Used to"
            " compute the probability of meeting the deadline.",
            show_default="1000",
        ),
    ] = None,
    market: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Market file to read prices and availability from, instead of --availability,"
            " --cycle, --spot-price and --on-demand-price. The plan uses the cheapest pool (kind)"
            " of spot machines in the file, and the mean of recorded prices.",
        ),
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder with files of recorded availability of spot machines, instead of"
            " --availability and --cycle. With --market, it has one file for each pool of the"
            " market; without --market, each file is a pool of machines that cost --spot-price.",
        ),
    ] = None,
    update_mb: Annotated[
        float | None,
        typer.Option(
            help="Megabytes that a machine sends and receives per update, both directions added."
            " Used if a pool of --market charges for network traffic."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="bidbrain",
            help="Print the bids for spot machines that process a backlog at the lowest cost"
            " (bidbrain, from the Proteus paper, Harlap et al. 2017), at the latest prices of"
            " --market and for at most --workers machines. Needs --gradient instead of rates."
            " Optional. If unset, plan for live streams with the method of the DOLL paper (Jiang,"
            " Zhang and Joe-Wong).",
        ),
    ] = None,
    gradient: Annotated[
        float | None,
        typer.Option(
            help="Mean time to compute the gradient of one batch on an on-demand machine, in"
            " seconds. For --policy bidbrain."
        ),
    ] = None,
    probability: Annotated[
        float | None,
        typer.Option(
            help="Minimum probability of meeting the deadline, from 0 to 1. Optional. If unset,"
            " the plan meets the deadline on average."
        ),
    ] = None,
    spot: Annotated[
        int | None,
        typer.Option(
            help="Number of workers on spot machines for which to compute cost and runtime."
            " Optional. If unset, the cheapest number is planned."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Find the cheapest mix of spot and on-demand machines that meets a deadline.

    If no mix meets the deadline, `feasible` is false in the output; the exit status is still 0.

    Example: [bold]doll plan --workers 64 --rate 125 --group-size 20 --batch-size 256
    --updates 10000 --deadline 6720 --availability 0.9 --spot-price 0.158
    --on-demand-price 0.286[/]
    """
    import msgspec

    from common.spot.planning.plan import plan_answer
    from common.spot.planning.request import PlanRequest, SpotPoolAsked
    from services.cli.options import complaints_by

    listed = None if rates is None else read_rates(rates)
    given: dict[str, Any] = {
        "workers": workers,
        "rate_per_s": rate,
        "rates_per_s": listed,
        "job": job,
        "group_size": group_size,
        "batch_size": batch_size,
        "updates": updates,
        "deadline_s": deadline,
        "availability": availability,
        "spot_usd_per_hour": spot_price,
        "on_demand_usd_per_hour": on_demand_price,
        "cycle_s": cycle,
        "probability": probability,
        "spot": spot,
        "update_mb": update_mb,
        "policy": policy,
        "gradient_s": gradient,
        "list_workers": True,
        "curve": 0 if as_json else _POINTS,
    }
    notes = tuple[str, ...]()
    if market is not None or traces is not None:
        _only(
            market,
            availability=availability,
            cycle=cycle,
            on_demand_price=on_demand_price,
            spot_price=spot_price,
        )
        from common.spot.planning.markets import rentable

        there = rentable(market, traces, spot_price, workers or len(listed or ()) or None)
        notes = there.notes
        past = there.past_usd_per_hour if policy else {}
        pools = []
        for each in there.pools:
            asked = {k: v for k, v in asdict(each).items() if k in SpotPoolAsked.model_fields}
            pools.append(asked | {"past_usd_per_hour": past.get(each.name)})
        seen = bool(job) and traces is None
        given |= {"pools": pools, "spot_usd_per_hour": None, "seen": seen}
        if there.on_demand_usd_per_hour is not None:
            given["on_demand_usd_per_hour"] = there.on_demand_usd_per_hour
    with complaints_by(_option_of):
        request = PlanRequest.model_validate(given)
        found = service_of(context).plan(request) if job else plan_answer(request, _nowhere, 0.0)
    for note in (*found.notes, *notes):
        typer.echo(f"note: {note}", err=True)
    if as_json:
        with_probability = probability is not None or cycle is not None
        data = as_data(found, with_probability=with_probability)
        typer.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
    else:
        Console().print(draw(found))


def _nowhere() -> NoReturn:
    raise AssertionError("no job is named, so nothing is read")


def _only(market: Path | None, **options: float | None) -> None:
    """Refuse options whose values a market file or recordings give.

    Raises:
        UserError: If one of these options is given, too.
    """
    said = "--traces" if market is None else "--market"
    says = ("availability", "cycle") if market is None else tuple(options)
    for name in says:
        if options[name] is not None:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option}: conflicts with {said}, which gives this value; remove one")


def _option_of(path: str) -> str:
    """Return the option of a field: `rates_per_s[3]` is `--rates[3]`."""
    field, bracket, rest = path.partition("[")
    return _OPTIONS.get(field, f"--{field.replace('_', '-')}") + bracket + rest


def read_rates(path: Path) -> list[float]:
    """Read one rate per worker, each on a line.

    Raises:
        UserError: If the file cannot be read, or a line is not a number.
    """
    from doll.yaml_file import read_text

    rates = list[float]()
    try:
        lines = read_text(path).splitlines()
    except UserError as error:
        raise UserError(f"--rates: {error}") from error
    for number, line in enumerate(filter(str.strip, lines), start=1):
        try:
            rates.append(float(line))
        except ValueError as error:
            raise UserError(
                f"--rates: {path}, line {number}: must be a number, got {line!r}"
            ) from error
    return rates


def as_data(plan: PlanAnswer, *, with_probability: bool) -> dict[str, Any]:
    """Return the plan as plain data; infinite values (nothing ever runs) are null."""
    data: dict[str, Any] = {name: getattr(plan, name) for name in _FIELDS_SHOWN}
    if with_probability:
        data["deadline_probability"] = plan.deadline_probability
    if plan.bids:
        data["bids"] = [one.model_dump() for one in plan.bids]
    if plan.pools:
        data |= {"pool": plan.pool, "pools": [one.model_dump() for one in plan.pools]}
    data["spot_workers"] = list(plan.spot_workers or ())
    if plan.names:
        data["workers"] = list(plan.names)
    return data


def draw(plan: PlanAnswer) -> Group:
    """Draw the plan, then cost and runtime against the number of spot workers."""
    table = Table(Column(style="bold", no_wrap=True), Column(), box=None, show_header=False)
    rows = {
        "plan": f"{plan.spot} of {plan.workers} workers on spot, {plan.on_demand} on demand",
        "spot workers": _which(plan),
        "cost": f"{_usd(plan.expected_cost_usd)}, {_percent(plan.cost_ratio_to_on_demand)} of"
        f" {_usd(plan.on_demand_only_usd)} on demand only",
        "runtime": f"{_seconds(plan.expected_runtime_s)} on average; the deadline is"
        f" {_seconds(plan.deadline_s)}, without preemptions (theta_0) it takes"
        f" {_seconds(plan.undisturbed_s)}",
        "in time": f"with probability {_percent(plan.deadline_probability)}, if a spot"
        f" machine is preempted every {_seconds(plan.cycle_s)}",
        "limited by": plan.binding,
        "because": plan.reason,
    }
    if plan.bids:
        for name in ("spot workers", "in time", "limited by"):
            del rows[name]
        rows["plan"] = f"bids for {plan.spot} spot machines, {plan.on_demand} on demand"
    if not plan.feasible:
        rows = {"feasible": "no; the closest plan is:" if not plan.spot else "no", **rows}
    if plan.pools:
        rows["plan"] += f", spot pool {plan.pool}"
    for name, value in rows.items():
        table.add_row(name, Text(value, "bold red" if name == "feasible" else ""))
    shown: list[Table | Text] = [table, Text()]
    if plan.pools:
        shown += [_pools(plan), Text()]
    if plan.curve is not None:
        shown.append(_curve(plan, plan.curve))
    return Group(*shown)


def _pools(plan: PlanAnswer) -> Table:
    """Draw the plan of each pool of spot machines."""
    table = Table(Column("pool", no_wrap=True), box=None)
    for head in ("$/h", "available", "cycle", "N_s", "runtime", "in time", "cost"):
        table.add_column(head, justify="right")
    for one in plan.pools:
        table.add_row(
            one.name,
            f"{one.usd_per_hour:.4g}",
            _percent(one.availability),
            _seconds(one.cycle_s),
            str(one.spot) if one.feasible else "late",
            _seconds(one.expected_runtime_s),
            _percent(one.deadline_probability),
            _usd(one.expected_cost_usd),
            style="bold" if one.name == plan.pool else "",
        )
    return table


def ranges(numbers: Iterable[int]) -> list[str]:
    """Format whole numbers as ranges: 0-2, 5, 7-9."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [f"{first}-{last}" if first < last else str(first) for first, last in found]


def _which(plan: PlanAnswer) -> str:
    workers, names = plan.spot_workers or (), plan.names
    parts = [names[index] for index in workers] if names else ranges(workers)
    if not parts:
        return "none"
    more = "" if len(parts) <= _RANGES else ", ... (--json has all)"
    return ", ".join(parts[:_RANGES]) + more


def _curve(plan: PlanAnswer, curve: CurveAnswer) -> Table:
    every = math.ceil(len(curve.spot) / _POINTS)
    highest = max((cost for cost in curve.cost_usd if cost is not None), default=0.0) or 1.0
    table = Table(
        Column("N_s", justify="right"),
        Column("runtime", justify="right"),
        Column("in time", justify="right"),
        Column("cost", justify="right"),
        Column("", no_wrap=True),
        box=None,
    )
    for index, spot in enumerate(curve.spot):
        if index % every and spot not in (plan.spot, plan.workers):
            # Only every n-th point is drawn, besides the plan and the end.
            continue
        cost, enough = curve.cost_usd[index], curve.enough[index]
        bar = "" if cost is None else "█" * round(_BAR * cost / highest)
        mark = " <- plan" if spot == plan.spot else "" if enough else " late"
        table.add_row(
            str(spot),
            _seconds(curve.runtime_s[index]),
            _percent(curve.in_time[index]),
            _usd(cost),
            Text(bar + mark),
            style="bold" if spot == plan.spot else "" if enough else "dim",
        )
    return table


def _usd(usd: float | None) -> str:
    if usd is None:
        return "never finishes"
    return f"${usd:,.2f}" if usd >= 1 or not usd else f"${usd:.3g}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    return f"{seconds:,.0f} s" if seconds >= 100 or not seconds else f"{seconds:.3g} s"


def _percent(share: float | None) -> str:
    return "infinite" if share is None else f"{100 * share:.2f} %"
