"""Run `doll`, whose commands connect to real Kafka, Redis and storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.cli.app import app
from services.cli.system.outside import Ways

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.jobs.servers import Outside


def main() -> None:
    """Run the command line of this process."""
    app(obj=Ways(_connect))


def _connect(settings: Settings) -> Outside:
    from common.runtime.connect import connect

    return connect(settings)


if __name__ == "__main__":
    main()
