"""`doll audit`: proves from Kafka alone which records built which version of a model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from common.errors import UnknownTopicError
from common.kafka import names as topics
from services.cli import exits
from services.cli.arguments import AsJson, JobName  # noqa: TC001 -- typer reads it when run
from services.cli.system.outside import outside_of

if TYPE_CHECKING:
    from common.core.audit import Audit
    from common.core.messages import Replayed, Requeued, UpdateApplied
    from common.core.spans import Span


def audit(
    context: typer.Context,
    job: JobName,
    *,
    as_json: AsJson = False,
    last: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of versions of the model to show: the newest ones. --json prints all"
            " versions.",
        ),
    ] = 10,
) -> None:
    """Prove from Kafka alone that every record was used once, and show the records of each update.

    Exits with 0 if every record is accounted for (used once, skipped, quarantined or expired), with
    5 if a record is missing or was used twice, and with 6 if Kafka has deleted the first records of
    the job's own topics, so that nothing can be proved.

    Example: [bold]doll audit digits --last 5[/]
    """
    from common.core.audit import audit as fold
    from common.core.messages import Opened
    from common.core.spans import Partition
    from common.jobs.store import JobStore
    from common.kafka.read import read_decoded
    from common.wire.messages import decode_audit, decode_claim

    log = outside_of(context).open_log()
    record = JobStore(log).get(job)
    first = record.first
    control, updates = topics.control_topic(record.id), topics.updates_topic(record.id)
    for topic in (control, updates):
        start = log.bounds(Partition(topic, 0)).start
        if start > 0:
            typer.echo(
                f"{job}: cannot be audited: the records of {topic} before offset {start} were"
                " deleted; configure the topic without retention",
                err=True,
            )
            raise typer.Exit(exits.AUDIT_INCOMPLETE)
    # Includes partitions that were added to the streams since.
    places = set(first)
    for stream in {place.topic for place in first}:
        with suppress(UnknownTopicError):
            places.update(log.partitions(stream))
    # The starts are read before the claims, so that most records below them are claimed.
    starts = log.starts(places)
    # Updates are read first, so that the claims of their batches are in the control topic.
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


def merged(spans: Iterable[Span]) -> list[Span]:
    """Join adjacent spans, so that a version has few spans to read."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and joined[-1].place == span.place and joined[-1].end == span.start:
            joined[-1] = joined[-1]._replace(end=span.end)
        else:
            joined.append(span)
    return joined


def verdict(audit: Audit) -> str:
    """Return the result of the audit in one sentence."""
    if audit.flaws:
        return f"BROKEN: {len(audit.flaws):,} flaws in {len(audit.updates):,} versions"
    used = f"{audit.trained:,} records built {len(audit.updates):,} versions, each used once"
    if lost := audit.lost_records:
        used = f"{used}; trained, then lost: {lost:,} (Kafka lost them after they were used)"
    for restart in audit.restarts:
        used = f"{used}; restarted at version 0: {restart.taken_back:,} updates were rolled back"
    if expired := audit.expired_records:
        return (
            f"incomplete: {expired:,} records expired (deleted from Kafka before they were"
            f" trained); {used}"
        )
    return f"complete: {used}"


