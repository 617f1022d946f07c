"""Opens where the spans of a process go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import UserError
from common.telemetry.logging import event_logger
from common.telemetry.tracing import NoTracer

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.telemetry.tracing import Tracer

# Of all batches, the same ones in all processes. A trace is some 2 KB: at 100 batches a second, one
# in a hundred is 2 KB/s.
TRACED_SHARE = 0.01


def open_tracer(settings: Settings, service: str, name: str) -> Tracer:
    """Open where spans are told; the collector is not asked before there are some.

    Raises:
        UserError: If a collector is named and what speaks to it is not installed.
    """
    if not settings.traces:
        return NoTracer()
    try:
        from common.telemetry.otlp import OtlpTracer  # noqa: PLC0415 -- optional
    except ModuleNotFoundError as error:
        raise UserError(
            "DOLL_TRACES: OpenTelemetry is not installed here: pip install 'doll[tracing]', or"
            " leave DOLL_TRACES empty"
        ) from error
    logger = event_logger(service)

    def changed(reason: str) -> None:
        if reason:
            logger.warning("traces_lost", reason=reason)
        else:
            logger.info("traces_sent_again")

    return OtlpTracer(settings.traces, TRACED_SHARE, service, name, changed)
