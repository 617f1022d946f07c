"""`doll up`: Kafka, Redis, storage and the services on this machine, until Ctrl-C."""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from common.errors import DollError
from services.cli.system.ending import Ending
from services.cli.system.outside import outside_of

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.embedded.services import Service

_LOOK_S = 0.2  # between looks at the processes
_SHORTEST_LIFE_S = 10.0  # one that ends sooner after its start would only do so again
_REASON = 300  # characters of why there is no Apache Kafka: a line, not its whole log
_SHOWN = ("DOLL_KAFKA", "DOLL_KAFKA_GROUP_PROTOCOL", "DOLL_REDIS", "DOLL_BLOBS")


def up(
    context: typer.Context,
    *,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Worker processes.", show_default="2, or 0 with --market"),
    ] = None,
    market: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Market file: rent machines for jobs that ask for them."),
    ] = None,
    evaluator: Annotated[
        bool,
        typer.Option(
            "--evaluator",
            help="Judge versions of jobs with an `evaluation`, show those with `tracking`.",
        ),
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the API; 0: a free one.")
    ] = 8080,
    directory: Annotated[
        Path | None,
        typer.Option(help="For storage and logs.", show_default="a temporary one"),
    ] = None,
    kafka_real: Annotated[
        bool | None,
        typer.Option(
            "--kafka-real/--kafka-built-in",
            help="Apache Kafka itself, or the small one that is built in.",
            show_default="Apache Kafka, if Java and Maven are there",
        ),
    ] = None,
) -> None:
    """Run everything on this machine until Ctrl-C; workers work on whatever job is submitted.

    Prints the variables that other terminals need, and writes them to DIRECTORY/environment. The
    API and the live page listen on this machine only; the key that is printed may do everything.

    Apache Kafka needs Java 17, and Maven to fetch it the first time. The built-in one needs nothing
    and is for a first try: it keeps 5 MB of each partition, and nothing when it ends.

    Example: [bold]doll up --workers 3 --directory out/up[/]
    """
    from common.embedded.fork_server import prepare

    # While the servers start; in the order in which they are asked for.
    prepare("coordinator", *["provisioner"] * (market is not None), *["evaluator"] * evaluator)
    prepare(*["worker"] * (workers is None or workers > 0), "admin")
    from common.config.market_file import load_market
    from common.embedded.kafka import embedded_settings
    from common.embedded.services import stop_all
    from common.embedded.stack import EmbeddedStack
    from services.cli.local import made, open_page, start_services, with_market

    console = Console(highlight=False, soft_wrap=True)
    base = outside_of(context).settings
    with Ending() as ending, ExitStack() as parts:
        if directory is None:
            folder = tempfile.TemporaryDirectory(prefix="doll-up-")
            directory = Path(parts.enter_context(folder))
        logs = made(directory / "logs")
        address = _start_kafka(kafka_real, directory, parts, console)
        if address:
            base = base.model_copy(update={"kafka_group_protocol": "consumer"})
        stack = EmbeddedStack(base, kafka=address, blobs=directory / "blobs")
        settings = parts.enter_context(stack).settings
        environment = directory / "environment"
        environment.write_text(exports(settings))
        parts.callback(environment.unlink, missing_ok=True)  # it names what is about to be gone
        console.print("Kafka, Redis and storage are up. In another terminal:\n")
        console.print(exports(settings), style="bold", markup=False)
        console.print(f"or: . {environment}")
        if not address:
            address = embedded_settings(settings.embedded_kafka).bootstrap
        console.print(f"bootstrap address of Kafka, for any other client: {address}")
        if workers is None:
            workers = 2 if market is None else 0
        if market is not None:
            load_market(market)  # what is wrong with it is told here, not in a log
            settings = with_market(settings, market, directory / "machines")
        services = start_services(settings, logs, workers, evaluator=evaluator)
        parts.callback(stop_all, services)
        page = open_page(settings, logs, f"up-{os.getpid()}", "operator", port)
        services.append(page.service)
        console.print(f"API and live page: {page}")
        evaluators = ", evaluators: 1" * evaluator
        console.print(
            f"workers: {workers}, coordinators: 1{evaluators}; logs in {logs}; Ctrl-C ends all"
        )
        _tend(services, ending, console)


def exports(settings: Settings) -> str:
    """What a shell needs to find the servers of these settings."""
    variables = settings.environ()
    return "".join(
        f"export {name}={shlex.quote(variables[name])}\n" for name in _SHOWN if name in variables
    )


def _start_kafka(
    real: bool | None,  # noqa: FBT001 -- the option's three values
    directory: Path,
    parts: ExitStack,
    console: Console,
) -> str:
    """Start Apache Kafka where it is asked for, or nothing is and it can be had; say which one.

    Returns:
        The bootstrap address; empty: the built-in one has to do.

    Raises:
        DollError: If it was asked for, and cannot be had.
    """
    from common.embedded.kafka import KEPT_BYTES

    why = "as --kafka-built-in says"
    if real is not False:
        from common.embedded.apache_kafka import ApacheKafka, resolve

        try:
            jars = resolve(lambda: console.print("Maven fetches Apache Kafka, this once"))
            broker = parts.enter_context(ApacheKafka(jars, (directory / "kafka").absolute()))
        except DollError as error:
            if real:
                raise
            why = " ".join(str(error).split())[:_REASON]
        else:
            why = "as --kafka-real says" if real else "--kafka-built-in starts the small one"
            console.print(f"Kafka: Apache Kafka itself ({why})")
            return broker.settings.bootstrap
    console.print(
        f"Kafka: the built-in one, for a first try: it keeps {KEPT_BYTES >> 20} MB of each"
        f" partition, and nothing when it ends ({why})",
        markup=False,
    )
    return ""


def _tend(services: list[Service], ending: Ending, console: Console) -> None:
    """Start again whatever ends, until this process is asked to end.

    Raises:
        DollError: If one ends again and again.
    """
    started = dict.fromkeys(services, time.monotonic())
    while not ending.asked:
        time.sleep(_LOOK_S)
        for service, at in started.items():
            if service.exit_code is None:
                continue
            console.print(f"{service.name} ended with status {service.exit_code}", style="red")
            if time.monotonic() < at + _SHORTEST_LIFE_S:
                console.print(service.last_words(), markup=False)
                raise DollError(f"{service.name} ended again at once; its log is {service.log}")
            service.restart()
            started[service] = time.monotonic()
