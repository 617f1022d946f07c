"""`doll model`: export a trained model as safetensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path  # noqa: TC003 -- typer reads it when run
from typing import Annotated

import typer

from common.errors import UserError
from services.cli.arguments import JobName  # noqa: TC001 -- typer reads it when run
from services.cli.system.outside import system_of

app = typer.Typer(no_args_is_help=True, help="Export trained models.")


@app.command()
def pull(
    context: typer.Context,
    job: JobName,
    output: Annotated[Path, typer.Option("--output", "-o", help="FILE.safetensors")],
    version: Annotated[str, typer.Option(help="A number, newest or best.")] = "newest",
) -> None:
    """Write a model's weights to a file that `safetensors.torch.load_file` reads.

    It is taken from checkpoints and hot snapshots, if it is part of the audited history. `best` is
    the version with the lowest mean loss over its last updates.

    Example: [bold]doll model pull digits -o digits.safetensors --version best[/]
    """
    from common.checkpoints.find import wish_of

    model = system_of(context).model(job, wish_of(version), partial(typer.echo, err=True))
    try:
        output.write_bytes(model.data)
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error}") from error
    typer.echo(
        f"{job} version {model.version} (made by leader {model.epoch}): {output},"
        f" {len(model.data):,} B"
    )
