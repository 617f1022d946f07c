"""What did not parse: logged once for each kind, however often it comes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from common.errors import WireError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Rejections:
    """Stands at a door through which messages come in; may be shared between threads."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def parse(self, kind: str, decode: Callable[[bytes], T], data: bytes) -> T | None:
        """Decode a message, or reject it and return None."""
        try:
            return decode(data)
        except WireError as error:
            self.reject(kind, str(error))
            return None

    def reject(self, kind: str, reason: str) -> None:
        """Log a message if it is the first of its kind."""
        if kind not in self._known:
            self._known.add(kind)
            logger.warning("rejected kind=%s reason=%s", kind, reason)
