"""The `doll` command: global options, groups of commands, and error messages.

A command is a function with a typer signature; it raises `DollError` and never prints one. To add a
command, write it in its own file and register it at the end of this file.
"""

from __future__ import annotations

import gc
from inspect import cleandoc
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from common.errors import DollError, ForbiddenError, OutsideError, UserError
from services.cli import exits
from services.cli.commands import (
    audit,
    backup,
    dlq,
    job,
    key,
    model,
    plan,
    produce,
    provisioning,
    simulate,
    topic,
)
from services.cli.commands.serve import add_services
from services.cli.commands.up import up
from services.cli.demo.command import demo
from services.cli.system.outside import CHOSEN_WITH, Reached, Ways


class _Commands(TyperGroup):
    """Prints an error in one line: what is wrong and what to do."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 -- the library defines them
        super().__init__(**settings)
        _join_lines(self)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 -- the library's class has no public name
        # None of the global options was given.
        if args and args[0] in self.commands:
            # Conversion of their values would load pydantic.
            self.params = []
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 -- the library's class has no public name
        # See `doll.distribution`.
        gc.enable()
        try:
            return super().invoke(ctx)
        except DollError as error:
            code, hint = exits.REFUSED, ""
            if not isinstance(error, UserError):
                code = exits.UNAVAILABLE if isinstance(error, OutsideError) else exits.FAILED
                option = ctx.meta.get(CHOSEN_WITH)
                if option and error.retriable and not isinstance(error, ForbiddenError):
                    hint = f" (is it running? use {option} to name another server)"
            Console(stderr=True, soft_wrap=True).print(
                f"[bold red]error:[/] {escape(' '.join(str(error).split()))}{hint}", highlight=False
            )
            raise typer.Exit(code) from error


def _join_lines(command: Any) -> None:  # noqa: ANN401 -- typer's classes have no public names
    """Make all paragraphs of help as wide as the terminal; typer does this for the first only."""
    paragraphs = cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
    for each in getattr(command, "commands", {}).values():
        _join_lines(each)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="""Train PyTorch models on live Kafka streams, on machines that may vanish at any moment.

    Example: [bold]doll --api http://localhost:8080 job submit digits.yaml[/]""",
)


def _version(wanted: bool) -> None:  # noqa: FBT001 -- typer calls it
    if wanted:
        from importlib.metadata import version

        typer.echo(f"doll {version('doll')}")
        raise typer.Exit


@app.callback()
def settings(
    context: typer.Context,
    kafka: Annotated[
        str,
        typer.Option(
            help="Addresses of Kafka brokers: host:port, separated by commas. Optional. If unset,"
            " DOLL_KAFKA from the environment is used."
        ),
    ] = "",
    api: Annotated[
        str,
        typer.Option(
            help="URL of the admin service, such as http://host:port. Optional. If unset,"
            " DOLL_API from the environment is used."
        ),
    ] = "",
    api_key: Annotated[
        str,
        typer.Option(
            help="API key for the admin service. Other users of this machine can see options, so"
            " prefer DOLL_API_KEY or DOLL_API_KEY_FILE (a file with the key), which are used if"
            " this option is unset."
        ),
    ] = "",
    *,
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="Print the version of DOLL and exit.",
        ),
    ] = False,
) -> None:
    """Remember the given options, which take precedence over the environment."""
    given = {"DOLL_KAFKA": kafka, "DOLL_API": api, "DOLL_API_KEY": api_key}
    # Until here, the context's object is the `Ways` that `main` or a test has passed.
    ways: Ways = context.obj
    context.obj = Reached(ways, {name: value for name, value in given.items() if value})


app.command()(demo)
app.command()(up)
app.command()(produce.produce)
app.command()(audit.audit)
app.command()(backup.backup)
app.command()(backup.restore)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.add_typer(dlq.app, name="dlq")
app.add_typer(job.app, name="job")
app.add_typer(key.app, name="key")
app.add_typer(model.app, name="model")
app.add_typer(provisioning.app, name="provisioning")
app.add_typer(topic.app, name="topic")
app.command()(provisioning.prices)
add_services(app)
