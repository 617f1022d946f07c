"""What the product asks of object storage, as a protocol that one contract suite tests.

An adapter is imported when it is opened: a client library takes part of a second to load.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit

from common.errors import UserError

if TYPE_CHECKING:
    from common.config.settings import Settings


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


def open_blobs(settings: Settings) -> Blobs:
    """Open object storage.

    Raises:
        UserError: If the settings name none.
        UnavailableError: If it is a directory that cannot be used.
    """
    url = urlsplit(settings.blobs)
    if url.scheme == "file":
        from common.storage.disk import DiskBlobs  # noqa: PLC0415 -- see above

        return DiskBlobs(Path(unquote(url.path)))
    if url.scheme == "s3":
        from common.storage.s3 import S3Blobs  # noqa: PLC0415 -- see above

        prefix = unquote(url.path).strip("/")
        return S3Blobs(url.netloc, f"{prefix}/" if prefix else "")
    raise UserError(
        "no object storage is named: set DOLL_BLOBS to file:///directory or s3://bucket/prefix"
    )
