"""Runs `doll`: gives the commands real Kafka, Redis and storage."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from common import connections
from services.cli.app import app
from services.cli.outside import Outside

if TYPE_CHECKING:
    from common.config import Settings


def connect(settings: Settings) -> Outside:
    """Say how to open what the settings name."""
    return Outside(
        settings,
        open_log=partial(connections.open_log, settings),
        open_board=partial(connections.open_board, settings),
        open_blobs=partial(connections.open_blobs, settings),
    )


def main() -> None:
    """Run the command line of this process."""
    app(obj=connect)


if __name__ == "__main__":
    main()
