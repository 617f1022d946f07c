"""`doll job`: submit, list, show, watch, pause, resume, stop, change and delete jobs."""

from __future__ import annotations

import heapq
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from operator import itemgetter
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from common.errors import UserError
from common.kafka import names as topics
from services.cli import tables
from services.cli.arguments import AsJson, JobName  # noqa: TC001 -- typer reads it when run
from services.cli.commands.requeue import replay, requeue
from services.cli.system.outside import outside_of, service_of

if TYPE_CHECKING:
    from common.api.answers import RemainsAnswer
    from common.core.messages import Wanted
    from common.jobs.edit import Value
    from services.cli.system.api import Picture

app = typer.Typer(no_args_is_help=True, help="Submit, watch, change, pause and stop jobs.")

# Seconds between polls of `watch`.
_EVERY_S = 0.5
# Seconds without an answer after which the command prints why it waits.
_PATIENCE_S = 2.0
_CHECKING = "waiting: the service builds the job's task to check it, for up to 60 s"
_WORDS: dict[Wanted, str] = {
    "running": "is resumed",
    "paused": "is paused",
    "stopped": "is stopped",
}


Reason = Annotated[str, typer.Option(help="Reason for the change, recorded in the job's history.")]


@app.command()
def submit(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="Job file in YAML or JSON; - reads standard input.")],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="JOB[@VERSION]",
            help="Start with the weights of another job's checkpoint: JOB for the newest, JOB@best"
            " for the one with the lowest loss, JOB@NUMBER for that version. Optional. If unset,"
            " the job starts from new weights.",
        ),
    ] = "",
    *,
    unchecked: Annotated[
        bool,
        typer.Option(
            "--unchecked",
            help="Skip the check that creates the job's task, if the task is a class of your own.",
        ),
    ] = False,
) -> None:
    """Check and submit a job; a running coordinator then starts it.

    If the job's task is a class of your own, the check creates an instance, which takes up to 60 s.

    Example: [bold]doll job submit digits.yaml --from letters@best[/]
    """
    text = _read(file)
    waiting = Timer(_PATIENCE_S, typer.echo, (_CHECKING,), {"err": True})
    waiting.daemon = True
    waiting.start()
    try:
        job = service_of(context).submit(text, source, unchecked=unchecked)
    finally:
        waiting.cancel()
    typer.echo(
        f"job {job.id} submitted: {len(job.first)} partitions of {', '.join(job.spec.streams)},"
        f" starting at {job.spec.start_at}"
    )
    if job.beginning:
        typer.echo(job.beginning)
    if job.unchecked:
        typer.echo(f"not checked: {job.unchecked}", err=True)
    _print_notes(job.notes)


@app.command("list")
def list_jobs(context: typer.Context, *, as_json: AsJson = False) -> None:
    """List all jobs with their state, lag, and counts of unused and lost data.

    Lag is the number of records that wait for training. Skipped records could not be decoded;
    expired records were deleted by Kafka before they were trained; lost records were trained, and
    Kafka lost them afterwards. Quarantined batches were set aside because they could not be
    trained. "-" means that a number is unknown, "12+" at least 12.

    Example: [bold]doll job list[/]
    """
    found = service_of(context).jobs()
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    # Names and states are for copying, so a narrow terminal must not cut them.
    name_width = max((len(line.id) for line in found.jobs), default=0)
    state_width = max((len(line.state) for line in found.jobs), default=0)
    table = Table(
        Column("job", min_width=name_width),
        Column("state", min_width=state_width),
        *(
            Column(name, justify="right", min_width=len(name))
            for name in ("lag", "skipped", "quarantined", "expired", "lost")
        ),
        *("task", "streams"),
        box=None,
    )
    for line in found.jobs:
        counted = line.skipped, line.quarantined, line.expired, line.lost
        counts = (_at_least(each, whole=line.whole) for each in counted)
        cells = (
            *(line.id, line.state, _number(line.lag), *counts),
            *(line.task, ", ".join(line.streams)),
        )
        table.add_row(*map(Text, cells))
    if found.jobs:
        tables.show(table)
        # The reasons follow the table, because they are too long for a column.
        for line in found.jobs:
            if why := line.why or line.reason:
                typer.echo(f"{line.id}: {line.state}: {_printable(why)}")
    elif not found.unreadable:
        typer.echo("no jobs yet; submit one with `doll job submit FILE`")
    for each in found.unreadable:
        typer.echo(
            f"unreadable: the record of {each.id!r} at offset {each.offset} of {topics.JOBS}:"
            f" {each.reason}"
        )


