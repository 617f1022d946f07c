"""`doll job watch`: looks at a job again and again, and draws what it sees."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from services.cli.commands.watching import render
from services.cli.system.outside import system_of


def watch(
    context: typer.Context,
    job: Annotated[str, typer.Argument(help="The job's name.")],
    *,
    every_s: Annotated[float, typer.Option("--every", min=0.1, help="Seconds.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Show once and end.")] = False,
) -> None:
    """Watch a job live: updates, loss, metrics, records/s, workers, lag; ends with Ctrl-C.

    Example: [bold]doll job watch digits[/]
    """
    watched = system_of(context).watch(job)
    try:
        if once:
            Console().print(render(job, watched.look(0.0)))
            return
        with Live(render(job, watched.look(0.0)), auto_refresh=False) as live:
            while True:
                live.update(render(job, watched.look(every_s)), refresh=True)
    except KeyboardInterrupt:  # the usual end
        pass
    finally:
        watched.close()