def draw(job: str, audit: Audit, last: int) -> Group:
    """Draw the newest versions with their spans, the totals, all flaws and the result."""
    # The columns "mode" and "stale" are shown unless all updates are synchronous.
    made = any(update.synchrony for update in audit.updates)
    table = Table("version", "by", "loss", "records", "batches", box=None)
    for column in ("mode", "stale", "spans")[0 if made else 2 :]:
        table.add_column(column)
    for update in audit.updates[max(0, len(audit.updates) - last) :]:
        table.add_row(
            f"{update.version:,}",
            str(update.epoch),
            f"{update.loss:.4f}",
            f"{update.samples:,}",
            str(len(update.batches)),
            *((update.mode, _staleness(update)) if made else ()),
            "  ".join(str(span) for span in merged(_spans(update))),
        )
    sums = {
        "takeovers": max(0, audit.takeovers - 1),
        "updates rolled back": audit.taken_back,
        "batches quarantined": len(audit.quarantined),
        "batches requeued": len(audit.requeued),
        "batches replayed": len(audit.replayed),
        "records skipped": audit.skipped,
        "records expired": audit.expired_records,
        "records trained, then lost": audit.lost_records,
        "records claimed, not yet used": audit.unsettled,
    }
    if made:
        sums["synchronisation switches"] = audit.switches
    lines = [Text(f"{name}: {number:,}") for name, number in sums.items()]
    quarantined = [
        Text(f"quarantined: batch {each.batch.offset}, {each.reason}", "yellow")
        for each in audit.quarantined
    ]
    flaws = [Text(f"{flaw.kind}: {flaw.where}", "red") for flaw in audit.flaws]
    expired = [Text(f"expired: {span}", "yellow") for span in merged(audit.expired)]
    lost = [Text(f"trained, then lost: {span}", "yellow") for span in merged(audit.lost)]
    restarts = [
        Text(
            f"restarted at version 0: epoch {each.epoch} rolled back {each.taken_back:,} updates"
            f" ({each.loss or 'without an operator request'})",
            "yellow",
        )
        for each in audit.restarts
    ]
    style = f"bold {'red' if audit.flaws else 'yellow' if audit.expired_records else 'green'}"
    end = Text(f"{job}: {verdict(audit)}", style)
    return Group(table, *lines, *quarantined, *expired, *lost, *restarts, *flaws, end)


def as_data(job: str, audit: Audit) -> dict[str, Any]:
    """Return the audit as plain data, with spans as topic[partition]@start:end."""
    from msgspec import to_builtins

    return {
        "job": job,
        "whole": not audit.flaws and not audit.expired_records,
        "verdict": verdict(audit),
        "versions": [
            {
                "version": update.version,
                "epoch": update.epoch,
                "loss": update.loss,
                "metrics": update.metrics,
                "samples": update.samples,
                "short": update.short,
                "mode": update.mode,
                "stale": update.staleness,
                "synchrony": to_builtins(update.synchrony) if update.synchrony else None,
                "scale": update.scale or 1.0,
                "learning_rate": update.rate or None,
                "batches": [batch.offset for batch in update.batches],
                "spans": [str(span) for span in merged(_spans(update))],
            }
            for update in audit.updates
        ],
        "takeovers": max(0, audit.takeovers - 1),
        "taken_back": audit.taken_back,
        "begun_again": [each._asdict() for each in audit.restarts],
        "trained": audit.trained,
        "skipped": audit.skipped,
        "unsettled": audit.unsettled,
        "settled": {str(place): position for place, position in audit.settled.items()},
        "expired": [str(span) for span in audit.expired],
        "expired_records": audit.expired_records,
        "lost": [str(span) for span in audit.lost],
        "lost_records": audit.lost_records,
        "quarantined": [
            {
                "batch": each.batch.offset,
                "reason": each.reason,
                "spans": [str(span) for span in each.batch.address],
            }
            for each in audit.quarantined
        ],
        "requeued": [_by_hand(each) for each in audit.requeued],
        "replayed": [_by_hand(each) for each in audit.replayed],
        "flaws": [{"kind": flaw.kind, "where": flaw.where} for flaw in audit.flaws],
    }


def _staleness(update: UpdateApplied) -> str:
    """Return the staleness of the oldest gradient in updates, and the maximum allowed."""
    most = update.synchrony.staleness if update.synchrony else 0
    return f"{update.staleness} of {most}" if most else ""


def _spans(update: UpdateApplied) -> Iterable[Span]:
    return (span for batch in update.batches for span in batch.address)


def _by_hand(record: Requeued | Replayed) -> dict[str, Any]:
    return {"batch": record.batch.offset, "by": record.by, "at_s": record.at_s}
