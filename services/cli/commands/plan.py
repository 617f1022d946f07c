"""`doll plan`: how many workers shall run on spot machines, which, and what to expect of it."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 -- typer reads it when run
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from pydantic import ValidationError
from rich.console import Console

from common.config.validation import complaint
from common.errors import GivenError, UserError
from common.planning.request import PlanRequest
from services.cli.render import plots
from services.cli.render.planned import POINTS, as_data, draw
from services.cli.render.rates import read_rates
from services.cli.system.outside import system_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.api.plan import ToldPlan
    from services.cli.system.system import System

_PLOTTED = 1000  # points of the curve: as many as a figure has dots
_OPTIONS = {  # where an option is not called as its field
    "rate_per_s": "--rate",
    "rates_per_s": "--rates",
    "deadline_s": "--deadline",
    "spot_usd_per_hour": "--spot-price",
    "on_demand_usd_per_hour": "--on-demand-price",
    "cycle_s": "--cycle",
}


def plan(  # noqa: PLR0913 -- the options of a command
    context: typer.Context,
    *,
    workers: Annotated[int | None, typer.Option(help="N, all of the same --rate.")] = None,
    rate: Annotated[float | None, typer.Option(help="Of each worker, records per second.")] = None,
    rates: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A rate per worker instead: one on each line, a CSV with a column `rate`,"
            " or a JSON list.",
        ),
    ] = None,
    job: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Take K, b, and the updates and time that are left from this job, and rates"
            " from what arrived lately; other options stand above it.",
        ),
    ] = "",
    group_size: Annotated[int | None, typer.Option(help="K, batches per update.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="b, records per batch.")] = None,
    updates: Annotated[float | None, typer.Option(help="J, those that are left.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds that are left.")] = None,
    availability: Annotated[
        float | None, typer.Option(help="Share of the time that a spot machine is there, 0 to 1.")
    ] = None,
    spot_price: Annotated[float | None, typer.Option(help="USD per hour.")] = None,
    on_demand_price: Annotated[float | None, typer.Option(help="USD per hour.")] = None,
    cycle: Annotated[
        float | None,
        typer.Option(
            help="Mean seconds from one preemption of a machine to its next (1000 unless said):"
            " how surely the deadline is met depends on it."
        ),
    ] = None,
    probability: Annotated[
        float | None,
        typer.Option(help="Meet the deadline with this probability, not only on average."),
    ] = None,
    spot: Annotated[
        int | None, typer.Option(help="Say what so many spot workers come to instead.")
    ] = None,
    list_workers: Annotated[
        bool, typer.Option("--list-workers", help="Name all spot workers, also with --json.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object, as JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw cost and runtime against N_s.")
    ] = None,
) -> None:
    """Find the cheapest mix of spot and on-demand machines that meets a deadline.

    That no mix meets it is an answer, too: it ends with 0, and `feasible` is false.

    Example: [bold]doll plan --workers 64 --rate 125 --group-size 20 --batch-size 256
    --updates 10000 --deadline 6720 --availability 0.9 --spot-price 0.158
    --on-demand-price 0.286[/]
    """
    if plot is not None:
        plots.check(plot)
    given = {
        "workers": workers,
        "rate_per_s": rate,
        "rates_per_s": None if rates is None else read_rates(rates),
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
        "list_workers": list_workers or not as_json,
        "curve": _PLOTTED if plot is not None else 0 if as_json else POINTS,
    }
    found = _planned(system_of(context), given)
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    if plot is not None:
        plots.save(plots.plan_figure(found), plot)
    if as_json:
        with_probability = probability is not None or cycle is not None
        data = as_data(found, with_workers=list_workers, with_probability=with_probability)
        typer.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
    else:
        Console().print(draw(found, all_workers=list_workers))


def _planned(system: System, given: Mapping[str, object]) -> ToldPlan:
    """Ask for a plan; what is wrong is told by the option that said it.

    Raises:
        UserError: By the option.
    """
    try:
        return system.plan(PlanRequest.model_validate(given))
    except ValidationError as error:
        raise UserError(complaint(error, name=_option_of)) from error
    except GivenError as error:
        options = ", ".join(map(_option_of, error.fields))
        raise UserError(f"{options}: {error.problem}") from error


def _option_of(path: str) -> str:
    """The option that gave a field: `rates_per_s[3]` is `--rates[3]`."""
    field, bracket, rest = path.partition("[")
    return _OPTIONS.get(field, f"--{field.replace('_', '-')}") + bracket + rest
