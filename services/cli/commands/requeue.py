"""`doll job requeue` and `doll job replay`: take batches out of quarantine."""

from __future__ import annotations

from time import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import ExpiredError, UnavailableError, UserError
from services.cli.system.outside import outside_of, system_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.core.messages import Batch
    from common.core.spans import Span
    from common.jobs.quarantine import Outcome, QuarantinedBatch
    from common.ports.servers import Log, LogRecord

_DELIVERED_S = 30.0
_READ_S = 10.0
_READ_RECORDS = 1000

Name = Annotated[str, typer.Argument(help="The job's name.")]
Batches = Annotated[
    list[int] | None,
    typer.Option("--batch", metavar="OFFSET", help="A batch; repeatable."),
]
All = Annotated[bool, typer.Option("--all", help="Every batch that can be.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list what is quarantined.")]


def requeue(
    context: typer.Context,
    job: Name,
    batch: Batches = None,
    *,
    all_batches: All = False,
    dry_run: DryRun = False,
) -> None:
    """Requeue poison batches: they are trained again, as if they were new.

    Use it once the task is fixed. Without --batch or --all it lists what is quarantined, and why.
    A job that is held for poison continues with `doll job resume`. Expired batches are gone, and
    replayed ones come back by themselves.

    Example: [bold]doll job requeue digits --all[/]
    """
    from common.jobs.quarantine import choose

    system, offsets = system_of(context), _named(batch, all_batches=all_batches)
    requeued = [] if dry_run or offsets == [] else system.requeue(job, offsets)
    if not requeued:
        quarantined = system.quarantine(job)
        chosen = choose(job, quarantined, offsets) if dry_run else []
        _list(job, quarantined, "doll job requeue", len(chosen))
        return
    for each in requeued:
        typer.echo(f"batch {each.batch}: {_OUTCOMES[each.outcome]}")
    waiting = sum(each.outcome == "requeued" for each in requeued)
    typer.echo(f"{waiting} of {len(requeued)} batches of {job} wait for an update again")
    if system.job(job).held:
        typer.echo(f"{job} is held: go on with `doll job resume {job}`")


def replay(
    context: typer.Context,
    job: Name,
    batch: Batches = None,
    *,
    all_batches: All = False,
    dry_run: DryRun = False,
) -> None:
    """Write the records of poison batches to their topics again, where every reader gets them.

    For dead letters that other systems need, too; `doll job requeue` is for the job alone. The
    batch stays quarantined for good, and its records come back as new ones, with their keys and a
    header `replayed_from`. They are written once the quarantine is final: if this command is
    interrupted between the two, they are not written, and `doll audit --json` lists the batch as
    replayed.

    Example: [bold]doll job replay digits --batch 1042[/]
    """
    from common.core.messages import Replayed
    from services.cli.system.direct import BY, quarantine_of

    log, offsets = outside_of(context).open_log(), _named(batch, all_batches=all_batches)
    quarantine = quarantine_of(log, job)
    chosen = quarantine.choose(offsets)
    if dry_run or not chosen:
        _list(job, quarantine.listed(), "doll job replay", len(chosen))
        return
    written = 0
    for each in chosen:
        try:
            records = _records_of(log, each)  # first: what cannot be read must not be sealed
        except ExpiredError:
            typer.echo(f"batch {each.offset}: some of its records were deleted, nothing is written")
            continue
        (counted,) = quarantine.write([Replayed(each, BY, time())])
        if not counted:
            typer.echo(f"batch {each.offset}: {_TOO_LATE}")
            continue
        _produce(log, each, records)
        written += len(records)
        typer.echo(f"batch {each.offset}: {len(records)} records were written again")
    typer.echo(f"{written} records of {job} were written again")


_TOO_LATE = "was requeued or replayed by somebody else meanwhile: nothing was done"
_OUTCOMES: dict[Outcome, str] = {
    "requeued": "waits again",
    "before": "was requeued before: nothing was done",
    "replayed": _TOO_LATE,
}


def _named(offsets: list[int] | None, *, all_batches: bool) -> list[int] | None:
    """The batches that a command names; None: all for which it is possible.

    Raises:
        UserError: If it names some, and all.
    """
    if offsets and all_batches:
        raise UserError("either --batch or --all, not both")
    return None if all_batches else offsets or []


def _list(job: str, quarantined: Sequence[QuarantinedBatch], command: str, chosen: int) -> None:
    if not quarantined:
        typer.echo(f"nothing is quarantined in {job}")
        return
    table = Table("batch", "records", "spans", "can be", "reason", box=None)
    for each in quarantined:
        cells = (
            str(each.batch),
            str(each.records),
            "  ".join(map(str, each.address)),
            f"nothing: {each.final}" if each.final else "requeued, replayed",
            each.reason,
        )
        table.add_row(*map(Text, cells))  # a reason may have brackets, which are no markup
    Console(soft_wrap=True).print(table)
    if chosen:
        typer.echo(f"without --dry-run: {chosen} batches")
    else:
        typer.echo(f"name some: `{command} {job} --batch OFFSET`, or --all")


def _records_of(log: Log, batch: Batch) -> list[tuple[Span, LogRecord]]:
    """The records that a batch was to be trained on, each with the span that it is of.

    Raises:
        ExpiredError: If some are gone.
        UnavailableError: If Kafka does not give them in time.
    """
    bad = {(s.topic, s.partition, offset) for s in batch.skipped for offset in s.offsets}
    found: list[tuple[Span, LogRecord]] = []
    for span in batch.address:
        if log.bounds(span.place).start > span.start:
            raise ExpiredError(f"{span.place} begins above {span.start}")
        tail = log.tail(span.place, span.start)
        try:
            while (position := tail.position()) < span.end:
                records = tail.read(_READ_RECORDS, _READ_S)
                if tail.position() == position:
                    raise UnavailableError(f"{span} cannot be read beyond {position} now")
                found += [
                    (span, record)
                    for record in records
                    if record.offset < span.end and (*span.place, record.offset) not in bad
                ]
        finally:
            tail.close()
    if len(found) < batch.samples:
        raise ExpiredError(
            f"batch {batch.offset} had {batch.samples} records, only {len(found)} are there"
        )
    return found


def _produce(log: Log, batch: Batch, records: Sequence[tuple[Span, LogRecord]]) -> None:
    writer = log.writer()
    try:
        for span, record in records:
            came_from = f"{span.topic}[{span.partition}]@{record.offset}".encode()
            writer.append(
                span.topic,
                record.value,
                partition=span.partition,
                key=record.key,
                headers=(("replayed_from", came_from),),
            )
        if not writer.flush(_DELIVERED_S):
            raise UnavailableError(
                f"the topics of batch {batch.offset}: Kafka has not confirmed all records; look"
                " with `doll audit --json` which of them count"
            )
    finally:
        writer.close()
