"""`doll demo`: everything at once on one machine, with preemptions and a proof."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from common.errors import UserError
from services.cli import exits
from services.cli.system.ending import Ending
from services.cli.system.outside import outside_of

if TYPE_CHECKING:
    from common.config.settings import Settings
    from services.cli.demo.plan import DemoPlan
    from services.cli.demo.summary import DemoSummary

_LOGS, _MACHINES, _MARKET, _MODEL = "logs", "machines", "market.json", "digits.safetensors"
_TEST = "model-test.log"
_SECONDS = 30.0
_RATE_PER_S, _WORKERS = 2000.0, 3
# Frequent starts of machines take a part of this machine's capacity.
_RENTED_RATE_PER_S, _RENTED_WORKERS = 1500.0, 4
# The spot price is above on-demand for a quarter of this time.
_RENTED_SECONDS = 75.0
# The embedded Kafka keeps 5 MB of a topic with one partition. With more records, the updates (1.1
# kB each) would not all be there for the proof.
_MOST_EMBEDDED = 300_000


def demo(
    context: typer.Context,
    *,
    out: Annotated[Path, typer.Option(help="Folder for the summary, the model and logs.")] = Path(
        "out/demo"
    ),
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Time for which records are sent, in seconds.",
            show_default="30, or 75 with --provision",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=1, help="Records sent per second.", show_default="2000, or 1500 with --provision"
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of worker processes.", show_default="3, or 4 with --provision"
        ),
    ] = None,
    provision: Annotated[
        bool,
        typer.Option(
            "--provision",
            help="Run the workers on machines rented from a simulated cloud market, to meet a"
            " deadline at low cost.",
        ),
    ] = False,
) -> None:
    """Train on a live stream, kill a worker halfway, and prove that every record was used once.

    Starts Kafka, Redis, a coordinator and workers on this machine, and stops them at the end. To
    use running servers instead: `DOLL_REDIS=URL doll --kafka ADDRESS demo`. Exits with 0 if no
    record was lost or used twice, otherwise with 5.

    With --provision, the workers run on spot and on-demand machines of a simulated market, which
    replays recorded prices and preempts spot machines at random. DOLL rents machines so that
    training meets a deadline. Exits with 1 if the deadline is missed.

    Example: [bold]doll demo --seconds 20 --workers 4[/] or [bold]doll demo --provision[/]
    """
    from common.runtime.fork_server import prepare

    began = monotonic()
    # Loading modules takes longer than everything else until the processes work.
    prepare("coordinator", *(["provisioner", "admin"] if provision else ["worker"]))
    from common.embedded.stack import EmbeddedStack
    from services.cli.demo.plan import DemoPlan
    from services.cli.demo.summary import draw
    from services.cli.local import made, with_market

    base = outside_of(context).settings
    # DOLL_REDIS counts only with --kafka, because it may still name the server of `doll up`.
    kafka = context.find_root().params.get("kafka", "")
    redis = base.redis if kafka and "redis" in base.model_fields_set else ""
    rate = rate or (_RENTED_RATE_PER_S if provision else _RATE_PER_S)
    seconds = seconds or (_RENTED_SECONDS if provision else _SECONDS)
    plan = DemoPlan(
        name=f"demo-{datetime.now(UTC):%m%d-%H%M%S}",
        records=int(rate * seconds),
        rate_per_s=rate,
        workers=workers or (_RENTED_WORKERS if provision else _WORKERS),
        provision=provision,
    )
    if not provision and not kafka and plan.records > _MOST_EMBEDDED:
        raise UserError(
            f"--seconds, --rate: at most {_MOST_EMBEDDED:,} records fit into the built-in Kafka,"
            f" got {plan.records:,}; use another Kafka with `doll --kafka ADDRESS demo`"
        )
    for old in made(out / _LOGS).glob("*.log"):
        old.unlink()
    with Ending() as ending, EmbeddedStack(base, kafka=kafka, redis=redis) as stack:
        # Several workers share this machine, and the model is small.
        settings = stack.settings.model_copy(update={"device": "cpu", "gpus": "none"})
        if provision:
            shutil.rmtree(out / _MACHINES, ignore_errors=True)
            (out / _MARKET).write_bytes(plan.market())
            settings = with_market(settings, out / _MARKET, made(out / _MACHINES))
        summary = _perform(plan, settings, out, ending, began)
    summary = replace(
        summary,
        kafka=kafka or "embedded",
        redis=_host(redis) if redis else "embedded",
        seconds=monotonic() - began,
    )
    (out / "summary.json").write_text(json.dumps(summary.as_data(), indent=2) + "\n")
    console = Console(highlight=False)
    console.print(draw(summary))
    folders = f"{_LOGS}/, {_MACHINES}/" if provision else f"{_LOGS}/"
    console.print(f"{out}: summary.json, {_MODEL}, {folders}", style="dim", soft_wrap=True)
    if not summary.sound:
        raise typer.Exit(exits.AUDIT_BROKEN)
    if summary.bill is not None and not summary.bill.in_time:
        raise typer.Exit(exits.FAILED)


def _perform(
    plan: DemoPlan, settings: Settings, out: Path, ending: Ending, began: float
) -> DemoSummary:
    from common.data.digits import load_digits
    from services.cli.demo.judge import ModelTest, judge
    from services.cli.demo.run import Demo
    from services.cli.demo.screen import Screen

    # This precedes the submission, because the deadline counts from there.
    digits = load_digits()
    with (
        Screen(Console(highlight=False), began) as screen,
        closing(Demo(plan, settings, out / _LOGS, screen, ending)) as demo,
    ):
        demo.run(digits.train)
        return judge(demo, ModelTest(settings, plan.name, out / _MODEL, out / _LOGS / _TEST))


def _host(url: str) -> str:
    """Return the part of a URL without a password."""
    parts = urlsplit(url)
    return parts.path if parts.hostname is None else f"{parts.hostname}:{parts.port or 6379}"
