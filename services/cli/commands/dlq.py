"""`doll dlq`: lists dead letters, and writes their records again once they can be used."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import NotFoundError, UserError
from services.cli.arguments import JobName  # noqa: TC001 -- typer reads it when run
from services.cli.commands.requeue import replay_batch
from services.cli.system.outside import outside_of, service_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.core.messages import Batch
    from common.jobs.operations import JobOperations
    from common.kafka.dead_letters import DeadLetter, DeadLettersRead
    from common.kafka.port import Log

app = typer.Typer(
    no_args_is_help=True,
    help="Count records and batches that jobs could not use (dead letters), and write their"
    " records to a topic again.",
)

# Maximum number of reasons shown.
_SHOWN = 20


@app.command()
def show(context: typer.Context, job: JobName) -> None:
    """Count the records and batches that a job could not use (dead letters), by topic and reason.

    Example: [bold]doll dlq show digits[/]
    """
    page = service_of(context).dead_letters(job, _SHOWN)
    table = Table("topic", "records", "batches", "replayed", "reason", box=None)
    for each in page.reasons:
        row = each.stream, each.records, each.batches, each.replayed, each.reason
        table.add_row(*(Text(str(cell)) for cell in row))
    if page.reasons:
        Console(soft_wrap=True).print(table)
    total = sum(each.records + each.batches for each in page.reasons)
    others = page.others
    typer.echo(
        f"{total} dead letters" + (f", and {others} more for rarer reasons" if others else "")
    )


@app.command()
def replay(  # noqa: PLR0913 -- each is an option of its own
    context: typer.Context,
    topic: Annotated[
        str,
        typer.Argument(
            help="Topic of the original records; their dead letters are in the topic TOPIC.dlq."
        ),
    ],
    reason: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Replay only dead letters whose reason (why the record could not be used)"
            " contains this text.",
        ),
    ] = "",
    job: Annotated[
        str,
        typer.Option(
            help="Replay only records that this job could not use. Optional. If unset, those of"
            " all jobs."
        ),
    ] = "",
    to: Annotated[
        str,
        typer.Option(help="Topic to write the records to. Optional. If unset, TOPIC itself."),
    ] = "",
    *,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Replay all dead letters of the topic, whatever the reason. Required unless"
            " --reason is given.",
        ),
    ] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="Include records that were replayed before and failed again."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be replayed, without writing anything."),
    ] = False,
) -> None:
    """Write records that jobs could not use (dead letters) to a topic again, for all its readers.

    The records are written as new ones with the same keys and headers, and a header `replayed_from`
    that names the original offset. Each record is written once; if the command is interrupted, run
    it again to write the rest. After the replay of a quarantined batch, `doll job requeue` can no
    longer train that batch.

    Example: [bold]doll dlq replay clinic-a --reason "label: is missing" --dry-run[/]
    """
    if bool(reason) == every:
        raise UserError("give either --reason TEXT or --all")
    from common.jobs.changes import local_user
    from common.jobs.operations import JobOperations
    from common.jobs.quarantine import Quarantine
    from common.jobs.replay import Replayer
    from common.kafka.dead_letters import read_dead_letters

    log, stream = outside_of(context).open_log(), topic.removesuffix(".dlq")
    to = to or stream
    if to.endswith(".dlq"):
        raise UserError(f"--to: must not be a topic of dead letters, got {to}")
    log.partitions(to)
    if dry_run:
        chosen = _chosen(read_of(read_dead_letters(log, stream), log, job), reason, to)
        batches = sum(each.is_batch for each in chosen)
        typer.echo(f"would be replayed: {len(chosen) - batches} records and {batches} batches")
        return
    # The replayer is created before the read, because it fences other replays.
    with closing(Replayer(log, local_user().name)) as replayer:
        read = read_of(replayer.dead_letters(stream), log, job)
        # The quarantine must also end for batches whose records another job's replay has written.
        quarantined = [
            each for each in read.dead_letters if each.is_batch and reason in each.reason
        ]
        chosen = _chosen(read, reason, to)
        left = [each for each in chosen if each.is_batch]
        records = [each for each in chosen if not each.is_batch]
        written, came_back, cut = replayer.records(records, to, again=again)
        for name in sorted({each.job for each in quarantined if each.job}):
            # The batches of a purged job are unknown.
            if not _is_there(JobOperations(log), name):
                if purged := sum(each.job == name for each in left):
                    typer.echo(f"not replayed: {purged} batches of a purged job")
                continue
            quarantine = Quarantine(log, name)
            begun = [each for each in quarantine.replayed() if _is_of(left, name, each)]
            others = [each for each in quarantine.choose(None) if _is_of(quarantined, name, each)]
            for batch in [*begun, *others]:
                written += replay_batch(replayer, quarantine, batch, to)
    _note(JobOperations(log), chosen if written else (), f"dead letters of {stream} to {to}")
    typer.echo(f"{written} records were written to {to}")
    if came_back:
        typer.echo(
            f"not written: {came_back} records that were replayed before and failed again; add"
            " --again"
        )
    if cut:
        typer.echo(
            f"not written: {cut} records that Kafka deleted and whose dead letters are truncated"
        )


def read_of(read: DeadLettersRead, log: Log, job: str) -> DeadLettersRead:
    """Return the dead letters of one job if one is named, else all."""
    from common.jobs.operations import JobOperations

    if not job:
        return read
    own = JobOperations(log).id_of(job)
    return read._replace(dead_letters=[each for each in read.dead_letters if each.job == own])


def _chosen(read: DeadLettersRead, reason: str, to: str) -> list[DeadLetter]:
    return [
        each for each in read.dead_letters if reason in each.reason and not read.replayed(each, to)
    ]


def _note(jobs: JobOperations, dead_letters: Iterable[DeadLetter], what: str) -> None:
    """Record in each job how many of its dead letters were replayed."""
    for job, count in Counter(each.job for each in dead_letters).items():
        if _is_there(jobs, job):
            jobs.note(job, "replayed", f"{count} {what}")


def _is_there(jobs: JobOperations, job: str) -> bool:
    from common.kafka.names import job_name

    try:
        return jobs.get(job_name(job)).id == job
    except NotFoundError:
        return False


def _is_of(dead_letters: Iterable[DeadLetter], job: str, batch: Batch) -> bool:
    """Return True if one of the dead letters belongs to a batch of a job."""
    spans = {span[:4] for span in batch.address}
    return any(
        each.job == job and each.span[:4] in spans and each.batch in {None, batch}
        for each in dead_letters
    )
