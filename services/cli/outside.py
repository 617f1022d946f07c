"""The outside of the command that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import typer

    from common.outside import Outside


def outside_of(context: typer.Context) -> Outside:
    """The outside of the command that runs."""
    return cast("Outside", context.obj)
