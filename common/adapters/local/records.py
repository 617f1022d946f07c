"""What a fleet of local processes writes down, so that it survives whoever launched them.

Every record is a file that is made once, whole, and never changed: of two who write the same one,
the first counts. Names begin with the order's token:

    born            when the fleet began
    <token>.claim   the order is being carried out, by whoever wrote this
    <token>.refused it gave no machine
    <token>.leaving its machine was told to leave, and when it is made to
    <token>.gone    it has ended
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING, TypeAlias, TypeVar
from urllib.parse import quote, unquote

import msgspec

from common.errors import CorruptError, UnavailableError
from common.ports.machines import EndCause  # noqa: TC001 -- msgspec reads it when run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Claim(msgspec.Struct, frozen=True):
    """Whoever made this file launches the machine, and nobody else ever does."""

    launch: int
    slot: int
    pool: str
    worker: str
    at_s: float  # since 1970, as all times here


class Refusal(msgspec.Struct, frozen=True):
    """There is no machine, and there will be none."""

    capacity: bool
    reason: str


class Leaving(msgspec.Struct, frozen=True):
    """The machine was told to leave; the first reason counts."""

    cause: EndCause
    until_s: float  # then it is made to


class Gone(msgspec.Struct, frozen=True):
    """The machine has ended."""

    at_s: float
    cause: EndCause
    detail: str


Record: TypeAlias = Claim | Refusal | Leaving | Gone

_KINDS: dict[str, type[Record]] = {
    "claim": Claim,
    "refused": Refusal,
    "leaving": Leaving,
    "gone": Gone,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_BORN = "born"

T = TypeVar("T")


class Story:
    """All that is written of one order."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.refusal: Refusal | None = None
        self.leaving: Leaving | None = None
        self.gone: Gone | None = None

    @property
    def over(self) -> bool:
        """Whether there is no machine any more, or never was."""
        return self.refusal is not None or self.gone is not None

    def add(self, record: Record) -> None:
        """Take in what else is written."""
        if isinstance(record, Refusal):
            self.refusal = record
        elif isinstance(record, Leaving):
            self.leaving = record
        elif isinstance(record, Gone):
            self.gone = record


class Records:
    """The records of one job, in a folder of their own; for one thread at a time.

    Args:
        folder: Made if need be.

    Raises:
        UnavailableError: If it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Record] = {}  # by file: none ever changes
        with self._files():
            folder.mkdir(parents=True, exist_ok=True)

    def born_s(self, now_s: float) -> float:
        """When the fleet began: now, where nobody has said so before.

        Raises:
            UnavailableError: If the folder cannot be used.
            CorruptError: If somebody else wrote into it.
        """
        self._write(_BORN, msgspec.json.encode(now_s))
        with self._files():
            return _decoded(self._folder / _BORN, float)

    def add(self, token: str, record: Record) -> bool:
        """Write a record of an order; False where there is one of its kind already.

        Raises:
            UnavailableError: If the folder cannot be used.
        """
        name = f"{quote(token, safe='')}.{_NAMES[type(record)]}"
        return self._write(name, msgspec.json.encode(record))

    def read(self) -> dict[str, Story]:
        """All stories, by token.

        Raises:
            UnavailableError: If the folder cannot be used.
            CorruptError: If somebody else wrote into it.
        """
        with self._files():
            there = {path.name for path in self._folder.iterdir()}
            for name in there - self._known.keys():
                kind = _KINDS.get(name.rpartition(".")[2])
                if kind is not None:
                    self._known[name] = _decoded(self._folder / name, kind)
        self._known = {name: self._known[name] for name in self._known.keys() & there}
        stories = {
            unquote(name.rpartition(".")[0]): Story(record)
            for name, record in self._known.items()
            if isinstance(record, Claim)
        }
        for name, record in self._known.items():
            story = stories.get(unquote(name.rpartition(".")[0]))
            if story is not None:
                story.add(record)
        return stories

    def _write(self, name: str, data: bytes) -> bool:
        with self._files(), tempfile.NamedTemporaryFile(dir=self._folder) as whole:
            whole.write(data)
            whole.flush()
            try:
                os.link(whole.name, self._folder / name)
            except FileExistsError:
                return False
        return True

    @contextlib.contextmanager
    def _files(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnavailableError(f"the fleet's folder {self._folder}: {error}") from error


def _decoded(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise CorruptError(f"{path} is no record of a fleet: {error}; move it away") from error
