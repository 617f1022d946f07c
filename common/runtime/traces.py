"""Opens the tracer of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import UserError
from common.telemetry.logging import event_logger
from common.telemetry.tracing import NoTracer

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.telemetry.tracing import Tracer

# Share of batches that are traced, the same ones in all processes. A trace has about 2 KB, so 100
# batches a second make 2 KB/s.
TRACED_SHARE = 0.01


def open_tracer(settings: Settings, service: str, name: str) -> Tracer:
    """Open the tracer that the settings name. It connects to the collector with the first spans.

    Raises:
        UserError: If the settings name a collector and OpenTelemetry is not installed.
    """
    if not settings.traces:
        return NoTracer()
    try:
        from common.telemetry.otlp import OtlpTracer  # noqa: PLC0415 -- optional
    except ModuleNotFoundError as error:
        raise UserError(
            "DOLL_TRACES: OpenTelemetry is not installed; run pip install 'doll[tracing]', or"
            " leave DOLL_TRACES empty"
        ) from error
    logger = event_logger(service)

    def changed(reason: str) -> None:
        if reason:
            logger.warning("traces_lost", reason=reason)
        else:
            logger.info("traces_sent_again")

    return OtlpTracer(settings.traces, TRACED_SHARE, service, name, changed)