@app.command()
def show(context: typer.Context, job: JobName) -> None:
    """Show a job as JSON: its specification with all defaults, its state and its progress.

    Prints to standard error why a job is held, with the traceback, or why a running job waits.

    Example: [bold]doll job show digits[/]
    """
    found = service_of(context).job(job)
    typer.echo(found.model_dump_json(indent=2))
    if found.state == "held":
        typer.echo(f"{job} is held: {_printable(found.reason)}", err=True)
        typer.echo(_printable(found.detail), err=True)
    if found.wanted == "running" and found.why:
        typer.echo(_printable(f"{job}: {found.state}: {found.why}"), err=True)


@app.command()
def pause(context: typer.Context, job: JobName, reason: Reason = "") -> None:
    """Pause a job; its records wait in Kafka until `doll job resume`.

    Example: [bold]doll job pause digits --reason "prices are high"[/]
    """
    _want(context, job, "paused", reason)


@app.command()
def resume(
    context: typer.Context,
    job: JobName,
    after_loss: Annotated[  # noqa: FBT002 -- a flag
        bool,
        typer.Option(
            "--after-loss",
            help="Accept that data is lost. If Kafka lost records of the job's own topics,"
            " continue from the newest saved state of the job that does not depend on the lost"
            " records. If a stream lost records, read on after them. If a checkpoint is missing,"
            " continue from the newest one that exists.",
        ),
    ] = False,
    from_start: Annotated[  # noqa: FBT002 -- a flag
        bool,
        typer.Option(
            "--from-start",
            help="With --after-loss: if no saved state of the job is left, restart the model from"
            " its initial weights (version 0).",
        ),
    ] = False,
    read_from: Annotated[
        Literal["earliest", "latest"] | None,
        typer.Option(
            "--from",
            help="If a stream's topic was deleted and created again: read the new topic from its"
            " beginning (earliest), or only records that arrive from now on (latest). Implies"
            " --after-loss. Optional. If unset, the job stays held in this case.",
        ),
    ] = None,
    reason: Reason = "",
) -> None:
    """Resume a paused, stopped or held job at the record where it stopped.

    `doll job show` prints why a job is held, which options to give, and what will be lost.

    Example: [bold]doll job resume digits --after-loss[/]
    """
    if from_start and not (after_loss or read_from):
        raise UserError("--from-start: needs --after-loss")
    lost: dict[str, object] = {}
    if after_loss or read_from:
        lost = {"after_loss": True, "from_start": from_start}
        lost |= {"read_from": read_from} if read_from else {}
    _want(context, job, "running", reason, **lost)


@app.command()
def stop(context: typer.Context, job: JobName, reason: Reason = "") -> None:
    """Stop a job after a last checkpoint, and free its workers; its model and its topics stay.

    A job that has finished does not change. `doll job resume` continues a stopped job.

    Example: [bold]doll job stop digits[/]
    """
    _want(context, job, "stopped", reason)


