"""`doll worker`, `coordinator` and the other services, each with the command's settings."""

from __future__ import annotations

import os
from typing import NoReturn

import typer  # noqa: TC002 -- typer reads it when run

from common.config.program import command_of
from common.embedded.services import environment_of
from services.cli.system.outside import outside_of

_SERVICES = {
    "worker": "worker",
    "coordinator": "coordinator",
    "provisioner": "provisioner",
    "evaluator": "evaluator",
    "admin": "admin service, the REST API and its page,",
}
# What follows the command is the service's own, `--help` too.
_AS_GIVEN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_services(app: typer.Typer) -> None:
    """Add a command for each service, which the process then becomes."""
    for service, what in _SERVICES.items():
        about = f"Run one {what} in this process: see `doll {service} --help`."
        app.command(service, help=about, context_settings=_AS_GIVEN)(_become)


def _become(context: typer.Context) -> NoReturn:
    command = command_of(f"services.{context.info_name}", *context.args)
    os.execve(command[0], command, environment_of(outside_of(context).settings))  # noqa: S606 -- our own program, no shell
