"""`doll topic`: content of a topic, and a proposed job file for it."""

from __future__ import annotations

from typing import Annotated

import typer

from common.errors import UnknownTopicError, UserError
from services.cli.system.outside import outside_of

# Maximum number of records that are read.
_RECORDS = 1000

app = typer.Typer(no_args_is_help=True, help="Inspect Kafka topics.")


@app.command()
def describe(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="Topic whose records a job will read.")],
    *,
    label: Annotated[
        str,
        typer.Option(
            help="Path of the value to predict, such as `payload.after.is_fraud`.",
            show_default="guessed",
        ),
    ] = "",
) -> None:
    """Read a topic's newest records, and propose the blocks `records` and `task` of a job file.

    Check the proposal before you use it: the value to predict, and the fields to use or leave out.

    Example: [bold]doll topic describe payments --label payload.after.is_fraud[/]
    """
    from common.kafka.read import records_of
    from common.kafka.schemas import open_registry
    from services.cli.commands.proposal import propose

    outside = outside_of(context)
    log = outside.open_log()
    try:
        partitions = log.partitions(topic)
    except UnknownTopicError as error:
        raise UserError(f'there is no topic "{topic}"') from error
    share = -(-_RECORDS // len(partitions))
    found = [record for each in partitions for record in records_of(log, each, share)]
    values = [record.value for record in found if record.value is not None]
    if not values:
        raise UserError(f'topic "{topic}" has no records')
    registry = open_registry(outside.settings)
    typer.echo("\n".join(propose(values, label or None, registry).text(values)))
