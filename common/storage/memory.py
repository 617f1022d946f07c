"""Object storage in memory."""

from __future__ import annotations

import hashlib
import threading


class MemoryBlobs:
    """Blobs in a dictionary, which is public so that a test can damage them."""

    def __init__(self) -> None:
        # Guards the dictionary.
        self._lock = threading.Lock()
        self.content: dict[str, bytes] = {}

    @property
    def where(self) -> str:
        return "memory"

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


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
