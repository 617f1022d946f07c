"""`doll dlq`: what is in the dead-letter topics, and writing it anew where it can be used now."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import UserError
from services.cli.arguments import AsJson  # noqa: TC001 -- typer reads it when run
from services.cli.commands.requeue import replay_batch
from services.cli.system.outside import outside_of, system_of

if TYPE_CHECKING:
    from common.ports.servers import Log
    from common.topics.dead_letters import DeadLetter, LettersRead

app = typer.Typer(
    no_args_is_help=True, help="Look at dead letters, and put their records back to work."
)

Job = Annotated[str, typer.Option(help="Only letters of this job.")]
_SHOWN = 20  # reasons
_MOST = 500


@app.command()
def show(
    context: typer.Context,
    topic: Annotated[
        str, typer.Argument(help="The datastream. Default: all streams of --job.")
    ] = "",
    job: Job = "",
    *,
    as_json: AsJson = False,
) -> None:
    """Count what could not be used, by reason and job.

    Example: [bold]doll dlq show clinic-a[/]
    """
    heads = "topic", "job", "records", "batches", "replayed", "reason"
    limit, rows = _MOST if as_json else _SHOWN, list[tuple[str | int, ...]]()
    if topic:
        from common.topics.dead_letters import by_reason

        stream = topic.removesuffix(".dlq")
        found = by_reason(read_of(outside_of(context).open_log(), stream, job))
        others = sum(len(each.letters) for each in found[limit:])
        for name, reason, letters, batches, replayed in found[:limit]:
            records = len(letters) - batches
            rows.append((stream, name or "?", records, batches, replayed, reason))
    elif job:
        page = system_of(context).dead_letters(job, limit)
        others = page.others
        for each in page.reasons:
            counts = each.records, each.batches, each.replayed
            rows.append((each.stream, job, *counts, each.reason))
    else:
        raise UserError("say which: a topic, or --job NAME")
    if as_json:
        typer.echo(json.dumps([dict(zip(heads, row, strict=True)) for row in rows], indent=2))
        return
    if rows:
        table = Table(*heads, box=None)
        for row in rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        Console(soft_wrap=True).print(table)
    told = sum(int(row[2]) + int(row[3]) for row in rows)
    typer.echo(f"{told} dead letters" + (f", and {others} for rarer reasons" if others else ""))


@app.command()
def replay(  # noqa: PLR0913 -- each is an option of its own
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="The datastream.")],
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Those whose reason contains this.")
    ] = "",
    job: Job = "",
    to: Annotated[str, typer.Option(help="Where to. Default: the datastream itself.")] = "",
    *,
    every: Annotated[bool, typer.Option("--all", help="Whatever the reason.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Also what was written anew before, and failed again.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count them.")] = False,
) -> None:
    """Write records that could not be used to a topic anew, where every reader gets them.

    They are new records, with their keys and headers and a header `replayed_from` that names the
    first one's address. Each is written once, whatever is interrupted: ask again, and it goes on
    where it stopped. Of a quarantined batch the quarantine is made final first, so that
    `doll job requeue` cannot train it, too.

    Example: [bold]doll dlq replay clinic-a --reason "label: is missing" --dry-run[/]
    """
    if bool(reason) == every:
        raise UserError("say which: --reason TEXT, or --all")
    from common.jobs.quarantine import Quarantine
    from common.jobs.replay import Replayer
    from common.jobs.store import JobStore
    from common.topics.names import job_name
    from services.cli.system.direct import BY

    log, stream = outside_of(context).open_log(), topic.removesuffix(".dlq")
    to = to or stream
    if to.endswith(".dlq"):
        raise UserError(f"--to: {to} is for dead letters")
    log.partitions(to)
    if dry_run:
        chosen = _chosen(read_of(log, stream, job), reason)
        batches = sum(each.is_batch for each in chosen)
        typer.echo(f"without --dry-run: {len(chosen) - batches} records and {batches} batches")
        return
    with closing(Replayer(log, BY)) as replayer:  # before reading: nobody else writes from now on
        chosen = _chosen(read_of(log, stream, job), reason)
        records = [each for each in chosen if not each.is_batch]
        written, came_back, cut = replayer.records(records, to, again=again)
        for name in sorted({each.job for each in chosen if each.is_batch and each.job}):
            keys = {each.key for each in chosen if each.is_batch and each.job == name}
            record = JobStore(log).get(job_name(name))
            if record.id != name:  # its batches are not known any more
                typer.echo(f"{len(keys)} batches of a job that was purged are left out")
                continue
            quarantine = Quarantine(log, name)
            for batch in [*quarantine.replayed(), *quarantine.choose(None)]:
                if keys & {str(span).encode() for span in batch.address}:
                    written += replay_batch(replayer, quarantine, batch, to)
    typer.echo(f"{written} records were written to {to}")
    if came_back:
        typer.echo(f"{came_back} had been before, and failed again: --again writes those, too")
    if cut:
        typer.echo(f"{cut} are gone, and their letters do not have the whole of them")


def read_of(log: Log, stream: str, job: str) -> LettersRead:
    """The letters of a stream, of one job if one is named."""
    from common.jobs.store import JobStore
    from common.topics.dead_letters import read_letters

    read = read_letters(log, stream)
    if not job:
        return read
    own = JobStore(log).id_of(job)
    return read._replace(letters=[each for each in read.letters if each.job == own])


def _chosen(read: LettersRead, reason: str) -> list[DeadLetter]:
    return [
        each for each in read.letters if reason in each.reason and each.key not in read.replayed
    ]
