"""What the command that runs reaches: an admin service, or the servers themselves."""

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

CHOSEN_WITH = "doll.chosen_with"  # in the context's `meta`: the option that names the server


@dataclass(frozen=True, slots=True)
class Ways:
    """How to reach what settings name: `main` gives adapters, tests give fakes."""

    connect: Callable[[Settings], Outside]
    transport: httpx2.BaseTransport | None = None  # of the REST API; None: the network


@dataclass(frozen=True)
class Reached:
    """What settings name; they are read, and servers opened, when a command wants them.

    Args:
        given: Variables that options gave; they stand above those of the environment.
    """

    ways: Ways
    given: Mapping[str, str]

    @cached_property
    def outside(self) -> Outside:
        """The outside that the settings name.

        Raises:
            UserError: If a setting makes no sense.
        """
        from common.config.settings import read_settings

        files = {f"{name}_FILE": "" for name in self.given}  # of the environment: not both
        outside = self.ways.connect(read_settings({**os.environ, **files, **self.given}))
        return replace(outside, open_log=cache(partial(_found, outside.open_log)))


def _found(open_log: Callable[[], TransactionalLog]) -> TransactionalLog:
    """Open Kafka and ask it something: whoever retries for a minute has a broker to wait for.

    Raises:
        UnavailableError: If there is no Kafka.
    """
    from common.kafka.names import JOBS

    log = open_log()
    try:
        log.partitions(JOBS)
    except UnavailableError:
        raise
    except OutsideError:
        pass  # A broker answered; the command says itself which right or topic it lacks.
    return log


def outside_of(context: typer.Context) -> Outside:
    """The outside of the command that runs; DOLL_API in the environment is for other commands.

    Raises:
        UserError: If --api says to ask a service, which does not offer this command.
    """
    reached = _reached(context)
    if "DOLL_API" in reached.given:
        raise UserError(f"`{context.command_path}` needs Kafka itself: leave out --api")
    context.meta[CHOSEN_WITH] = "--kafka"
    return reached.outside


def settings_of(context: typer.Context) -> Settings:
    """The settings of a command, whatever it reaches."""
    return _reached(context).outside.settings


def service_of(context: typer.Context) -> Api:
    """The admin service that the command asks."""
    from services.cli.system.api import Api

    reached = _reached(context)
    context.meta[CHOSEN_WITH] = "--api"
    return Api(reached.outside.settings, reached.ways.transport)


def _reached(context: typer.Context) -> Reached:
    return cast("Reached", context.obj)
