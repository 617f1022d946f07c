"""Start one process of a join: `doll join --help` says how."""

from __future__ import annotations

import gc

if __name__ == "__main__":  # before it imports the rest: see `keep_imports`
    gc.disable()

import argparse
import sys
import time
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from common.errors import UnavailableError
from common.joining.records import JoinSpec, Records
from common.runtime.connect import open_log
from common.runtime.service import run
from common.telemetry.metrics.joiner import JoinerMetrics
from common.telemetry.outages import Outage
from services.joiner.loop import Joiner, prepare
from services.joiner.partition import Shared

if TYPE_CHECKING:
    from common.runtime.service import ServiceProcess

_WAIT_S = 0.05  # for what the group says, where nothing came
_RETRY_S = 0.5
_SPEC = msgspec.json.Decoder(JoinSpec)


def main() -> int:
    """Run until told to end; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.joiner",
        description="What `doll join` becomes.",
        epilog="example: doll join --help",
    )
    parser.add_argument("spec", help="the join, as JSON")
    parser.add_argument("name", help="of this process")
    arguments = parser.parse_args()
    spec = _SPEC.decode(arguments.spec)
    return run("joiner", arguments.name, partial(_join, spec))


def _join(spec: JoinSpec, process: ServiceProcess) -> None:
    metrics = JoinerMetrics(spec.to)
    process.serve_metrics(metrics.meters)
    watchdog = process.watchdogs.begin("the loop of the join")
    outage = Outage(process.logger, "kafka")
    with ExitStack() as stack:
        log = stack.enter_context(closing(open_log(process.settings, process.name)))
        joiner: Joiner | None = None
        shared = Shared(log, spec, Records(spec, time.time), process.logger)
        worked = False
        while not process.stopping.is_set():
            watchdog.beat()
            if joiner is not None:
                worked = joiner.turn(0.0 if worked else _WAIT_S)
                continue
            try:
                partitions = prepare(log, spec)
            except UnavailableError as error:
                outage.met(error)
                process.stopping.wait(_RETRY_S)
                continue
            outage.over()
            process.logger.info("service_started", to=spec.to, partitions=partitions)
            joiner = stack.enter_context(closing(Joiner(shared, metrics, process.name)))


if __name__ == "__main__":
    sys.exit(main())
