"""`doll worker`, `coordinator` and the other services, each with the command's settings."""

from __future__ import annotations

import os
from typing import NoReturn

import typer  # noqa: TC002 -- typer reads it when run

from common.config.program import SERVICES, command_line, command_of
from services.cli.system.outside import outside_of

# Descriptions of the services.
_SAID = {
    "admin": "admin service (the REST API and the live page)",
    "coordinator": "coordinator (leads jobs and updates their models)",
    "evaluator": "evaluator (tests models on separate data while they are trained)",
    "provisioner": "provisioner (rents machines for jobs)",
    "serve": "prediction service (answers prediction requests with a trained model)",
    "worker": "worker (reads records and computes gradients)",
}
# All arguments after the command, including `--help`, are passed to the service.
_AS_GIVEN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_services(app: typer.Typer) -> None:
    """Add a command for each service; the process becomes the service."""
    for service in SERVICES:
        what = _SAID.get(service, service)
        about = f"Run one {what} in this process. See `doll {service} --help`."
        app.command(service, help=about, context_settings=_AS_GIVEN)(_become)


def _become(context: typer.Context) -> NoReturn:
    service = context.info_name or ""
    # Checked here, because the service would load PyTorch just to print help.
    command_line(service, context.args)
    from common.embedded.services import environment_of

    command = command_of(f"services.{service}", *context.args)
    os.execve(command[0], command, environment_of(outside_of(context).settings))  # noqa: S606 -- our own program, no shell
