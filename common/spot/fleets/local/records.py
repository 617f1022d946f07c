"""What a fleet of local processes writes down, so that it survives whoever launched them.

Each order has a file that only one can make: whoever does launches the machine, and nobody else
ever. What becomes of it is written by the provisioner in charge, the file replaced as a whole.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, unquote

import msgspec

from common.errors import CorruptError, UnavailableError, decoded
from common.spot.machines import EndCause  # noqa: TC001 -- msgspec reads it when run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BORN, _ORDER = "born", ".order"

T = TypeVar("T")


class OrderRecord(msgspec.Struct, frozen=True):
    """One order; times are in seconds since 1970."""

    launch: int
    slot: int | None
    pool: str
    worker: str
    at_s: float  # when it was given
    refused: str = ""  # why it gave no machine, and never will
    capacity: bool = True  # whether that was for want of machines
    leaving: EndCause | None = None  # the machine was told to leave; the first reason counts
    leave_by_s: float = 0.0  # then it is made to
    ended_s: float | None = None
    cause: EndCause | None = None  # of the end
    detail: str = ""
    usd_per_hour: float | None = None  # when it was given; None: nobody said
    bid_usd_per_hour: float | None = None  # above which it is taken away; None: as its pool says
    lane: int | None = None  # of a machine without a slot, whose times of its pool it follows

    @property
    def schedule_slot(self) -> int:
        """The slot in whose times of its pool it is taken away."""
        return self.lane or 0 if self.slot is None else self.slot

    @property
    def over(self) -> bool:
        """Whether there is no machine any more, or never was."""
        return bool(self.refused) or self.ended_s is not None


_RECORD, _SECONDS = msgspec.json.Decoder(OrderRecord), msgspec.json.Decoder(float)


class OrderRecords:
    """The records of one job, in a folder of their own; for one thread at a time.

    Args:
        folder: Made if need be.

    Raises:
        UnavailableError: If it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._over: dict[str, OrderRecord] = {}  # by file: these never change
        with self._files():
            folder.mkdir(parents=True, exist_ok=True)

    def born_s(self, now_s: float) -> float:
        """When the fleet began: now, where nobody has said so before.

        Raises:
            UnavailableError: If the folder cannot be used.
            CorruptError: If somebody else wrote into it.
        """
        with self._whole(now_s) as written, contextlib.suppress(FileExistsError):
            os.link(written, self._folder / _BORN)
        with self._files():
            return _decoded(self._folder / _BORN, _SECONDS)

    def claim(self, token: str, record: OrderRecord) -> bool:
        """Begin an order's record; False where somebody has.

        Raises:
            UnavailableError: If the folder cannot be used.
        """
        with self._whole(record) as written:
            try:
                os.link(written, self._path(token))
            except FileExistsError:
                return False
        return True

    def change(self, token: str, record: OrderRecord) -> None:
        """Write down what became of an order.

        Raises:
            UnavailableError: If the folder cannot be used.
        """
        with self._whole(record) as written:
            os.link(written, self._folder / f"{written}.new")
            (self._folder / f"{written}.new").replace(self._path(token))

    def read(self) -> dict[str, OrderRecord]:
        """All records, by token.

        Raises:
            UnavailableError: If the folder cannot be used.
            CorruptError: If somebody else wrote into it.
        """
        records = {}
        with self._files():
            for path in self._folder.iterdir():
                if path.name.endswith(_ORDER):
                    record = self._over.get(path.name) or _decoded(path, _RECORD)
                    records[unquote(path.name.removesuffix(_ORDER))] = record
                    if record.over:
                        self._over[path.name] = record
        return records

    def _path(self, token: str) -> Path:
        return self._folder / f"{quote(token, safe='')}{_ORDER}"

    @contextlib.contextmanager
    def _whole(self, value: OrderRecord | float) -> Iterator[str]:
        """A file that holds this, to be linked to where nobody must read a part."""
        with self._files(), tempfile.NamedTemporaryFile(dir=self._folder) as file:
            file.write(msgspec.json.encode(value))
            file.flush()
            yield file.name

    @contextlib.contextmanager
    def _files(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnavailableError(f"the fleet's folder {self._folder}: {error}") from error


def _decoded(path: Path, decoder: msgspec.json.Decoder[T]) -> T:
    what = f"{path} is no record of a fleet; move it away"
    return decoded(decoder.decode, path.read_bytes(), what, CorruptError)