@app.command()
def change(  # noqa: PLR0913, PLR0917 -- the options of a command
    context: typer.Context,
    job: JobName,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS|none",
            help="Deadline of the job, in seconds after its submission; none removes the deadline.",
        ),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Number of batches per update (K).")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Number of records per batch (b).")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate of the optimizer.")
    ] = None,
    oom: Annotated[
        str | None,
        typer.Option(
            metavar="chunk|hold|none",
            help="Rule for a batch that does not fit into a worker's memory: chunk computes it in"
            " parts, hold computes no part; none restores the default.",
        ),
    ] = None,
    synchronisation: Annotated[
        str | None,
        typer.Option(
            metavar="MODE|BLOCK|none",
            help="Synchronisation between workers: a mode (synchronous, stale, asynchronous or"
            ' averaging), or the block `synchronisation` of a job file, such as "{mode: averaging,'
            ' local_rate: 0.1}"; none restores the default, synchronous.',
        ),
    ] = None,
    compression: Annotated[
        str | None,
        typer.Option(
            metavar="BLOCK|none",
            help="Limit on the changes of weights that are sent to workers: the block"
            ' `compression` of a job file, such as "{significance: 1.5}"; none sends all changes.',
        ),
    ] = None,
    tuner: Annotated[
        str | None,
        typer.Option(
            metavar="BLOCK|none",
            help="Settings that DOLL tunes by itself: the block `tuner` of a job file, such as"
            ' "{group_size: [2, 24]}"; none turns tuning off.',
        ),
    ] = None,
    aggregation: Annotated[
        str | None,
        typer.Option(
            metavar="MODE|BLOCK|none",
            help="Which processes sum gradients and hold the weights: board (the coordinator),"
            ' group (the workers), or the block `aggregation` of a job file, such as "{mode:'
            ' group, layout: slices}"; none restores the default, board.',
        ),
    ] = None,
    reason: Reason = "",
) -> None:
    """Change settings of a job, such as its deadline; they apply from the job's next update on.

    The job may be running, paused or stopped. A new batch size applies from each worker's next
    batch on. An option with a block, such as --tuner, replaces the whole previous block. With
    `reduction: mean` and the optimizer sgd or momentum, --group-size changes the learning rate in
    proportion, unless --learning-rate is given. If --aggregation moves the weights to other
    processes, the weights are stored in a checkpoint first.

    Example: [bold]doll job change digits --group-size 10 --deadline 7200 --reason "it is late"[/]

    Example: [bold]doll job change digits --synchronisation stale[/]
    """
    given = {
        "group_size": group_size,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
    }
    changed: dict[str, Value] = {n: value for n, value in given.items() if value is not None}
    blocks = {
        "synchronisation": synchronisation,
        "compression": compression,
        "tuner": tuner,
        "aggregation": aggregation,
    }
    changed |= {n: _block(n, text) for n, text in blocks.items() if text is not None}
    if deadline is not None:
        changed["deadline_s"] = None if deadline == "none" else _seconds(deadline)
    if oom is not None:
        changed["oom"] = None if oom == "none" else oom
    if not changed:
        raise UserError(
            "nothing to change: give --deadline, --group-size, --batch-size, --learning-rate,"
            " --oom, --synchronisation, --compression, --tuner or --aggregation"
        )
    service = service_of(context)
    before = service.job(job).revision
    found = service.change(job, reason, **changed)
    if found.revision == before:
        typer.echo(f"job {job} already has these settings; nothing was changed")
        return
    differs = found.changes[-1].changed
    differences = ", ".join(f"{name} {_value(value)}" for name, value in differs.items())
    because = reason and f": {reason}"
    typer.echo(f"job {job} changed: {differences} (revision {found.revision}){because}")
    _print_notes(found.notes)


