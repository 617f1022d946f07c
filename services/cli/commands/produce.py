"""`doll produce`: sends a data set to a topic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console

from common.errors import UnavailableError, UnknownTopicError, UserError
from common.kafka.names import check_stream
from services.cli.system.outside import outside_of

if TYPE_CHECKING:
    from common.jobs.servers import Outside
    from common.kafka.port import Log, Writer
    from services.cli.commands.parquet import OnceWriter, Rows
    from services.cli.commands.producing import ArrivalSchedule

_FLUSH_S = 30.0
_PROPOSED = "run `doll topic describe {}` for a job file that reads these records"


def produce(  # noqa: PLR0913 -- the options of a command
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            help="Data set: `digits` (built in), a .csv, .npz, IDX, CIFAR or .parquet file, or a"
            " local or s3:// folder of Parquet files."
        ),
    ],
    *,
    topic: Annotated[str, typer.Option(help="Topic to write the records to.")],
    rate: Annotated[
        float, typer.Option(min=0, help="Records to send per second; 0 for no limit.")
    ] = 0,
    poisson: Annotated[
        bool,
        typer.Option(
            "--poisson",
            help="Send records at random (Poisson) times instead of evenly spaced ones.",
        ),
    ] = False,
    records: Annotated[
        int,
        typer.Option(
            min=0, help="Number of records after which to stop; 0 sends the whole data set."
        ),
    ] = 0,
    repeat: Annotated[
        bool,
        typer.Option(
            "--repeat",
            help="Repeat the data set until --records records are sent, or until Ctrl-C.",
        ),
    ] = False,
    in_order: Annotated[
        bool,
        typer.Option(
            "--in-order", help="Send the records in the order of the source; do not shuffle."
        ),
    ] = False,
    warp: Annotated[
        bool, typer.Option("--warp", help="Distort each image at random, for more variety.")
    ] = False,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out", help="With `digits`: send the test set instead of the training set."
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the random order, distortions and arrival times.")
    ] = 0,
    create_partitions: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of partitions with which the topic is created if it does not exist; 0"
            " reports an error instead.",
        ),
    ] = 0,
    codec: Annotated[
        str,
        typer.Option(
            help="Encoding of the records: tensor (binary) or json.",
            show_default="tensor; json for Parquet",
        ),
    ] = "",
    label: Annotated[
        str, typer.Option(help="CSV only: name of the label's column.", show_default="the last")
    ] = "",
    leave_out: Annotated[
        list[str] | None,
        typer.Option(help="CSV and Parquet only: column that is not sent. Repeatable."),
    ] = None,
    rows: Annotated[
        bool,
        typer.Option(
            "--rows",
            help="CSV only: send each row as a JSON object whose keys are the column names of the"
            " header.",
        ),
    ] = False,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="With --rows: columns to send as text even if a cell is a number; a name or a"
            " pattern such as `C*`. Repeatable."
        ),
    ] = None,
    job: Annotated[
        str, typer.Option(help="Job whose backlog of untrained records --max-lag limits.")
    ] = "",
    max_lag: Annotated[
        int,
        typer.Option(
            min=0,
            help="Pause while the topic has this many records that --job has not trained yet; 0"
            " never pauses.",
        ),
    ] = 0,
) -> None:
    """Send the records of a data set to a topic, once or forever.

    Rows of Parquet are sent as JSON objects, in order and each exactly once. If the command is
    interrupted, run it again to send the rest.

    After a stall, all records that are due at --rate are sent at once.

    Example: [bold]doll produce digits --topic clinic-a --rate 500 --poisson --repeat --warp
    --create-partitions 4[/]
    """
    import numpy as np

    from common.data.records import count
    from services.cli.commands import sources
    from services.cli.commands.producing import ArrivalSchedule, BacklogLimit, unbounded

    if bool(job) != bool(max_lag):
        raise UserError("--job, --max-lag: give both or neither")
    order, arrivals = np.random.default_rng(seed).spawn(2)
    outside = outside_of(context)
    table: Rows | None = None
    if sources.is_parquet(source):
        if repeat or warp or held_out or label or codec not in {"", "json"}:
            raise UserError(
                f"{source}: Parquet rows are sent as JSON, unchanged and once; remove --repeat,"
                " --warp,"
                " --held-out, --label and --codec"
            )
        table = _rows_of(source, leave_out or [])
        stream, here, fields = table.stream(0), table.count, _PROPOSED.format(topic)
    else:
        data = sources.load(
            source,
            label=label or None,
            leave_out=leave_out or [],
            rows=rows,
            texts=text or [],
            held_out=held_out,
        )
        codec = codec or "tensor"
        stream = sources.stream(data, codec, order, repeat=repeat, in_order=in_order, warp=warp)
        here, fields = count(data), _PROPOSED.format(topic)
        if not rows:
            fields = sources.describe(codec, sources.fields_of(data))
    log = outside.open_log()
    _find_topic(log, topic, create_partitions)
    backlog = None
    if job:
        from common.jobs.store import JobStore

        backlog = BacklogLimit(log, outside.open_board(JobStore(log).id_of(job)), topic, max_lag)
    console = Console(stderr=True)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(fields)
    total = records or None if repeat else min(records or here, here)
    if not repeat and records > here:
        again = "add --repeat to send them again"
        say(f"{source} has only {here:,} of the {records:,} requested records; {again}")
    pace = ArrivalSchedule(rate, arrivals if poisson else None) if rate else None
    sending = _Sending(topic, total, pace, backlog.room if backlog else unbounded, console, say)
    if table is not None and not outside.settings.embedded_kafka:
        from services.cli.commands.parquet import OnceWriter

        with closing(OnceWriter(log, topic, source, table)) as way:
            if way.written:
                say(f"{way.written:,} of {here:,} rows were sent by earlier runs")
            rest = min(records or here, here - way.written)
            rows_left = table.stream(way.written)
            say(_send(rows_left, way, way.send, sending._replace(total=rest)))
        return
    say(_sent(stream, outside, log, sending, max_lag))


class _Sending(NamedTuple):
    """Parameters of one run of `produce`."""

    topic: str
    # Number of records; None for the whole stream.
    total: int | None
    schedule: ArrivalSchedule | None
    room: Callable[[int], int]
    console: Console
    say: Callable[[str], None]


def _sent(
    stream: Iterator[bytes], outside: Outside, log: Log, sending: _Sending, max_lag: int
) -> str:
    """Send records at least once, and return how many and how fast.

    Raises:
        UserError: If the built-in broker would drop unread records.
    """
    from services.cli.commands.producing import RetryingWriter, fitting

    topic, say = sending.topic, sending.say
    if not outside.settings.embedded_kafka:
        with closing(log.writer(waits=False)) as writer:
            way = RetryingWriter(writer, topic, time.monotonic, time.sleep, say)
            return _send(stream, writer, way.send, sending)
    turns = cycle(range(len(log.partitions(topic))))
    stream = fitting(stream, log, topic, sending.total, max_lag)
    with closing(log.writer()) as writer:
        append = partial(writer.append, topic)
        return _send(stream, writer, lambda value: append(value, partition=next(turns)), sending)


def _send(
    stream: Iterator[bytes],
    writer: Writer | OnceWriter,
    append: Callable[[bytes], None],
    sending: _Sending,
) -> str:
    """Send up to `sending.total` records, and return how many and how fast."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    from services.cli.commands.producing import send_all

    topic, total = sending.topic, sending.total
    sent, ended, start_s = 0, "", time.monotonic()

    def send(value: bytes) -> None:
        nonlocal sent
        append(value)
        sent += 1

    with Progress(
        TextColumn(f"[bold]{topic}[/]"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f}/s, {task.fields[behind]:,} behind"),
        TimeElapsedColumn(),
        console=sending.console,
    ) as progress:
        bar = progress.add_task(topic, total=total, rate=0.0, behind=0)
        bursts = send_all(
            *(islice(stream, total), send),
            schedule=sending.schedule,
            room=sending.room,
            clock=time.monotonic,
            wait=time.sleep,
        )
        try:
            for _, behind in bursts:
                writer.poll()
                rate = sent / max(time.monotonic() - start_s, 1e-3)
                progress.update(bar, completed=sent, rate=rate, behind=behind)
        # This is the usual end of an endless stream.
        except KeyboardInterrupt:
            ended = f"; interrupted, {total - sent:,} were not sent" if total else ""
    if not writer.flush(_FLUSH_S):
        raise UnavailableError(f"Kafka did not accept all of the {sent:,} records for {topic}")
    took_s = time.monotonic() - start_s
    return f"sent {sent:,} records to {topic} in {took_s:.1f} s ({sent / took_s:,.0f}/s){ended}"


def _rows_of(source: str, leave_out: list[str]) -> Rows:
    try:
        from services.cli.commands.parquet import Rows
    except ModuleNotFoundError as error:
        raise UserError(
            f"{source}: the Parquet reader is not installed; run `pip install 'doll[parquet]'`"
        ) from error
    return Rows(source, leave_out)


def _find_topic(log: Log, topic: str, create_partitions: int) -> None:
    from common.kafka.port import NewTopic

    try:
        check_stream(topic)
    except ValueError as error:
        raise UserError(f"--topic: {error}") from error
    try:
        log.partitions(topic)
    except UnknownTopicError as error:
        if not create_partitions:
            raise UserError(
                f'--topic: there is no topic "{topic}"; create it with --create-partitions 4'
            ) from error
        log.create_topics([NewTopic(topic, create_partitions)])
