"""`doll backup` and `doll restore`: what Kafka alone has of jobs and API keys, in a file."""

from __future__ import annotations

import os
from pathlib import Path
from time import time
from typing import Annotated

import typer

from common.errors import UserError
from services.cli.system.outside import outside_of

File = Annotated[Path, typer.Argument(metavar="FILE", help="The backup file.", show_default=False)]


def backup(context: typer.Context, file: File) -> None:
    """Save all jobs and API keys, as Kafka has them, to a file that only its owner can read.

    An existing file is replaced at once when the new one is complete. The file holds secrets.

    Example: [bold]doll backup doll-backup.json[/]
    """
    from common.topics.backup import back_up

    content, counts = back_up(outside_of(context).open_log(), time)
    part = file.with_name(f"{file.name}.part")
    try:
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from error
    saved = " and ".join(f"{_counted(count)} of {topic}" for topic, count in counts.items())
    typer.echo(f"{file} has {saved}")


def restore(
    context: typer.Context,
    file: File,
    *,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace records of the same jobs and keys in Kafka."),
    ] = False,
) -> None:
    """Bring the jobs and API keys of a backup back after Kafka has lost them.

    Services continue with the restored records; none has to be restarted.

    Example: [bold]doll restore doll-backup.json[/]
    """
    from common.topics.backup import restore as restore_to

    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error
    written, differing = restore_to(outside_of(context).open_log(), content, replace=replace)
    for topic, count in written.items():
        typer.echo(f"{topic}: {_counted(count)} restored")
    for each in differing:
        typer.echo(f"differs: {each}", err=True)


def _counted(records: int) -> str:
    return f"{records:,} record{'' if records == 1 else 's'}"
