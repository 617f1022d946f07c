"""`doll backup` and `doll restore`: jobs and API keys, which only Kafka stores, in a file."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Annotated

import typer

from common.errors import UserError
from services.cli.system.outside import outside_of

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="Path of the backup file.", show_default=False)
]


def backup(context: typer.Context, file: File) -> None:
    """Save all jobs and API keys from Kafka to a file that only its owner can read.

    An existing backup file is replaced atomically. If Kafka now has fewer jobs or API keys than
    that file, the command fails and keeps the file. The file holds secrets.

    Example: [bold]doll backup doll-backup.json[/]
    """
    from common.kafka.backup import back_up

    if not file.name or file.is_dir():
        raise UserError(f"{file}: is a folder; name a file")
    part = file.with_name(f"{file.name}.part")
    try:
        earlier = file.read_bytes() if file.exists() else b""
        content, counts = back_up(outside_of(context).open_log(), time, earlier)
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise UserError(f"{file}: cannot be written: {error.strerror or error}") from error
    saved = " and ".join(f"{_counted(count)} of {topic}" for topic, count in counts.items())
    typer.echo(f"saved to {file}: {saved}")


def restore(
    context: typer.Context,
    file: File,
    *,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="If Kafka already has a job or an API key of the backup, but with other content,"
            " overwrite it with the backup's content. If unset, the restore fails in this case.",
        ),
    ] = False,
) -> None:
    """Restore jobs and API keys from a backup after Kafka has lost them.

    Running services use the restored jobs and keys without a restart.

    Example: [bold]doll restore doll-backup.json[/]
    """
    from common.kafka.backup import restore as restore_to

    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from error
    written, differing = restore_to(outside_of(context).open_log(), content, replace=replace)
    for topic, count in written.items():
        typer.echo(f"{topic}: {_counted(count)} restored")
    for each in differing:
        typer.echo(f"differs: {each}", err=True)


def _counted(records: int) -> str:
    return f"{records:,} record{'' if records == 1 else 's'}"
