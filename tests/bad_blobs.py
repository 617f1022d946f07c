"""Object storage that fails in the middle of calls, and object storage that answers wrongly."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeVar

from common.errors import UnavailableError
from common.storage.memory import MemoryBlobs
from load.harness.s3_servers import PAGE, Lie

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.storage.port import Blobs

T = TypeVar("T")


class DyingBlobs:
    """Carries out a number of calls, then raises UnavailableError until `revive`.

    Args:
        blobs: The real store.
        calls: Number of calls that succeed.
        last_lands: True if the first failing call is carried out, and only its answer is lost.
    """

    def __init__(self, blobs: Blobs, calls: int, *, last_lands: bool = False) -> None:
        self._blobs = blobs
        self._left = calls
        self._lands = last_lands

    @property
    def where(self) -> str:
        """Return the address of the real store."""
        return self._blobs.where

    def revive(self, calls: int) -> None:
        """Answer this number of calls again."""
        self._left = calls

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write, or fail."""
        self._passed(lambda: self._blobs.put(name, data))

    def get(self, name: str) -> bytes | None:
        """Read, or fail."""
        return self._passed(lambda: self._blobs.get(name))

    def names(self, prefix: str) -> list[str]:
        """List, or fail."""
        return self._passed(lambda: self._blobs.names(prefix))

    def delete(self, name: str) -> None:
        """Delete, or fail."""
        self._passed(lambda: self._blobs.delete(name))

    def get_tagged(self, name: str) -> tuple[bytes, str] | None:
        """Read, or fail."""
        return self._passed(lambda: self._blobs.get_tagged(name))

    def replace(self, name: str, data: bytes, tag: str | None) -> bool:
        """Write, or fail."""
        return self._passed(lambda: self._blobs.replace(name, data, tag))

    def _passed(self, call: Callable[[], T]) -> T:
        self._left -= 1
        if self._left >= 0:
            return call()
        if self._lands and self._left == -1:
            call()
        raise UnavailableError("the store is unavailable")


class LyingBlobs(MemoryBlobs):
    """Answers wrongly in one of eight ways while `lie` is set. It keeps all writes."""

    def __init__(self) -> None:
        super().__init__()
        self._lie: Lie | None = None
        self._before: dict[str, bytes] = {}
        self.deleted = list[str]()

    @property
    def lie(self) -> Lie | None:
        """Return how the storage answers wrongly. None if it answers correctly."""
        return self._lie

    @lie.setter
    def lie(self, lie: Lie | None) -> None:
        self._lie, self._before = lie, dict(self.content)

    def get(self, name: str) -> bytes | None:
        """Read, or answer wrongly."""
        data = super().get(name)
        match self._lie:
            case "page":
                return PAGE
            case "latest" if name.endswith("/latest"):
                return PAGE
            case "stale":
                return self._before.get(name)
            case "half" if _is_odd(name):
                return None
            case "late" if self._before.get(name) != data:
                return None
        return data

    def names(self, prefix: str) -> list[str]:
        """List, or answer wrongly."""
        names = super().names(prefix)
        match self._lie:
            case "empty":
                return []
            case "other":
                return [f"{prefix}of-another/{number}" for number in range(3)]
            case "cut":
                return names[: len(names) // 2]
            case "page":
                raise UnavailableError("the answer is not a list")
            case "half":
                return [name for name in names if not _is_odd(name)]
            case "stale" | "late":
                return [name for name in names if self._before.get(name) == self.content[name]]
        return names

    def delete(self, name: str) -> None:
        """Delete, and record the name."""
        self.deleted.append(name)
        super().delete(name)


def _is_odd(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 1