@app.command()
def delete(
    context: typer.Context,
    job: JobName,
    *,
    purge: Annotated[
        bool,
        typer.Option(
            "--purge",
            help="Remove the job's topics, keys in Redis and files for good, so that its name can"
            " be used again. Works for deleted jobs, too; if it fails halfway, run it again.",
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --purge: do not ask for confirmation.")
    ] = False,
) -> None:
    """Delete a stopped job from the list; without --purge, its topics and checkpoints stay.

    Example: [bold]doll job delete digits[/]
    """
    service = service_of(context)
    if not purge:
        if yes:
            raise UserError("--yes: needs --purge")
        service.delete(job)
        typer.echo(
            f"job {job} is deleted; its topics in Kafka and its checkpoints stay, and no new job"
            " can use its name"
        )
        return
    if not yes:
        _list_remains("would be removed", service.remains(job))
        typer.confirm(f"Remove all of this, so that the name {job} can be used again?", abort=True)
    removed = service.purge(job)
    typer.echo(f"the name {job} can be used again")
    _list_remains("removed", removed)
    if removed.kept:
        typer.echo("run the same command again to remove the rest")


def _list_remains(done: str, remains: RemainsAnswer) -> None:
    for topic, records in remains.topics.items():
        typer.echo(f"{done}: topic {topic}, {records:,} records")
    typer.echo(f"{done}: {remains.files:,} files in object storage")
    typer.echo(f"{done}: the job's keys in Redis and its consumer group")
    for why in remains.kept:
        typer.echo(f"not removed: {why}")
    typer.echo("kept: dead letters, in the .dlq topics of the streams")


@app.command()
def events(context: typer.Context, job: JobName, *, as_json: AsJson = False) -> None:
    """Print events of a job (updates, workers, machines, plans, drift) until Ctrl-C.

    First prints all changes of the job so far and who made them. With --json, prints one line per
    event with all its data; the data of each `job` event has all changes so far.

    Example: [bold]doll job events digits[/]
    """
    known = list[dict[str, Any]]()
    try:
        for event in service_of(context).events(job):
            if as_json:
                typer.echo(f'{{"event": "{event.kind}", "data": {event.data}}}')
                continue
            data = json.loads(event.data)
            if event.kind == "job":
                for each in data["changes"]:
                    if each not in known:
                        typer.echo(_event("change", each))
                known = data["changes"]
            typer.echo(_event(event.kind, data))
    # This is the usual end.
    except KeyboardInterrupt:
        pass


@app.command()
def logs(context: typer.Context, job: JobName, *, as_json: AsJson = False) -> None:
    """Print decisions about a job: changes, leaders, quarantined batches, evaluations, drift.

    Changes name who made them. The other decisions are those that the job's coordinators recorded
    in Kafka, except records of a coordinator that was no longer the leader. `doll audit` shows the
    updates of the model. With --json, prints one line per record.

    Example: [bold]doll job logs digits[/]
    """
    import msgspec

    from common.core.history import History
    from common.core.messages import Drifted, Evaluated, UpdateApplied
    from common.core.spans import Partition
    from common.jobs.store import JobStore
    from common.jobs.watching import decoded
    from common.kafka.read import records_of
    from common.wire.messages import decode_audit

    log, history = outside_of(context).open_log(), History()
    found = JobStore(log).get(job)

    def decided() -> Iterator[tuple[float, str, dict[str, Any]]]:
        for each in records_of(log, Partition(topics.updates_topic(found.id), 0)):
            record = decoded(decode_audit, each)
            counts = history.feed(each.offset, record) or isinstance(record, Evaluated | Drifted)
            if counts and not isinstance(record, UpdateApplied):
                data = msgspec.to_builtins(record)
                yield each.timestamp_s, data.pop("type"), data

    changes = [(each.at_s, "change", msgspec.to_builtins(each)) for each in found.changes]
    for at_s, kind, data in heapq.merge(decided(), changes, key=itemgetter(0)):
        if as_json:
            typer.echo(json.dumps({"event": kind, "at_s": at_s, "data": data}))
        else:
            typer.echo(_event(kind, data | {"at_s": at_s}))


@app.command()
def watch(
    context: typer.Context,
    job: JobName,
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Print the current state once and exit.")
    ] = False,
) -> None:
    """Watch a job live (updates, loss, metrics, records/s, workers, lag) until Ctrl-C.

    If the output is not a terminal, prints a line whenever something has changed.

    Example: [bold]doll job watch digits[/]
    """
    from rich.live import Live

    service, last_line = service_of(context), ""
    try:
        picture = service.look(job)
        if once:
            tables.show(_render(job, picture))
            return
        with Live(auto_refresh=False) if sys.stdout.isatty() else nullcontext() as shown:
            while True:
                if shown is not None:
                    shown.update(_render(job, picture), refresh=True)
                elif (line := _in_words(job, picture)) != last_line:
                    typer.echo(line)
                    last_line = line
                time.sleep(_EVERY_S)
                picture = service.look(job)
    # This is the usual end.
    except KeyboardInterrupt:
        pass


app.command()(requeue)
app.command()(replay)


def _want(context: typer.Context, job: str, wanted: Wanted, reason: str, **lost: object) -> None:
    found = service_of(context).change(job, reason, wanted=wanted, **lost)
    if wanted == "stopped" and found.state == "finished":
        typer.echo(f"job {job} has finished and does not change: {found.reason}")
    else:
        typer.echo(f"job {job} {_WORDS[wanted]}: {found.reason}")


def _print_notes(notes: Iterable[str]) -> None:
    """Print notes about a job that was accepted."""
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(seconds := float(text)):
            return seconds
    raise UserError(f"--deadline: must be a number of seconds or none, got {text!r}")


def _block(name: str, text: str) -> Value:
    """Parse a block from the command line."""
    from doll.yaml_file import load_text

    if text == "none":
        return None
    if name in {"synchronisation", "aggregation"} and text.isalpha():
        return {"mode": text}
    return load_text(text, f"change: {name}")


def _value(value: Value) -> str:
    """Format a setting's value for one line."""
    if isinstance(value, dict):
        return json.dumps(value)
    return "none" if value is None else value if isinstance(value, str) else f"{value:g}"


def _read(file: str) -> str:
    from doll.yaml_file import read_text

    if file != "-":
        return read_text(file)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: cannot be read as text: {error}") from error


