"""`doll demo --provision`: a deadline, a market in a box, and the bill."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from common.datasets.digits import load_digits
from common.embedded.stack import EmbeddedStack
from common.errors import UserError
from services.cli import exits
from services.cli.demo.rented.run import RentedDemo
from services.cli.demo.rented.summary import draw
from services.cli.demo.screen import Screen
from services.cli.system.ending import Ending

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.settings import Settings
    from services.cli.demo.rented.plan import RentedPlan
    from services.cli.demo.rented.summary import RentedSummary

_MODEL, _MACHINES, _MARKET = "digits.safetensors", "machines", "market.json"


def rented(plan: RentedPlan, base: Settings, out: Path, *, kafka: str, redis: str) -> None:
    """Run a demo on rented machines, and tell how it went.

    Args:
        plan: What is to happen.
        base: Of this process.
        out: For summary, model and logs; the folder of the logs is there and empty.
        kafka: Address of a Kafka to use; an embedded one if empty.
        redis: URL of a Redis to use; an embedded one if empty.

    Raises:
        typer.Exit: If a record was used twice, or the deadline was missed.
    """
    began = monotonic()
    market, machines = out / _MARKET, out / _MACHINES
    try:
        shutil.rmtree(machines, ignore_errors=True)
        machines.mkdir(parents=True)
        market.write_text(plan.market())
    except OSError as error:
        raise UserError(f"{out}: cannot be used: {error}") from error
    with Ending() as ending, EmbeddedStack(base, kafka=kafka, redis=redis) as stack:
        settings = stack.settings.model_copy(
            update={
                "market": str(market.absolute()),
                "fleet_directory": str(machines.absolute()),
                "owner_pid": os.getpid(),  # whatever becomes of the provisioner, machines end too
            }
        )
        summary = replace(_perform(plan, settings, out, ending, began), seconds=monotonic() - began)
    (out / "summary.json").write_text(json.dumps(summary.as_data(), indent=2) + "\n")
    console = Console(highlight=False)
    console.print(draw(summary))
    console.print(f"{out}: summary.json, {_MODEL}, logs/, {_MACHINES}/", style="dim")
    if not summary.sound:
        raise typer.Exit(exits.AUDIT_BROKEN)
    if not summary.in_time:
        raise typer.Exit(exits.FAILED)


def _perform(
    plan: RentedPlan, settings: Settings, out: Path, ending: Ending, began: float
) -> RentedSummary:
    digits = load_digits()
    with (
        Screen(Console(highlight=False), began) as screen,
        RentedDemo(plan, settings, out / "logs", screen, ending) as demo,
    ):
        demo.run(digits.train)
        return demo.judge(digits.held_out, out / _MODEL)
