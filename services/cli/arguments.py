"""Arguments of several commands."""

from __future__ import annotations

from typing import Annotated

import typer

JobName = Annotated[str, typer.Argument(help="Name of the job.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
