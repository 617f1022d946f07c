"""What did not parse: counted, and heard of once for each kind, however often it comes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from common.errors import WireError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Rejections:
    """Stands at a door through which messages come in; may be shared between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both below
        self._count = 0
        self._known: set[str] = set()

    @property
    def count(self) -> int:
        """Messages rejected so far."""
        return self._count

    def parse(self, kind: str, decode: Callable[[bytes], T], data: bytes) -> T | None:
        """Decode a message, or reject it and return None."""
        try:
            return decode(data)
        except WireError as error:
            self.reject(kind, str(error))
            return None

    def reject(self, kind: str, reason: str) -> None:
        """Count one message; the log hears of the first of its kind."""
        with self._lock:
            self._count += 1
            known = kind in self._known
            self._known.add(kind)
        if not known:
            logger.warning("rejected kind=%s reason=%s", kind, reason)
