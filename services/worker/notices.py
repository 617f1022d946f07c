"""Watches for the notice that this machine will be taken back, and makes the worker leave."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from common.telemetry.outages import Outage

if TYPE_CHECKING:
    from common.notices.preemption import Notice, PreemptionNotices
    from common.telemetry.logging import EventLogger

# Amazon recommends polling every 5 s of the 120 s that a notice gives, but sends notices on a
# best-effort basis, and none before a hibernation. Polling every 2 s leaves more time after a late
# notice. It takes about ten packets a second of the 1,024 that a machine may exchange with such
# services (DNS included), so dozens of workers on one machine are no problem.
LOOK_S = 2.0


class NoticeWatch:
    """Polls in a separate thread, so that a slow answer does not delay heartbeats.

    Args:
        leaving: Set when the worker must leave. If anything else sets it, the watch ends.
    """

    def __init__(
        self, notices: PreemptionNotices, leaving: threading.Event, logger: EventLogger
    ) -> None:
        self._notices = notices
        self._leaving = leaving
        self._log = logger
        self._outage = Outage(logger, "notices")
        self._reported: Notice | None = None

    def start(self, every_s: float = LOOK_S) -> threading.Thread:
        """Poll once before any work begins, then repeatedly until the worker leaves."""
        self.look()
        thread = threading.Thread(target=self._watch, args=(every_s,), name="notices", daemon=True)
        thread.start()
        return thread

    def look(self) -> None:
        """Poll once, and report a new notice."""
        try:
            notice = self._notices.look()
        # Notices are optional: without one, the worker just dies. No failure of a poll may end the
        # thread.
        except Exception as error:  # noqa: BLE001 -- see above
            self._outage.met(error)
            return
        self._outage.over()
        if notice is None or notice == self._reported:
            return
        self._reported = notice
        self._log.warning(
            "notice_received",
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(notice.at_s)),
            detail=notice.detail,
        )
        self._leaving.set()

    def _watch(self, every_s: float) -> None:
        while not self._leaving.wait(every_s):
            self.look()
