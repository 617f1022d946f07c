"""Connections of the running command: to an admin service, or to the servers themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, cast

from common.errors import OutsideError, UnavailableError, UserError

if TYPE_CHECKING:
    import httpx2
    import typer

    from common.config.settings import Settings
    from common.jobs.servers import Outside
    from common.kafka.port import TransactionalLog
    from services.cli.system.api import Api

# Key in the context's `meta` of the option that names the server.
CHOSEN_WITH = "doll.chosen_with"


@dataclass(frozen=True, slots=True)
class Ways:
    """Functions that connect: `main` passes adapters, tests pass fakes."""

    connect: Callable[[Settings], Outside]
    # Transport of the REST API; None is the network.
    transport: httpx2.BaseTransport | None = None


@dataclass(frozen=True)
class Reached:
    """Settings, read when a command needs them, and the servers that they name.

    Args:
        given: Variables from options, which take precedence over the environment.
    """

    ways: Ways
    given: Mapping[str, str]

    @cached_property
    def outside(self) -> Outside:
        """Servers that the settings name.

        Raises:
            UserError: If a setting is invalid.
        """
        from common.config.settings import read_settings

        # An option replaces both forms of the variable in the environment.
        files = {f"{name}_FILE": "" for name in self.given}
        outside = self.ways.connect(read_settings({**os.environ, **files, **self.given}))
        return replace(outside, open_log=cache(partial(_found, outside.open_log)))


def _found(open_log: Callable[[], TransactionalLog]) -> TransactionalLog:
    """Open Kafka and send a request, so that later retries are for a broker that exists.

    Raises:
        UnavailableError: If Kafka does not answer.
    """
    from common.kafka.names import JOBS

    log = open_log()
    try:
        log.partitions(JOBS)
    except UnavailableError:
        raise
    except OutsideError:
        # A broker answered. The command itself reports a missing right or topic.
        pass
    return log


def outside_of(context: typer.Context) -> Outside:
    """Return the servers for a command that does not use an admin service.

    DOLL_API in the environment is for other commands.

    Raises:
        UserError: If --api is given, because a service does not offer this command.
    """
    reached = _reached(context)
    if "DOLL_API" in reached.given:
        raise UserError(f"--api: `{context.command_path}` connects to Kafka directly; remove --api")
    context.meta[CHOSEN_WITH] = "--kafka"
    return reached.outside


def settings_of(context: typer.Context) -> Settings:
    """Return the settings of a command."""
    return _reached(context).outside.settings


def service_of(context: typer.Context) -> Api:
    """Return the admin service of a command."""
    from services.cli.system.api import Api

    reached = _reached(context)
    context.meta[CHOSEN_WITH] = "--api"
    return Api(reached.outside.settings, reached.ways.transport)


def _reached(context: typer.Context) -> Reached:
    return cast("Reached", context.obj)
