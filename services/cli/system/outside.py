"""What the command that runs reaches: the outside itself, or a system in one of two ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from common.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx2
    import typer

    from common.config.servers import Outside
    from common.config.settings import Settings
    from services.cli.system.system import System


@dataclass(frozen=True, slots=True)
class Ways:
    """How to reach what settings name: `main` gives adapters, tests give fakes."""

    connect: Callable[[Settings], Outside]
    transport: httpx2.BaseTransport | None = None  # of the REST API; None: the network


@dataclass(frozen=True, slots=True)
class Reached:
    """The outside that the settings name; nothing is opened before it is wanted."""

    outside: Outside
    transport: httpx2.BaseTransport | None


def outside_of(context: typer.Context) -> Outside:
    """The outside of the command that runs.

    Raises:
        UserError: If the system is to be reached over its API, which does not offer this command.
    """
    outside = _reached(context).outside
    if outside.settings.api:
        raise UserError(
            f"`{context.command_path}` needs Kafka itself: leave out --api (or DOLL_API)"
        )
    return outside


def system_of(context: typer.Context) -> System:
    """The system that the command asks, by its servers or by its API."""
    outside, transport = _reached(context).outside, _reached(context).transport
    if outside.settings.api:
        from services.cli.system.api import Api  # noqa: PLC0415 -- httpx2: only where it is wanted

        return Api(outside.settings, transport)
    from services.cli.system.direct import Direct  # noqa: PLC0415 -- likewise

    return Direct(outside)


def _reached(context: typer.Context) -> Reached:
    return cast("Reached", context.obj)
