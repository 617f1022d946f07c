"""`doll demo`: everything at once on one machine, with a preemption in the middle and a proof."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from common.datasets.digits import load_digits
from common.embedded.stack import EmbeddedStack
from common.errors import UserError
from services.cli import exits
from services.cli.demo.judge import judge, test_model
from services.cli.demo.plan import Plan
from services.cli.demo.rented.command import rented
from services.cli.demo.rented.plan import RentedPlan, policy_named
from services.cli.demo.run import Demo
from services.cli.demo.screen import Screen
from services.cli.demo.summary import Summary, draw
from services.cli.system.ending import Ending
from services.cli.system.outside import outside_of

if TYPE_CHECKING:
    from common.config.settings import Settings

_LOGS, _MODEL = "logs", "digits.safetensors"
_SECONDS = 30.0
_RATE_PER_S, _WORKERS = 2000.0, 3
# Machines that are started again and again take a part of what this one can do.
_RENTED_RATE_PER_S, _RENTED_WORKERS = 1500.0, 4
_RENTED_SECONDS = 75.0  # the price is above on-demand for a quarter of them
# The embedded Kafka keeps 5 MB of a topic of one partition: more updates than these records make
# (1.1 kB each) would not all be there for the proof.
_MOST_EMBEDDED = 300_000


def demo(  # noqa: PLR0913 -- the options of a command
    context: typer.Context,
    *,
    out: Annotated[Path, typer.Option(help="For summary, model, logs.")] = Path("out/demo"),
    seconds: Annotated[
        float | None, typer.Option(min=1, help=f"How long to stream; {_SECONDS:g} unless said.")
    ] = None,
    records: Annotated[int | None, typer.Option(min=1, help="Or how much.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=1, help="Records per second; 2000, or 1500 if rented.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; 3, or 4 if rented.")
    ] = None,
    away: Annotated[float, typer.Option(min=0, help="Seconds until the worker is back.")] = 5,
    kafka: Annotated[str, typer.Option(help="A Kafka to use: host:port.")] = "",
    redis: Annotated[str, typer.Option(help="A Redis to use: redis://host:port.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of weights, order and warps.")] = 0,
    provision: Annotated[
        bool,
        typer.Option(
            "--provision", help="Rent the workers' machines, to meet a deadline for less money."
        ),
    ] = False,
    policy: Annotated[
        str, typer.Option(help="With --provision: on-demand, static, adaptive, reassign, ...")
    ] = "",
) -> None:
    """Train on a live stream, kill a worker half-way, prove that every record was used once.

    Starts Kafka, Redis, a coordinator and workers on this machine; nothing is left running. Ends
    with 0 if no record was lost or used twice, with 5 otherwise.

    With --provision the workers are spot and on-demand machines of a market in a box: prices are
    replayed, spot machines are preempted at random, and a policy meets a deadline. Ends with 1 if
    it is missed.

    Example: [bold]doll demo --seconds 20 --workers 4[/]  or  [bold]doll demo --provision[/]
    """
    began = monotonic()
    if seconds is not None and records is not None:
        raise UserError("--seconds and --records say the same: give one of them")
    before = context.find_root().params  # `doll --kafka ADDRESS demo` means the same
    kafka, redis = kafka or before["kafka"], redis or before["redis"]
    name = f"demo-{datetime.now(UTC):%m%d-%H%M%S}"
    rate = rate or (_RENTED_RATE_PER_S if provision else _RATE_PER_S)
    workers = workers or (_RENTED_WORKERS if provision else _WORKERS)
    if provision:
        _emptied(out / _LOGS)
        undisturbed_s = records / rate if records is not None else seconds or _RENTED_SECONDS
        rented_plan = RentedPlan(
            name=name,
            undisturbed_s=undisturbed_s,
            rate_per_s=rate,
            workers=workers,
            policy=policy_named(policy),
            seed=seed,
        )
        rented(rented_plan, outside_of(context).settings, out, kafka=kafka, redis=redis)
        return
    total = records or int(rate * (seconds or _SECONDS))
    if not kafka and total > _MOST_EMBEDDED:
        raise UserError(
            f"{total:,} records: the embedded Kafka keeps the proof of {_MOST_EMBEDDED:,};"
            " give a real one with --kafka"
        )
    plan = Plan(
        name=name,
        records=total,
        rate_per_s=rate,
        workers=workers,
        seed=seed,
        away_s=away,
    )
    _emptied(out / _LOGS)
    base = outside_of(context).settings
    with Ending() as ending, EmbeddedStack(base, kafka=kafka, redis=redis) as stack:
        summary = replace(
            _perform(plan, stack.settings, out, ending, began),
            kafka=kafka or "embedded",
            redis=_host(redis) if redis else "embedded",
        )
    summary = replace(summary, seconds=monotonic() - began)
    (out / "summary.json").write_text(json.dumps(summary.as_data(), indent=2) + "\n")
    console = Console(highlight=False)
    console.print(draw(summary))
    console.print(f"{out}: summary.json, {_MODEL}, {_LOGS}/", style="dim", soft_wrap=True)
    if not summary.sound:
        raise typer.Exit(exits.AUDIT_BROKEN)


def _perform(plan: Plan, settings: Settings, out: Path, ending: Ending, began: float) -> Summary:
    with (
        Screen(Console(highlight=False), began) as screen,
        Demo(plan, settings, out / _LOGS, screen, ending) as demo,
    ):
        digits = load_digits()  # while the processes load torch
        checkpoint = demo.run(digits.train)
        tested = test_model(demo.spec, checkpoint, digits.held_out, out / _MODEL)
        return judge(demo, tested)


def _emptied(logs: Path) -> None:
    """Make the folder of the logs; an earlier demo's go."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for old in logs.glob("*.log"):
            old.unlink()
    except OSError as error:
        raise UserError(f"{logs}: cannot be used for logs: {error}") from error


def _host(url: str) -> str:
    """What may be shown of a URL: it may hold a password."""
    parts = urlsplit(url)
    return parts.path if parts.hostname is None else f"{parts.hostname}:{parts.port or 6379}"
