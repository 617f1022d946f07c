"""Runs `doll`: gives the commands real Kafka, Redis and storage."""

from __future__ import annotations

from common.runtime.connect import connect
from services.cli.app import app
from services.cli.system.outside import Ways


def main() -> None:
    """Run the command line of this process."""
    app(obj=Ways(connect))


if __name__ == "__main__":
    main()
