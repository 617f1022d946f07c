"""`doll job requeue` and `doll job replay`: take batches out of quarantine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from time import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import ExpiredError, UserError
from services.cli.arguments import JobName  # noqa: TC001 -- typer reads it when run
from services.cli.system.outside import outside_of, service_of

if TYPE_CHECKING:
    from common.core.messages import Batch
    from common.jobs.quarantine import Outcome, Quarantine, QuarantinedBatchAnswer
    from common.jobs.replay import Replayer

Batches = Annotated[
    list[int] | None,
    typer.Option(
        "--batch",
        metavar="OFFSET",
        help="Batch, by its number in the list that `doll job requeue JOB` prints. Repeatable.",
    ),
]
All = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Apply to every quarantined batch, except those that were replayed and those whose"
        " records Kafka has deleted.",
    ),
]


def requeue(
    context: typer.Context,
    job: JobName,
    batch: Batches = None,
    *,
    all_batches: All = False,
) -> None:
    """Train batches again that a job set aside (quarantined) because they could not be trained.

    Use this command after you have fixed the job's task. Without --batch or --all, the command
    lists the quarantined batches and the reasons. If the job is held because of these batches, run
    `doll job resume` afterwards. Batches whose records Kafka has deleted and batches that were
    replayed cannot be requeued.

    Example: [bold]doll job requeue digits --all[/]
    """
    service, offsets = service_of(context), _named(batch, all_batches=all_batches)
    requeued = () if offsets == [] else service.requeue(job, offsets).batches
    if not requeued:
        _list(job, service.quarantine(job))
        return
    for each in requeued:
        typer.echo(f"batch {each.batch}: {_OUTCOMES[each.outcome]}")
    waiting = sum(each.outcome == "requeued" for each in requeued)
    typer.echo(f"{waiting} of {len(requeued)} batches of {job} were requeued")
    if service.job(job).state == "held":
        typer.echo(f"{job} is held; run `doll job resume {job}` to continue")


def replay(
    context: typer.Context,
    job: JobName,
    batch: Batches = None,
    *,
    all_batches: All = False,
) -> None:
    """Write the records of quarantined batches to their topics again, for all readers.

    Quarantined batches are those that could not be trained. Use this command if other readers of
    the topics need the records, too; to train them again in this job alone, use `doll job requeue`.
    A replayed batch stays quarantined for good. Its records are written as new records with the
    same keys and a header `replayed_from`, which names the original offset. Each batch is written
    completely and once; if the command is interrupted, run it again to write the rest. To replay
    records that could not be decoded, use `doll dlq replay`.

    Example: [bold]doll job replay digits --batch 1042[/]
    """
    from common.jobs.changes import local_user
    from common.jobs.operations import JobOperations
    from common.jobs.quarantine import Quarantine, format_batches
    from common.jobs.replay import Replayer, unfinished

    log, offsets = outside_of(context).open_log(), _named(batch, all_batches=all_batches)

    def chosen(quarantine: Quarantine) -> list[Batch]:
        begun = {each.offset: each for each in unfinished(log, quarantine)}
        if offsets is None:
            return [*begun.values(), *quarantine.choose(None)]
        others = quarantine.choose([each for each in offsets if each not in begun])
        return [*(begun[each] for each in offsets if each in begun), *others]

    if offsets == []:
        raise UserError(f"give --batch OFFSET or --all; `doll job requeue {job}` lists the batches")
    job_id = JobOperations(log).get(job).id
    with closing(Replayer(log, local_user().name)) as replayer:
        # The replayer is created before the read, because it fences other replays.
        quarantine = Quarantine(log, job_id)
        counts = {
            each.offset: replay_batch(replayer, quarantine, each) for each in chosen(quarantine)
        }
    if replayed := [offset for offset, count in counts.items() if count]:
        JobOperations(log).note(quarantine.job, "replayed", format_batches(replayed))
    written = sum(counts.values())
    typer.echo(f"written: {written} records of {job}")


def replay_batch(replayer: Replayer, quarantine: Quarantine, batch: Batch, to: str = "") -> int:
    """Write one batch's records again, print the result, and return the number of records."""
    try:
        written = replayer.batch(quarantine, batch, time(), to)
    except ExpiredError:
        typer.echo(f"batch {batch.offset}: not written, because Kafka deleted some of its records")
        return 0
    if written is None:
        typer.echo(f"batch {batch.offset}: {_TOO_LATE}")
        return 0
    typer.echo(f"batch {batch.offset}: {written} records were written")
    return written


_TOO_LATE = "not changed, because another user requeued or replayed it meanwhile"
_OUTCOMES: dict[Outcome, str] = {
    "requeued": "requeued",
    "before": "not changed, because it was requeued before",
    "replayed": _TOO_LATE,
}


def _named(offsets: list[int] | None, *, all_batches: bool) -> list[int] | None:
    """Return the batches that a command names, or None for all possible ones.

    Raises:
        UserError: If it names both some batches and all.
    """
    if offsets and all_batches:
        raise UserError("--batch, --all: give only one of them")
    return None if all_batches else offsets or []


def _list(job: str, quarantined: Sequence[QuarantinedBatchAnswer]) -> None:
    if not quarantined:
        typer.echo(f"{job} has no quarantined batches")
        return
    table = Table("batch", "records", "spans", "possible", "reason", box=None)
    for each in quarantined:
        cells = (
            str(each.batch),
            str(each.records),
            "  ".join(f"{topic}[{at}]@{start}:{end}" for topic, at, start, end in each.spans),
            f"nothing: {each.final}" if each.final else "requeued, replayed",
            each.reason,
        )
        # A reason may contain brackets, which are not markup.
        table.add_row(*map(Text, cells))
    Console(soft_wrap=True).print(table)
    typer.echo(f"to requeue: `doll job requeue {job} --batch OFFSET`, or --all")
