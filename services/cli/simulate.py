"""`doll simulate`: what policies cost and how often they are in time, over many simulated runs."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 -- typer reads it when run
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from services.cli import plots
from services.cli.silence import silent_output


def simulate(
    file: Annotated[Path, typer.Argument(help="The experiment as YAML or JSON.")],
    *,
    runs: Annotated[int, typer.Option(min=1, help="Of each policy.")] = 12,
    seed: Annotated[
        int, typer.Option(min=0, help="Of rates, arrivals, prices and preemptions.")
    ] = 0,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Instead of the file's; may be repeated to compare: on-demand, static, adaptive,"
            " chance, backfill, reassign, pools.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Summaries and all runs.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw each run's cost and runtime.")
    ] = None,
) -> None:
    """Simulate a job on machines that come and go, and tell cost, runtime and deadlines met.

    All policies meet the same rates, prices and preemptions; the same seed gives the same result.

    Example: [bold]doll simulate docs/examples/paper.yaml --runs 200 --policy static
    --policy backfill[/]
    """
    # These bring scipy and the protocol, which take long to load: only for this command.
    from common.planning.compare import compare, with_policies  # noqa: PLC0415 -- see above
    from common.simulation.experiments.experiment import load_experiment  # noqa: PLC0415 -- above
    from services.cli.simulated import as_data, draw, title  # noqa: PLC0415 -- see above

    if plot is not None:
        plots.check(plot)
    experiment = load_experiment(file)
    variants = with_policies(experiment, policy or [])
    with Progress(
        TextColumn("[bold]{task.description}[/]"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        bars = dict[str, TaskID]()

        def advance(name: str, share: float) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, total=1.0)
            progress.update(bars[name], completed=share)

        with silent_output():
            results = compare(variants, file.parent, runs, seed, advance)
    if plot is not None:
        figure = plots.runs_figure(
            title(experiment, runs),
            {name: result.runs for name, result in results.items()},
            {name: result.curves for name, result in results.items()},
        )
        plots.save(figure, plot)
    if as_json:
        data = as_data(experiment, seed, results)
        typer.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
    else:
        Console().print(draw(experiment, results))
