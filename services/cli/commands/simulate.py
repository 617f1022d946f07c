"""`doll simulate`: what policies cost and how often they are in time, over many simulated runs."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 -- typer reads it when run
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from common.config.validation import complaint
from common.errors import GivenError, UserError
from services.cli.render import plots
from services.cli.system.outside import system_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.planning.compare import Result
    from common.planning.simulation import SimulateRequest
    from common.simulation.experiments.spec import Experiment
    from services.cli.system.system import System


def simulate(
    context: typer.Context,
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
    # These bring scipy, which takes long to load: only for this command.
    from common.planning.compare import as_data  # noqa: PLC0415 -- see above
    from common.simulation.experiments.experiment import load_experiment  # noqa: PLC0415 -- above
    from services.cli.render.simulated import draw, title  # noqa: PLC0415 -- see above

    if plot is not None:
        plots.check(plot)
    experiment = load_experiment(file)
    request = _request(experiment, runs, seed, policy or [])
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

        results = _simulated(system_of(context), request, file.parent, advance)
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


def _request(
    experiment: Experiment, runs: int, seed: int, policies: Sequence[str]
) -> SimulateRequest:
    """Put together what is asked.

    Raises:
        UserError: By the option that makes no sense.
    """
    from common.planning.simulation import SimulateRequest  # noqa: PLC0415 -- see `simulate`

    given = {"experiment": experiment, "runs": runs, "seed": seed, "policies": policies}
    try:
        return SimulateRequest.model_validate(given)
    except ValidationError as error:
        raise UserError(complaint(error, name=_option_of)) from error


def _simulated(
    system: System, request: SimulateRequest, folder: Path, advance: Callable[[str, float], None]
) -> dict[str, Result]:
    """Simulate; what is too much is told by the option, or by the field of the file.

    Raises:
        UserError: By the option.
    """
    try:
        return system.simulate(request, folder, advance)
    except GivenError as error:
        raise UserError(f"{', '.join(map(_option_of, error.fields))}: {error.problem}") from error


def _option_of(path: str) -> str:
    """What gave a field: an option, or the file."""
    field, bracket, _ = path.partition("[")
    if field == "policies":
        return "--policy" if bracket else "--policies"
    return f"--{field}" if field in ("runs", "seed") else path.removeprefix("experiment.")
