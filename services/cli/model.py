"""`doll model`: take a trained model out, as safetensors."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 -- typer reads it when run
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import UserError
from common.jobs import JobBook
from common.kept import find_model, wish_of
from common.learning.checkpoint import save_weights
from services.cli.outside import outside_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from common.job import JobSpec
    from common.learning.checkpoint import Layout

app = typer.Typer(no_args_is_help=True, help="Take trained models out.")


@app.command()
def pull(
    context: typer.Context,
    job: Annotated[str, typer.Argument(help="The job's name.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="FILE.safetensors")],
    version: Annotated[str, typer.Option(help="A number, newest or best.")] = "newest",
) -> None:
    """Write a model's weights to a file that `safetensors.torch.load_file` reads.

    Of what checkpoints and hot snapshots hold, only what counts by the audit is taken. The best is
    the one that had the lowest mean loss over its last updates, each before it was made.

    Example: [bold]doll model pull digits -o digits.safetensors --version best[/]
    """
    wish = wish_of(version)
    outside = outside_of(context)
    log = outside.open_log()
    spec = JobBook(log).get(job).spec
    model = find_model(job, wish, outside, log, _tell)
    data = save_weights(model.layout or _layout(spec, outside.settings.tasks), model.weights)
    try:
        output.write_bytes(data)
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error}") from error
    made = model.made
    typer.echo(
        f"{job} version {made.version} (made by leader {made.epoch}): {output}, {len(data):,} B"
    )


def _layout(spec: JobSpec, allowed: Collection[str]) -> Layout:
    """The layout of the job's model, for what an older program kept without it."""
    # These bring torch, which takes seconds.
    from common.job_task import task_of  # noqa: PLC0415 -- see above
    from common.learning.parameters import layout_of  # noqa: PLC0415 -- see above

    return layout_of(task_of(spec, allowed).build())


def _tell(what: str) -> None:
    typer.echo(what, err=True)
