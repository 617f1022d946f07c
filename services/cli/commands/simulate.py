"""`doll simulate`: cost, runtime and deadlines met by policies over many simulated runs."""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 -- typer reads it when run
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from common.config.program import command_of, search_path
from common.errors import DollError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.spot.experiments.spec import Experiment
    from common.spot.planning.simulation import SimulateRequest


def simulate(
    file: Annotated[Path, typer.Argument(help="Experiment file in YAML or JSON.")],
    *,
    runs: Annotated[int, typer.Option(min=1, help="Number of simulated runs per policy.")] = 12,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the random rates, arrivals, prices and preemptions.")
    ] = 0,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Policy that rents machines: on-demand (no spot machines), static (a mix that"
            " meets the deadline on average, chosen once), adaptive (the mix is chosen again when"
            " conditions change), chance (a mix that meets the deadline with a given probability),"
            " pools (spot machines of several kinds), or bidbrain (bids, for a backlog). Repeat"
            " the option to compare policies. Optional. If unset, the policy of the file.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summaries and all runs as JSON.")
    ] = False,
) -> None:
    """Simulate a job on preemptible machines, and report cost, runtime and deadlines met.

    All policies get the same rates, prices and preemptions. The same seed gives the same result.

    Example: [bold]doll simulate docs/examples/paper.yaml --runs 200 --policy static
    --policy pools[/]
    """
    import msgspec
    from rich.progress import (
        BarColumn,
        Progress,
        TaskID,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    from common.spot.experiments.spec import Experiment
    from common.spot.planning.simulation import SimulateRequest
    from services.cli.options import complaints_by

    experiment = Experiment.load(file)
    given = {"experiment": experiment, "runs": runs, "seed": seed, "policies": policy or []}
    with complaints_by(_option_of):
        request = SimulateRequest.model_validate(given)
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

        results = _simulated(request, file.parent, advance)
    if as_json:
        typer.echo(msgspec.json.format(results, indent=2).decode())
    else:
        Console().print(draw(experiment, msgspec.json.decode(results)))


def _simulated(
    request: SimulateRequest, folder: Path, advance: Callable[[str, float], None]
) -> bytes:
    """Simulate in a child process, and return the results as JSON."""
    from subprocess import PIPE, Popen

    from common.spot.planning.simulation import REPORT

    command = command_of("common.spot.planning.simulation_process", str(folder))
    environment = {**os.environ, "PYTHONPATH": search_path(sys.path)}
    with (
        # The pipe breaks if the process ends before it has read anything.
        suppress(BrokenPipeError),
        # The process has a group of its own, so that Ctrl-C reaches only this process.
        Popen(command, stdin=PIPE, stdout=PIPE, env=environment, process_group=0) as process,  # noqa: S603 -- our own command line
    ):
        stdin, stdout = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        try:
            stdin.write(request.model_dump_json(exclude_unset=True).encode() + b"\n")
            stdin.flush()
            for report in map(REPORT.decode, stdout):
                if report.progress is not None:
                    advance(*report.progress)
                elif report.refused:
                    raise UserError(report.refused)
                else:
                    return bytes(report.results)
        finally:
            process.kill()
    raise DollError(f"the simulation process ended early with status {process.returncode}")


def _option_of(path: str) -> str:
    """Return the option that gave a field, or the field's path in the file."""
    field, bracket, _ = path.partition("[")
    if field == "policies":
        return "--policy" if bracket else "--policies"
    return f"--{field}" if field in ("runs", "seed") else path.removeprefix("experiment.")


def draw(experiment: Experiment, results: dict[str, Any]) -> Group:
    """Draw one row per policy, with a legend. `--json` prints the same numbers."""
    summaries, curves = results["summary"], results.get("curves", {})
    given_up = any(summary["finished"] < summary["runs"] for summary in summaries.values())
    heads = ["cost\n$", "of on-\ndemand %", "runtime\ns", "in time\n%", "on spot\n%"]
    heads += ["preemp-\ntions", "changes"]
    heads += ["accuracy\n%"] * bool(curves) + ["given up"] * given_up
    # Eight columns must fit into 80 characters.
    table = Table(Column("policy", no_wrap=True), box=None, collapse_padding=True, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right")
    for name, summary in summaries.items():
        met, low, high = (f"{100 * share:.0f}" for share in summary["met"].values())
        cells = [
            _spread(summary["cost_usd"], _digits(summary["cost_usd"]["mean"])),
            _spread(summary["cost_ratio"], 1, 100.0),
            _spread(summary["runtime_s"], 0),
            f"{met} [{low},{high}]",
            f"{100 * summary['spot_share']:.1f}",
            f"{summary['preemptions']:,.1f}",
            f"{summary['changes']:,.1f}",
        ]
        if curves:
            cells.append(_accuracy(curves[name]))
        if given_up:
            cells.append(f"{summary['runs'] - summary['finished']} of {summary['runs']}")
        table.add_row(name, *cells)
    runs = next(iter(summaries.values()))["runs"]
    legend = "Means per run. ± is the 95 % interval of a mean, [ ] of the share of runs in time."
    if given_up:
        legend += " Runs that were given up count with their cost until then."
    shown = [Text(title(experiment, runs)), Text(), table, Text(), *_throughput(summaries)]
    return Group(*shown, Text(legend, "dim"))


def _throughput(summaries: dict[str, dict[str, Any]]) -> list[Table | Text]:
    """Draw throughput and staleness of each policy."""
    heads = ("policy", "batches/s", "staleness", "largest", "a worker's share of batches %")
    table = Table(*heads, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, summary in summaries.items():
        if (found := summary.get("throughput")) is not None:
            table.add_row(
                name,
                f"{found['batches_per_s']:,.1f}",
                f"{found['mean_staleness']:.2f}",
                f"{found['largest_staleness']}",
                f"{100 * min(found['shares']):.1f} to {100 * max(found['shares']):.1f}",
            )
    return [table, Text()] if table.rows else []


def title(experiment: Experiment, runs: int) -> str:
    """Describe the simulation in two lines."""
    rates = experiment.rates
    if rates is None:
        streams = "a backlog"
    elif isinstance(rates, tuple):
        streams = f"{math.fsum(rates):,.6g} records/s in all"
    elif isinstance(rates, float | int):
        streams = f"{rates:g} records/s each"
    else:
        streams = f"{rates.low:g} to {rates.high:g} records/s each"
    deadline = f"deadline {experiment.deadline_s or 0:,.6g} s"
    if experiment.deadline_factor is not None:
        deadline = f"deadline {experiment.deadline_factor:g} theta_0"
    given, mode = experiment.synchronisation, ""
    if given is not None:
        mode = f", {given.mode}" + f" s={experiment.most_staleness}" * (given.mode == "stale")
    return (
        f"{experiment.name}: {experiment.workers:,} workers, {streams}, K={experiment.group_size},"
        f" b={experiment.batch_size}, J={experiment.updates:,}, {runs:,} run{'s' * (runs > 1)}\n"
        f"{deadline}{mode}, {_pools(experiment)}"
    )


def _pools(experiment: Experiment) -> str:
    pools = []
    for pool in experiment.spot:
        price, alpha = pool.usd_per_hour, pool.availability
        cost = f"${price:g}/h" if isinstance(price, float | int) else "price by trace"
        share = f"{100 * alpha:g} %" if isinstance(alpha, float | int) else "by trace"
        pools.append(f"{pool.name} {cost}, available {share}")
    return f"{'; '.join(pools)}; on demand ${experiment.on_demand.usd_per_hour:g}/h"


def _digits(usd: float) -> int:
    """Return the number of decimals: cents, or three digits below one dollar."""
    return 2 if usd >= 1 or not usd else min(2 - math.floor(math.log10(usd)), 8)


def _spread(spread: dict[str, Any], digits: int, factor: float = 1.0) -> str:
    mean = f"{factor * spread['mean']:,.{digits}f}"
    if spread["high"] is None:
        return mean
    return f"{mean}±{factor * (spread['high'] - spread['mean']):,.{digits}f}"


def _accuracy(curves: list[list[dict[str, Any]]]) -> str:
    import numpy as np

    from common.spot.experiments.results import Spread

    last = [curve[-1]["accuracy"] for curve in curves if curve]
    return _spread(asdict(Spread.of(np.array(last))), 1, 100.0) if last else ""
