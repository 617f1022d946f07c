"""`doll model`: take a trained model out, as safetensors."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 -- typer reads it when run
from typing import TYPE_CHECKING, Annotated

import typer

from common import topics
from common.errors import CorruptError, UnavailableError, UserError
from common.jobs import JobBook
from common.kept import in_storage, on_board, pick, wish_of
from common.reading import read_decoded
from common.saved import Stored
from common.wire import decode_audit
from services.cli.outside import outside_of

if TYPE_CHECKING:
    from common.outside import Outside

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
    kept = _kept(outside, job)
    updates = read_decoded(log, topics.updates_topic(job), decode_audit)
    found, trainer = pick(kept, updates, wish, _tell)
    # These bring torch, which takes seconds: only for a job that has a model.
    from common.job_task import task_of  # noqa: PLC0415 -- see above
    from common.learning.checkpoint import save_weights, unpack  # noqa: PLC0415 -- see above

    weights = unpack(trainer)[0].get("weights")
    if weights is None:
        raise CorruptError(f"{found.title} holds no weights")
    data = save_weights(task_of(spec, outside.settings.tasks).build(), weights)
    try:
        output.write_bytes(data)
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error}") from error
    made = found.snapshot.made
    typer.echo(
        f"{job} version {made.version} (made by leader {made.epoch}): {output}, {len(data):,} B"
    )


def _kept(outside: Outside, job: str) -> list[Stored]:
    """What is kept in both places; Redis that is away is told and left out."""
    kept = list[Stored]()
    try:
        kept += on_board(outside.open_board(job), _tell)
    except UnavailableError as error:
        typer.echo(f"without the hot snapshots: {error}", err=True)
    if outside.settings.blobs:
        kept += in_storage(outside.open_blobs(), job, _tell)
    else:
        typer.echo("without checkpoints: DOLL_BLOBS names no object storage", err=True)
    return kept


def _tell(what: str) -> None:
    typer.echo(what, err=True)
