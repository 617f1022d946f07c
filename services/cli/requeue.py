"""`doll job requeue` and `doll job replay`: what becomes of quarantined batches, by hand.

Both write one record per batch into the job's updates topic, and only what they read back there
says whether it counts: of a requeue and a replay of the same batch the first one does.
"""

from __future__ import annotations

from time import time
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from common import topics
from common.core.history import History
from common.core.messages import Batch, Quarantined, Replayed, Requeued
from common.core.spans import Partition
from common.errors import ExpiredError, UnavailableError, UserError
from common.jobs.store import JobBook
from common.reading import read_decoded
from common.wire import decode_audit, encode_audit
from services.cli.outside import outside_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.core.spans import Span
    from common.ports import Log, LogRecord

_BY = "the command line"
_DELIVERED_S = 30.0
_READ_S = 10.0
_READ_RECORDS = 1000

Name = Annotated[str, typer.Argument(help="The job's name.")]
Batches = Annotated[
    list[int] | None,
    typer.Option("--batch", metavar="OFFSET", help="Only this one; may be given several times."),
]
All = Annotated[bool, typer.Option("--all", help="Every batch for which it is possible.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list what is quarantined.")]


def requeue(
    context: typer.Context,
    job: Name,
    batch: Batches = None,
    *,
    all_batches: All = False,
    dry_run: DryRun = False,
) -> None:
    """Take poison batches out of quarantine: they are trained once more, as if they were new.

    For when the task is mended. Without --batch or --all it lists what is quarantined, and why. A
    job that is held for its poison goes on with `doll job resume`. What expired is gone, and what
    was replayed comes back by itself.

    Example: [bold]doll job requeue digits --all[/]
    """
    quarantine = _Quarantine(outside_of(context).open_log(), job)
    chosen = quarantine.choose(batch or [], all_batches=all_batches)
    if dry_run or not chosen:
        _list(quarantine, "doll job requeue", chosen)
        return
    counts = quarantine.write([Requeued(each, _BY, time()) for each in chosen])
    for each, counted in zip(chosen, counts, strict=True):
        typer.echo(f"batch {each.offset}: {'waits again' if counted else _TOO_LATE}")
    typer.echo(f"{sum(counts)} of {len(chosen)} batches of {job} wait for an update again")
    if JobBook(quarantine.log).get(job).held:
        typer.echo(f"{job} is held: go on with `doll job resume {job}`")


def replay(
    context: typer.Context,
    job: Name,
    batch: Batches = None,
    *,
    all_batches: All = False,
    dry_run: DryRun = False,
) -> None:
    """Write the records of poison batches to their topics anew, where every reader gets them.

    For dead letters that other systems want, too; `doll job requeue` is for the job alone. The
    batch stays quarantined for good, and its records come back as new ones, with their keys and a
    header `replayed_from`. They are written only once the quarantine is sealed: should this command
    be ended between the two, they are not written, and `doll audit --json` names the batch as
    replayed.

    Example: [bold]doll job replay digits --batch 1042[/]
    """
    log = outside_of(context).open_log()
    quarantine = _Quarantine(log, job)
    chosen = quarantine.choose(batch or [], all_batches=all_batches)
    if dry_run or not chosen:
        _list(quarantine, "doll job replay", chosen)
        return
    written = 0
    for each in chosen:
        try:
            records = _records_of(log, each)  # first: what cannot be read must not be sealed
        except ExpiredError:
            typer.echo(f"batch {each.offset}: some of its records were deleted, nothing is written")
            continue
        (counted,) = quarantine.write([Replayed(each, _BY, time())])
        if not counted:
            typer.echo(f"batch {each.offset}: {_TOO_LATE}")
            continue
        _produce(log, each, records)
        written += len(records)
        typer.echo(f"batch {each.offset}: {len(records)} records are written anew")
    typer.echo(f"{written} records of {job} are written anew")


_TOO_LATE = "somebody took it back or replayed it meanwhile, nothing was done"


