"""`doll model`: take a trained model out, as safetensors."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 -- typer reads it when run
from typing import TYPE_CHECKING, Annotated

import typer

from common import topics
from common.checkpoints import CheckpointStore
from common.core.snapshots import choose
from common.errors import CorruptError, UnavailableError, UserError
from common.jobs import JobBook
from common.saved import Saved, from_bytes, from_parts
from common.wire import decode_audit
from services.cli.outside import outside_of
from services.cli.reading import read_decoded

if TYPE_CHECKING:
    from common.core.messages import AuditRecord
    from services.cli.outside import Outside

app = typer.Typer(no_args_is_help=True, help="Take trained models out.")


@app.command()
def pull(
    context: typer.Context,
    job: Annotated[str, typer.Argument(help="The job's name.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="FILE.safetensors")],
    version: Annotated[int | None, typer.Option(min=0, help="One that is kept.")] = None,
) -> None:
    """Write a model's weights to a file that `safetensors.torch.load_file` reads.

    Of what checkpoints and hot snapshots hold, it is the newest whose updates count by the audit.

    Example: [bold]doll model pull digits -o digits.safetensors[/]
    """
    outside = outside_of(context)
    log = outside.open_log()
    spec = JobBook(log).get(job).spec
    kept = _kept(outside, job)
    found = newest(kept, read_decoded(log, topics.updates_topic(job), decode_audit), version)
    # These bring torch, which takes seconds: only for a job that has a model.
    from common.job_task import task_of  # noqa: PLC0415 -- see above
    from common.learning.checkpoint import save_weights, unpack  # noqa: PLC0415 -- see above

    weights = unpack(found.trainer)[0].get("weights")
    if weights is None:
        raise CorruptError("the snapshot holds no weights")
    data = save_weights(task_of(spec, outside.settings.tasks).build(), weights)
    try:
        output.write_bytes(data)
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error}") from error
    made = found.snapshot.made
    typer.echo(
        f"{job} version {made.version} (made by leader {made.epoch}): {output}, {len(data):,} B"
    )


def newest(
    kept: list[Saved], updates: list[tuple[int, AuditRecord | None]], version: int | None
) -> Saved:
    """The newest snapshot whose updates count, or that of one version.

    Raises:
        UserError: If there is none; names the versions that there are.
    """
    by_rank = {saved.snapshot.rank: saved for saved in kept}
    asked = [
        saved.snapshot
        for saved in by_rank.values()
        if version is None or saved.snapshot.made.version == version
    ]
    choice = choose(asked, updates)
    if choice is None:
        versions = sorted({saved.snapshot.made.version for saved in kept})
        listed = ", ".join(map(str, versions)) or "none yet"
        what = "no model" if version is None else f"no version {version}"
        raise UserError(f"{what} is kept that counts by the audit; kept: {listed}")
    return by_rank[choice[0].rank]


def _kept(outside: Outside, job: str) -> list[Saved]:
    """What can be read whole of both places; a place that is away is told and left out."""
    kept = list[Saved]()
    try:
        kept += filter(None, map(_hot, outside.open_board(job).snapshots()))
    except UnavailableError as error:
        typer.echo(f"without the hot snapshots: {error}", err=True)
    if not outside.settings.blobs:
        typer.echo("without checkpoints: DOLL_BLOBS names no object storage", err=True)
        return kept
    store = CheckpointStore(outside.open_blobs(), job)
    for name in store.candidates():
        try:
            kept.append(from_parts(store.load(name).parts))
        except CorruptError as error:
            typer.echo(f"without the checkpoint {name.epoch}-{name.version}: {error}", err=True)
    return kept


def _hot(data: bytes) -> Saved | None:
    try:
        return from_bytes(data)
    except CorruptError:
        return None
