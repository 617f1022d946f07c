"""`doll audit`: proves from Kafka alone which records built which version of a model."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console

from common.core.audit import audit as fold
from common.core.messages import Opened
from common.core.spans import Partition
from common.errors import UnknownTopicError
from common.jobs.store import JobBook
from common.topics import names as topics
from common.topics.read import read_decoded
from common.wire.messages import decode_audit, decode_claim
from services.cli import exits
from services.cli.render.auditing import as_data, draw
from services.cli.system.outside import outside_of


def audit(
    context: typer.Context,
    job: Annotated[str, typer.Argument(help="The job's name.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    last: Annotated[int, typer.Option(min=0, help="Show so many versions.")] = 10,
) -> None:
    """Prove from Kafka alone that every record was used once, and show which built what.

    Ends with 0 if every record is accounted for (used once, skipped, quarantined or expired), with
    5 if it found a gap, an overlap or a batch used twice, and with 6 if the topics no longer reach
    back to the job's beginning.

    Example: [bold]doll audit digits --last 5[/]
    """
    log = outside_of(context).open_log()
    record = JobBook(log).get(job)
    first = record.first
    control, updates = topics.control_topic(job), topics.updates_topic(job)
    for topic in (control, updates):
        start = log.bounds(Partition(topic, 0)).start
        if start > 0:
            typer.echo(
                f"{job}: cannot be audited: {topic} begins at {start}, what came before is deleted"
                " (keep both topics without retention)",
                err=True,
            )
            raise typer.Exit(exits.AUDIT_INCOMPLETE)
    places = set(first)  # and those that were added to its streams since
    for stream in {place.topic for place in first}:
        with suppress(UnknownTopicError):
            places.update(log.partitions(stream))
    starts = log.starts(places)  # before the claims: what was read then has mostly been claimed
    # Updates first: the claims that they are made of are then in the control topic for sure.
    decided = read_decoded(log, updates, decode_audit)
    claimed = read_decoded(log, control, decode_claim)
    added = {record.partition for _, record in claimed if isinstance(record, Opened)}
    starts |= log.starts(added - starts.keys())
    result = fold(first, claimed, decided, starts, record.known)
    if as_json:
        typer.echo(json.dumps(as_data(job, result), indent=2))
    else:
        Console(soft_wrap=True).print(draw(job, result, last))
    if result.flaws:
        raise typer.Exit(exits.AUDIT_BROKEN)
