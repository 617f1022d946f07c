"""What the product asks of object storage, as a protocol that one contract suite tests."""

from __future__ import annotations

from typing import Protocol


class Blobs(Protocol):
    """Named immutable bytes, and a few small names that move. May be shared between threads.

    Every call may raise `UnavailableError` when the store is unavailable.
    """

    @property
    def where(self) -> str:
        """Address of the store for people, without secrets."""

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write whole or not at all; a reader never sees a part."""

    def get(self, name: str) -> bytes | None:
        """Read whole, or None where there is no such name."""

    def names(self, prefix: str) -> list[str]:
        """Return all names that begin so, sorted.

        Raises:
            UnavailableError: If the answer is no complete list of this store's names.
        """

    def delete(self, name: str) -> None:
        """Delete; nothing happens where there is no such name."""

    def get_tagged(self, name: str) -> tuple[bytes, str] | None:
        """Read together with a tag that changes whenever the content does."""

    def replace(self, name: str, data: bytes, tag: str | None) -> bool:
        """Write only if the content still has this tag (None: only if there is none yet).

        False where somebody else was faster.
        """
