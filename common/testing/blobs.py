"""Object storage in memory, and one that dies in the middle."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from common.errors import UnavailableError

if TYPE_CHECKING:
    from common.ports.servers import Blobs

T = TypeVar("T")


class MemoryBlobs:
    """Named bytes in a dictionary; open, so that a test can damage them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the dictionary
        self.content: dict[str, bytes] = {}

    def put(self, name: str, data: bytes | memoryview) -> None:
        with self._lock:
            self.content[name] = bytes(data)

    def get(self, name: str) -> bytes | None:
        with self._lock:
            return self.content.get(name)

    def names(self, prefix: str) -> list[str]:
        with self._lock:
            return sorted(name for name in self.content if name.startswith(prefix))

    def delete(self, name: str) -> None:
        with self._lock:
            self.content.pop(name, None)

    def get_tagged(self, name: str) -> tuple[bytes, str] | None:
        data = self.get(name)
        return None if data is None else (data, _tag(data))

    def replace(self, name: str, data: bytes, tag: str | None) -> bool:
        with self._lock:
            current = self.content.get(name)
            if (None if current is None else _tag(current)) != tag:
                return False
            self.content[name] = data
            return True


class DyingBlobs:
    """Passes calls on until one is too many: from then on the store is unavailable, until `revive`.

    Args:
        blobs: The store that lives on.
        calls: How many calls go well.
        last_lands: Whether the first call that fails was carried out, its answer lost.
    """

    def __init__(self, blobs: Blobs, calls: int, *, last_lands: bool = False) -> None:
        self._blobs = blobs
        self._left = calls
        self._lands = last_lands

    def revive(self, calls: int) -> None:
        """Come back, for so many calls."""
        self._left = calls

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write, or die."""
        self._passed(lambda: self._blobs.put(name, data))

    def get(self, name: str) -> bytes | None:
        """Read, or die."""
        return self._passed(lambda: self._blobs.get(name))

    def names(self, prefix: str) -> list[str]:
        """List, or die."""
        return self._passed(lambda: self._blobs.names(prefix))

    def delete(self, name: str) -> None:
        """Delete, or die."""
        self._passed(lambda: self._blobs.delete(name))

    def get_tagged(self, name: str) -> tuple[bytes, str] | None:
        """Read, or die."""
        return self._passed(lambda: self._blobs.get_tagged(name))

    def replace(self, name: str, data: bytes, tag: str | None) -> bool:
        """Write, or die."""
        return self._passed(lambda: self._blobs.replace(name, data, tag))

    def _passed(self, call: Callable[[], T]) -> T:
        self._left -= 1
        if self._left >= 0:
            return call()
        if self._lands and self._left == -1:
            call()
        raise UnavailableError("the store is unavailable")


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
