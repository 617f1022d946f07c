"""`doll up`: Kafka, Redis, storage and the services on this machine, until Ctrl-C."""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from common.errors import DollError
from services.cli.system.ending import Ending
from services.cli.system.outside import outside_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.config.settings import Settings
    from common.embedded.apache_kafka import ApacheKafka
    from services.cli.system.keeper import Kept

# Maximum number of characters of the reason why Apache Kafka is missing: a line, not its log.
_REASON = 300
_SHOWN = (
    *("DOLL_KAFKA", "DOLL_KAFKA_GROUP_PROTOCOL", "DOLL_REDIS", "DOLL_BLOBS"),
    *("DOLL_API", "DOLL_API_KEY"),
)


def up(
    context: typer.Context,
    *,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of worker processes.", show_default="2, or 0 with --market"
        ),
    ] = None,
    market: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Market file, which lists machines to rent and their prices. Starts a"
            " provisioner, which rents these machines for jobs with a `provisioning` block.",
        ),
    ] = None,
    evaluator: Annotated[
        bool,
        typer.Option(
            "--evaluator",
            help="Start an evaluator, which tests models and reports to MLflow, for jobs with"
            " `evaluation` or `tracking` in their job file.",
        ),
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints and logs.", show_default="a temporary folder"),
    ] = None,
    kafka_real: Annotated[
        bool | None,
        typer.Option(
            "--kafka-real/--kafka-built-in",
            help="Start Apache Kafka, or the small built-in Kafka, which loses all data when it"
            " ends.",
            show_default="Apache Kafka if Java and Maven are installed",
        ),
    ] = None,
) -> None:
    """Run all of DOLL on this machine until Ctrl-C; its workers serve every submitted job.

    Prints the environment variables that other terminals need, such as the URL and key of the API,
    and writes them to DIRECTORY/environment, which other users cannot read. The API and the live
    page accept connections from this machine only, on port DOLL_API_PORT (8080). The printed key
    has the role operator, which may do everything.

    Starts Apache Kafka if Java 17 and Maven, which downloads it the first time, are installed;
    otherwise, or with --kafka-built-in, the built-in Kafka. This one is for a first try: it keeps
    5 MB of each partition, and loses all data when it ends.

    Example: [bold]doll up --workers 3 --directory out/up[/]
    """
    from common.runtime.fork_server import prepare

    # The modules load while the servers start, sorted by the time when they are needed.
    prepare("coordinator", *["provisioner"] * (market is not None), *["evaluator"] * evaluator)
    prepare(*["worker"] * (workers is None or workers > 0), "admin")
    from common.embedded.services import stop_all
    from common.embedded.stack import EmbeddedStack
    from common.kafka.settings import embedded_settings
    from common.spot.market.market_file import Market
    from services.cli.local import made, open_page, start_services, with_market

    console = Console(highlight=False, soft_wrap=True)
    base = outside_of(context).settings
    with Ending() as ending, ExitStack() as parts:
        if directory is None:
            folder = tempfile.TemporaryDirectory(prefix="doll-up-")
            directory = Path(parts.enter_context(folder))
        logs = made(directory / "logs")
        broker = _start_kafka(kafka_real, directory, parts, console)
        address = broker.settings.bootstrap if broker else ""
        if address:
            base = base.model_copy(update={"kafka_group_protocol": "consumer"})
        stack = EmbeddedStack(base, kafka=address, blobs=directory / "blobs")
        settings = parts.enter_context(stack).settings
        if not address:
            address = embedded_settings(settings.embedded_kafka).bootstrap
        if workers is None:
            workers = 2 if market is None else 0
        if market is not None:
            # An invalid file is reported here instead of in a log.
            Market.load(market)
            settings = with_market(settings, market, directory / "machines")
        guests = start_services(settings, logs, workers, evaluator=evaluator)
        services = [*guests]
        parts.callback(stop_all, services)
        page = open_page(settings, logs, f"up-{os.getpid()}", "operator", base.api_port)
        services.append(page.service)
        page.await_ready(lambda: ending.asked)
        found = exports(settings.model_copy(update={"api": page.url, "api_key": page.key}))
        environment = directory / "environment"
        # The file names servers that are about to end.
        parts.callback(environment.unlink, missing_ok=True)
        environment.unlink(missing_ok=True)
        # The file holds a key that may do everything.
        environment.touch(mode=0o600)
        environment.write_text(found)
        console.print("DOLL is running. In another terminal, run:\n")
        console.print(found, style="bold", markup=False)
        console.print(f"or: . {environment}")
        console.print(f"Kafka's address for other clients: {address}")
        servers: list[Kept] = [*([broker] if broker else []), *stack.servers, page.service]
        console.print(f"API and live page: {page}")
        evaluators = ", evaluators: 1" * evaluator
        console.print(
            f"workers: {workers}, coordinators: 1{evaluators}; logs in {logs}; Ctrl-C stops"
            " everything"
        )
        _tend(servers, guests, ending, console)


def exports(settings: Settings) -> str:
    """Return the shell commands that set the variables for these servers."""
    variables = settings.environ()
    return "".join(
        f"export {name}={shlex.quote(variables[name])}\n" for name in _SHOWN if name in variables
    )


def _start_kafka(
    real: bool | None,  # noqa: FBT001 -- the option's three values
    directory: Path,
    parts: ExitStack,
    console: Console,
) -> ApacheKafka | None:
    """Start Apache Kafka if the option or, without the option, the machine allows it.

    Returns:
        The broker, or None if the built-in one should be used.

    Raises:
        DollError: If the option requires Apache Kafka, and it cannot be started.
    """
    from common.embedded.kafka import KEPT_BYTES

    why = "because of --kafka-built-in"
    if real is not False:
        from common.embedded.apache_kafka import ApacheKafka, resolve

        try:
            jars = resolve(
                lambda: console.print("Maven downloads Apache Kafka; later starts do not need this")
            )
            broker = parts.enter_context(ApacheKafka(jars, (directory / "kafka").absolute()))
        except DollError as error:
            if real:
                raise
            why = " ".join(str(error).split())[:_REASON]
        else:
            why = "because of --kafka-real" if real else "--kafka-built-in starts the small one"
            console.print(f"Kafka: Apache Kafka ({why})")
            return broker
    console.print(
        f"Kafka: the built-in one, for a first try: it keeps {KEPT_BYTES >> 20} MB of each"
        f" partition, and loses all data when it ends ({why})",
        markup=False,
    )
    return None


def _tend(
    servers: Iterable[Kept], guests: Iterable[Kept], ending: Ending, console: Console
) -> None:
    """Restart processes that end, until this process should end.

    Args:
        servers: Processes that all others need.
        guests: Processes that may die, for example because of a job's task, without harm to others.
        ending: True in `asked` once this process should end.
        console: Prints each death.

    Raises:
        DollError: If one of the servers keeps dying.
    """
    from services.cli.system.keeper import Keeper, keep

    now = time.monotonic()
    keepers = [
        *(Keeper(each, now, essential=True) for each in servers),
        *(Keeper(each, now) for each in guests),
    ]
    keep(
        keepers,
        lambda: ending.asked,
        partial(console.print, style="red", markup=False),
        time.monotonic,
        time.sleep,
    )