class _Quarantine:
    """What is quarantined in a job, by its updates topic.

    Raises:
        UserError: If the topic's beginning is gone.
    """

    def __init__(self, log: Log, job: str) -> None:
        JobBook(log).get(job)  # else a wrong name would be an unknown topic
        self.log = log
        self.job = job
        self.replayed = set[int]()
        self._topic = topics.updates_topic(job)
        start = log.bounds(Partition(self._topic, 0)).start
        if start > 0:
            raise UserError(
                f"{self._topic} begins at {start}: what was quarantined before is not known any"
                " more, and so not what may be taken back (keep this topic without retention)"
            )
        self._history = History()
        self._read()

    @property
    def quarantined(self) -> list[Quarantined]:
        """All of it, oldest batch first."""
        return sorted(self._history.quarantined.values(), key=lambda each: each.batch.offset)

    def possible(self, batch: Batch) -> bool:
        """Whether it can be taken back or replayed."""
        return batch in self._history.poison

    def choose(self, offsets: Sequence[int], *, all_batches: bool) -> list[Batch]:
        """The batches that are meant; none where none was named.

        Raises:
            UserError: If one that was named is not quarantined, or it is too late for it.
        """
        if offsets and all_batches:
            raise UserError("either --batch or --all, not both")
        if all_batches:
            return sorted(self._history.poison, key=lambda batch: batch.offset)
        poison = {batch.offset: batch for batch in self._history.poison}
        for offset in offsets:
            if offset not in poison:
                raise UserError(f"batch {offset} of {self.job} {self._why_not(offset)}")
        return [poison[offset] for offset in sorted(set(offsets))]

    def write(self, records: Sequence[Requeued | Replayed]) -> list[bool]:
        """Write records, and read back which of them count.

        Raises:
            UnavailableError: If Kafka did not take them in time.
        """
        offsets: list[int | None] = [None] * len(records)
        writer = self.log.writer()
        try:
            for number, record in enumerate(records):

                def delivered(offset: int | None, number: int = number) -> None:
                    offsets[number] = offset

                writer.append(self._topic, encode_audit(record), on_delivered=delivered)
            _flush(self._topic, delivered=writer.flush(_DELIVERED_S))
        finally:
            writer.close()
        counted = self._read()
        return [  # where Kafka has not said which record it is, it is known by what it says
            record in counted.values() if offset is None else offset in counted
            for offset, record in zip(offsets, records, strict=True)
        ]

    def _why_not(self, offset: int) -> str:
        if offset in self.replayed:
            return "was replayed: its records are new ones now"
        if offset in self._history.quarantined:
            return "expired: its records are deleted"
        return f"is not quarantined; `doll job requeue {self.job}` lists what is"

    def _read(self) -> dict[int, Requeued | Replayed]:
        """Read on; returns the operators' records that count, by offset."""
        counted = dict[int, Requeued | Replayed]()
        start = self._history.position
        for offset, record in read_decoded(self.log, self._topic, decode_audit, start=start):
            if self._history.feed(offset, record) and isinstance(record, Requeued | Replayed):
                counted[offset] = record
                if isinstance(record, Replayed):
                    self.replayed.add(record.batch.offset)
        return counted


class _Record(NamedTuple):
    """A record of a stream, as it is written anew."""

    span: Span
    record: LogRecord


def _list(quarantine: _Quarantine, command: str, chosen: Sequence[Batch]) -> None:
    if not quarantine.quarantined:
        typer.echo(f"nothing is quarantined in {quarantine.job}")
        return
    table = Table("batch", "records", "spans", "can be", "reason", box=None)
    for each in quarantine.quarantined:
        able = "replayed" if each.batch.offset in quarantine.replayed else "nothing: expired"
        if quarantine.possible(each.batch):
            able = "requeued, replayed"
        elif able == "replayed":
            able = "nothing: replayed"
        table.add_row(
            str(each.batch.offset),
            str(each.batch.samples),
            "  ".join(map(str, each.batch.address)),
            able,
            each.reason,
        )
    Console(soft_wrap=True).print(table)
    if chosen:
        typer.echo(f"without --dry-run: {len(chosen)} batches")
    else:
        typer.echo(f"name some: `{command} {quarantine.job} --batch OFFSET`, or --all")


def _records_of(log: Log, batch: Batch) -> list[_Record]:
    """The records that a batch was to be trained on.

    Raises:
        ExpiredError: If some are gone.
        UnavailableError: If Kafka does not give them in time.
    """
    bad = {(s.topic, s.partition, offset) for s in batch.skipped for offset in s.offsets}
    found = list[_Record]()
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
                    _Record(span, record)
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


def _produce(log: Log, batch: Batch, records: Sequence[_Record]) -> None:
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
        _flush(f"the topics of batch {batch.offset}", delivered=writer.flush(_DELIVERED_S))
    finally:
        writer.close()


def _flush(what: str, *, delivered: bool) -> None:
    if not delivered:
        raise UnavailableError(
            f"{what}: Kafka has not confirmed all records; look with `doll audit --json` which of"
            " them count"
        )