def _render(job: str, picture: Picture) -> Group:
    """Draw the current state, and a table of the last updates with the newest first."""
    progress = picture.job.progress
    leaving = f" (+{picture.leaving} leaving)" if picture.leaving else ""
    present = [
        ("workers", _number(picture.alive) + leaving),
        ("records/s", _number(progress.samples_per_s)),
        ("learning rate", "-" if (rate := progress.learning_rate) is None else f"{rate:.4g}"),
        ("lag", _number(progress.lag)),
        ("batches waiting", _number(progress.waiting)),
        ("records skipped", _at_least(progress.skipped, whole=progress.whole)),
        ("batches quarantined", _at_least(progress.quarantined, whole=progress.whole)),
        ("records expired", _at_least(progress.expired, whole=progress.whole)),
        ("trained, then lost", _at_least(progress.lost, whole=progress.whole)),
    ]
    synchrony, stale = progress.synchrony, any(update.stale for update in picture.updates)
    if synchrony.mode != "synchronous":
        made = f"{synchrony.mode} (K {synchrony.group_size:,}, s {synchrony.staleness:,})"
        present.append(("synchronisation", made))
    head = Text.assemble((job, "bold"), f" {picture.state}")
    numbers = Text("   ".join(f"{name} {value}" for name, value in present))
    if progress.note:
        numbers.append(f"\nnote: {progress.note}", "yellow")
    # It loads numpy, which `--help` does not need.
    from common.core.scores import WINDOWED

    windowed = [name for name in WINDOWED if name in progress.metrics]
    if windowed:
        means = "   ".join(f"{name} {progress.metrics[name]:.4f}" for name in windowed)
        numbers.append(f"\nlast minute: {means}")
    names = sorted({name for update in picture.updates for name in update.metrics} - {*WINDOWED})
    table = Table("update", "by", "loss", *names, "records", "batches", box=None)
    if stale:
        table.add_column("stale")
    for update in reversed(picture.updates):
        table.add_row(
            f"{update.version:,}",
            str(update.epoch),
            f"{update.loss:.4f}",
            *(f"{update.metrics[name]:.4f}" if name in update.metrics else "" for name in names),
            f"{update.samples:,}",
            f"{update.batches}" + (f" ({update.short})" if update.short else ""),
            *[f"{update.stale}"] * stale,
        )
    return Group(head, numbers, table if picture.updates else Text("no update yet"))


def _event(kind: str, data: dict[str, Any]) -> str:
    """Format an event as a line with all fields that are single words or numbers."""
    fields = data
    if kind == "job":
        shown = data | data["progress"]
        fields = {name: shown[name] for name in ("state", "why", "revision", "version", "lag")}
    elif kind == "change":
        changed = {name: _value(value) for name, value in data["changed"].items()}
        fields = {name: data[name] for name in ("action", "by", "role")} | changed
        fields["reason"] = data["reason"]
    words = (
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={_printable(str(value))}"
        for name, value in fields.items()
        if isinstance(value, str | int | float) and value != "" and name != "at_s"
    )
    return f"{_clock(data)}  {kind:<10}  {'  '.join(words)}"


def _clock(data: dict[str, Any]) -> str:
    at_s = data.get("at_s")
    when = datetime.now(UTC) if at_s is None else datetime.fromtimestamp(at_s, UTC)
    return when.strftime("%Y-%m-%d %H:%M:%S")


def _in_words(job: str, picture: Picture) -> str:
    """Format one poll as a line for people."""
    progress = picture.job.progress
    words = [job, picture.state]
    if picture.updates:
        newest = picture.updates[-1]
        words += [f"update {newest.version:,}", f"loss {newest.loss:.4f}"]
        words += [f"{name} {value:.4f}" for name, value in sorted(newest.metrics.items())]
    words += [
        f"records/s {_number(progress.samples_per_s)}",
        f"workers {_number(picture.alive)}",
        f"lag {_number(progress.lag)}",
    ]
    return "  ".join(words)


def _number(value: float | None) -> str:
    """Format a number for people; None is unknown."""
    return "-" if value is None else f"{value:,.0f}"


def _at_least(count: int | None, *, whole: bool) -> str:
    """Format a count for people, with a plus if the history was not read completely."""
    return _number(count) + ("" if whole or count is None else "+")


def _printable(text: str) -> str:
    """Escape control characters except line ends and tabs."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else f"\\x{ord(each):02x}" for each in text
    )
