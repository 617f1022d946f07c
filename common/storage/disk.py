"""Object storage in a directory, on one machine or a shared file system with POSIX locks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UnavailableError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Folder of files that are being written.
_UNFINISHED = ".unfinished"
_LOCK = ".lock"
# Time to wait for the lock. It is held for one rename, so a longer wait means a frozen holder.
_LOCK_WAIT_S = 5.0
# An unfinished file of this age was left behind by a killed process.
_ABANDONED_S = 86_400.0


class DiskBlobs:
    """Files below one directory. Threads and processes may share it.

    Slashes in a name make folders, so no name can be the folder of another. No part of a name
    begins with a dot, so every name stays inside the directory and differs from our own files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._unfinished = self._directory / _UNFINISHED
        with _disk():
            self._unfinished.mkdir(parents=True, exist_ok=True)
            self._sweep()

    @property
    def where(self) -> str:
        """Address of the directory."""
        return self._directory.as_uri()

    def put(self, name: str, data: bytes | memoryview) -> None:
        """See `Blobs`."""
        with self._written(self._path(name), data) as (unfinished, path):
            unfinished.replace(path)

    def get(self, name: str) -> bytes | None:
        """See `Blobs`."""
        path = self._path(name)
        with _disk():
            try:
                return path.read_bytes()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return None

    def names(self, prefix: str) -> list[str]:
        """See `Blobs`."""
        parts = prefix.split("/")[:-1]
        # No name has such a part; it would lead outside, or to our own files.
        if any(part.startswith(".") for part in parts):
            return []
        folder = self._directory.joinpath(*parts)
        found = []
        with _disk():
            for root, folders, files in os.walk(folder, onerror=_unless_missing):
                folders[:] = [each for each in folders if not each.startswith(".")]
                place = Path(root).relative_to(self._directory)
                found += [(place / each).as_posix() for each in files if not each.startswith(".")]
        return sorted(name for name in found if name.startswith(prefix))

    def delete(self, name: str) -> None:
        """See `Blobs`."""
        path = self._path(name)
        with _disk(), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            # Empty folders stay. To remove one would race with a writer that has just made it.

    def get_tagged(self, name: str) -> tuple[bytes, str] | None:
        """See `Blobs`."""
        data = self.get(name)
        return None if data is None else (data, _tag(data))

    def replace(self, name: str, data: bytes, tag: str | None) -> bool:
        """See `Blobs`."""
        with self._written(self._path(name), data) as (unfinished, path), self._locked():
            current = self.get_tagged(name)
            if (None if current is None else current[1]) != tag:
                return False
            unfinished.replace(path)
            return True

    def _path(self, name: str) -> Path:
        parts = name.split("/")
        if not all(parts) or any(part.startswith(".") or "\0" in part for part in parts):
            raise UserError(
                f"{name!r} is not a valid blob name: it must not have empty parts or leading dots"
            )
        return self._directory.joinpath(*parts)

    @contextlib.contextmanager
    def _written(self, path: Path, data: bytes | memoryview) -> Iterator[tuple[Path, Path]]:
        """Write a file, and yield its temporary path and the path to rename it to."""
        with _disk():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._unfinished)
            unfinished = Path(name)
            try:
                with open(handle, "wb") as file:  # noqa: PTH123 -- a descriptor, not a path
                    file.write(data)
                    file.flush()
                    os.fsync(handle)
                yield unfinished, path
                self._sync_folders(path)
            finally:
                unfinished.unlink(missing_ok=True)

    def _sync_folders(self, path: Path) -> None:
        """Make the new name and the names of new folders survive a power cut."""
        for folder in path.parents:
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            if folder == self._directory:
                return

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other threads and processes from comparing a tag and writing."""
        # Each call has its own descriptor and so its own lock.
        with (self._directory / _LOCK).open("wb") as lock:
            deadline = time.monotonic() + _LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        locked = f"{lock.name} is locked by another process"
                        raise UnavailableError(locked, "storage") from error
                    time.sleep(0.002)
                else:
                    break
            yield

    def _sweep(self) -> None:
        for path in self._unfinished.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()


@contextlib.contextmanager
def _disk() -> Iterator[None]:
    try:
        yield
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise UserError(f"a blob has the name of another blob's folder: {error}") from error
    except OSError as error:
        raise UnavailableError(f"the disk operation failed: {error}", "storage") from error


def _unless_missing(error: OSError) -> None:
    """Raise the error of listing a folder, unless there is no such folder."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
