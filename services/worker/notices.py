"""Watches for the notice that this machine will be taken back, and then lets the worker leave."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from common.telemetry.outages import Outage

if TYPE_CHECKING:
    from common.notices.ec2 import Notice, PreemptionNotices
    from common.telemetry.logging import EventLogger

# Amazon asks for a look every 5 s of the 120 s that a notice gives, but gives them by best effort,
# and before a hibernation there are none. Every 2 s makes the most of a late notice, for about ten
# packets a second of the 1,024 that the machine may exchange with such services, name lookups
# included: dozens of workers on one machine are no trouble.
LOOK_S = 2.0


class NoticeWatch:
    """Looks from a thread of its own: a slow answer must not keep the worker from saying it lives.

    Args:
        leaving: Set when the worker shall leave; whoever else sets it ends the watch.
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
        """Look once, before any work is begun, and then again and again until the worker leaves."""
        self.look()
        thread = threading.Thread(target=self._watch, args=(every_s,), name="notices", daemon=True)
        thread.start()
        return thread

    def look(self) -> None:
        """Look once; what was told before is not told again."""
        try:
            notice = self._notices.look()
        # A notice is a courtesy: without one the worker just dies. Whatever goes wrong with one
        # look, the thread that looks must not end.
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
