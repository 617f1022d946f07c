"""What the commands reach of the outside: settings and, when first needed, the three ports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

    from common.config import Settings
    from common.ports import Blobs, Board, Log


@dataclass(frozen=True, slots=True)
class Outside:
    """Settings and how to open what they name; a command opens only what it needs."""

    settings: Settings
    open_log: Callable[[], Log]
    open_board: Callable[[str], Board]  # by job
    open_blobs: Callable[[], Blobs]


def outside_of(context: typer.Context) -> Outside:
    """The outside of the command that runs."""
    return cast("Outside", context.obj)
