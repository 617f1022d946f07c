"""Port of object storage. One contract suite tests all adapters.

An adapter is imported when it is opened, since a client library takes part of a second to load.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit

from common.errors import UserError

if TYPE_CHECKING:
    from common.config.settings import Settings


class Blobs(Protocol):
    """Named bytes. May be shared between threads.

    Most blobs never change; a few small ones are changed by `replace`. Every call may raise
    `UnavailableError`.
    """

    @property
    def where(self) -> str:
        """Address of the store for people, without secrets."""

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write a blob atomically: a reader never sees a part of it."""

    def get(self, name: str) -> bytes | None:
        """Return a blob, or None if there is no such name."""

    def names(self, prefix: str) -> list[str]:
        """Return all names with a prefix, sorted.

        Raises:
            UnavailableError: If the answer is not a complete list of this store's names.
        """

    def delete(self, name: str) -> None:
        """Delete a blob; do nothing if there is no such name."""

    def get_tagged(self, name: str) -> tuple[bytes, str] | None:
        """Return a blob with a tag that changes whenever the content does; None if missing."""

    def replace(self, name: str, data: bytes, tag: str | None) -> bool:
        """Write a blob if it still has this tag, or if the tag is None and there is no blob yet.

        Returns:
            False if another process was faster.
        """


def open_blobs(settings: Settings) -> Blobs:
    """Open object storage.

    Raises:
        UserError: If the settings name no object storage.
        UnavailableError: If the settings name a directory that cannot be used.
    """
    url = urlsplit(settings.blobs)
    if url.scheme == "file":
        from common.storage.disk import DiskBlobs  # noqa: PLC0415 -- imported on first use

        return DiskBlobs(Path(unquote(url.path)))
    if url.scheme == "s3":
        from common.storage.s3 import S3Blobs  # noqa: PLC0415 -- imported on first use

        prefix = unquote(url.path).strip("/")
        return S3Blobs(url.netloc, f"{prefix}/" if prefix else "")
    raise UserError(
        "no object storage is configured: set DOLL_BLOBS to file:///directory or s3://bucket/prefix"
    )
