"""`doll plan`: how many workers shall run on spot machines, which, and what to expect of it."""

from __future__ import annotations

import time
from pathlib import Path  # noqa: TC003 -- typer reads it when run
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from services.cli import plots
from services.cli.outside import outside_of


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
    # These bring scipy, which takes long to load: only for this command.
    from common.planning.plan import Given, answer, gather  # noqa: PLC0415 -- see above
    from services.cli.planned import as_data, draw  # noqa: PLC0415 -- see above

    if plot is not None:
        plots.check(plot)
    given = Given(
        workers=workers,
        rate_per_s=rate,
        rates=rates,
        job=job,
        group_size=group_size,
        batch_size=batch_size,
        updates=updates,
        deadline_s=deadline,
        availability=availability,
        spot_usd_per_hour=spot_price,
        on_demand_usd_per_hour=on_demand_price,
        cycle_s=cycle,
    )
    asked = gather(given, outside_of(context).open_log, time.time())
    found = answer(asked, probability=probability, spot=spot)
    for note in asked.notes:
        typer.echo(f"note: {note}", err=True)
    if plot is not None:
        plots.save(plots.plan_figure(found), plot)
    if as_json:
        with_probability = probability is not None or cycle is not None
        data = as_data(found, with_workers=list_workers, with_probability=with_probability)
        typer.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
    else:
        Console().print(draw(found, all_workers=list_workers))
