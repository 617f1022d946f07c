"""`doll worker`, `coordinator` and the other services, each with the command's settings."""

from __future__ import annotations

import os
from typing import NoReturn

import typer  # noqa: TC002 -- typer reads it when run

from common.config.program import command_of
from common.embedded.services import environment_of
from services.cli.system.outside import outside_of

# What follows the command is the service's own, `--help` too.
AS_GIVEN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def worker(context: typer.Context) -> None:
    """Run one worker in this process: see `doll worker --help`."""
    _become("worker", context)


def coordinator(context: typer.Context) -> None:
    """Run one coordinator in this process: see `doll coordinator --help`."""
    _become("coordinator", context)


def provisioner(context: typer.Context) -> None:
    """Run one provisioner in this process: see `doll provisioner --help`."""
    _become("provisioner", context)


def evaluator(context: typer.Context) -> None:
    """Run one evaluator in this process: see `doll evaluator --help`."""
    _become("evaluator", context)


def admin(context: typer.Context) -> None:
    """Run one admin service in this process, the API and its page: see `doll admin --help`."""
    _become("admin", context)


def _become(service: str, context: typer.Context) -> NoReturn:
    command = command_of(f"services.{service}", *context.args)
    os.execve(command[0], command, environment_of(outside_of(context).settings))  # noqa: S606 -- our own program, no shell
