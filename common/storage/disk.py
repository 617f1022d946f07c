"""A directory as object storage: for one machine, or a shared file system with POSIX locks."""

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

_UNFINISHED = ".unfinished"  # where files are written before they get their name
_LOCK = ".lock"
_LOCK_WAIT_S = 5.0  # it is held for one rename: longer means that its holder was frozen
_ABANDONED_S = 86_400.0  # a file unfinished for a day is what a killed process left behind


class DiskBlobs:
    """Named files under one directory; may be shared between threads and processes.

    Slashes in a name make folders, so no name can be a folder of another; no part of a name begins
    with a dot, which keeps every name inside the directory and away from our own files.
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
        """Write whole or not at all; a reader never sees a part."""
        with self._written(self._path(name), data) as (unfinished, path):
            unfinished.replace(path)

    def get(self, name: str) -> bytes | None:
        """Read whole, or None where there is no such name."""
        path = self._path(name)
        with _disk():
            try:
                return path.read_bytes()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return None

    def names(self, prefix: str) -> list[str]:
        """Return all names that begin so, sorted."""
        parts = prefix.split("/")[:-1]
        if any(part.startswith(".") for part in parts):
            return []  # as no name does: outside, or our own files
        folder = self._directory.joinpath(*parts)
        found = []
        with _disk():
            for root, folders, files in os.walk(folder, onerror=_unless_missing):
                folders[:] = [each for each in folders if not each.startswith(".")]
                place = Path(root).relative_to(self._directory)
                found += [(place / each).as_posix() for each in files if not each.startswith(".")]
        return sorted(name for name in found if name.startswith(prefix))

    def delete(self, name: str) -> None:
        """Delete; nothing happens where there is no such name."""
        path = self._path(name)
        with _disk(), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            # empty folders stay: removing them would race with a writer who just made them

    def get_tagged(self, name: str) -> tuple[bytes, str] | None:
        """Read together with a tag that changes whenever the content does."""
        data = self.get(name)
        return None if data is None else (data, _tag(data))

    def replace(self, name: str, data: bytes, tag: str | None) -> bool:
        """Write only if the content still has this tag (None: only if there is none yet)."""
        with self._written(self._path(name), data) as (unfinished, path), self._locked():
            current = self.get_tagged(name)
            if (None if current is None else current[1]) != tag:
                return False
            unfinished.replace(path)
            return True

    def _path(self, name: str) -> Path:
        parts = name.split("/")
        if not all(parts) or any(part.startswith(".") or "\0" in part for part in parts):
            raise UserError(f"{name!r} names no blob: empty parts and leading dots are not allowed")
        return self._directory.joinpath(*parts)

    @contextlib.contextmanager
    def _written(self, path: Path, data: bytes | memoryview) -> Iterator[tuple[Path, Path]]:
        """A finished file without its name yet, and the path that it may be moved to."""
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
        """Make the new name, and those of folders that were made for it, survive a power cut."""
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
        """Exclude other threads and processes from looking first and writing then."""
        with (self._directory / _LOCK).open("wb") as lock:  # its own descriptor, so its own lock
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
        raise UserError(f"a blob's name is the folder of another's: {error}") from error
    except OSError as error:
        raise UnavailableError(f"the disk did not do it: {error}", "storage") from error


def _unless_missing(error: OSError) -> None:
    """Raise what kept a folder from being listed, unless there is no such folder."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
