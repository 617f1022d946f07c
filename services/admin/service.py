"""What the routes of one admin process share: settings, the outside, what it follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from common.config import Settings
    from common.outside import Outside


class Service:
    """One admin process. Making it opens nothing; `close` lets go of what was opened."""

    def __init__(self, outside: Outside) -> None:
        self.outside = outside

    @property
    def settings(self) -> Settings:
        """Of this process."""
        return self.outside.settings

    def close(self) -> None:
        """Let go of everything that was opened."""


def service_of(request: HTTPConnection) -> Service:
    """The service that answers a request."""
    return cast("Service", request.app.state.service)
