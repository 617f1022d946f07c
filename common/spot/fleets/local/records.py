"""Records of a fleet of local processes, which survive the process that launched them.

Each order has a file that only one process can create: that process launches the machine, and no
other ever does. The provisioner in charge writes later changes by replacing the file as a whole.
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
    at_s: float  # time of the order
    # Reason why it gave no machine, and never will.
    refused: str = ""
    # True if the reason is lack of capacity.
    capacity: bool = True
    # Set with the signal to leave. The first reason counts.
    leaving: EndCause | None = None
    # Time at which the machine is killed.
    leave_by_s: float = 0.0
    ended_s: float | None = None
    cause: EndCause | None = None  # cause of the end
    detail: str = ""
    # Price at the order; None if unknown.
    usd_per_hour: float | None = None
    # Price above which it is taken away; None for the pool's bid.
    bid_usd_per_hour: float | None = None
    # Slot whose preemptions a spot machine without a slot follows; None for other machines.
    lane: int | None = None

    @property
    def schedule_slot(self) -> int:
        """Slot of the pool's schedule that decides when it is taken away."""
        return self.lane or 0 if self.slot is None else self.slot

    @property
    def over(self) -> bool:
        """True if there is no machine any more, or never was."""
        return bool(self.refused) or self.ended_s is not None


_RECORD, _SECONDS = msgspec.json.Decoder(OrderRecord), msgspec.json.Decoder(float)


class OrderRecords:
    """Records of one job in its own folder; for one thread at a time.

    Args:
        folder: Created if missing.

    Raises:
        UnavailableError: If it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Finished records by file. They never change.
        self._over: dict[str, OrderRecord] = {}
        with self._files():
            folder.mkdir(parents=True, exist_ok=True)

    def born_s(self, now_s: float) -> float:
        """Return the beginning of the fleet; set it to now if it is unset.

        Raises:
            UnavailableError: If the folder cannot be used.
            CorruptError: If another program wrote into it.
        """
        with self._whole(now_s) as written, contextlib.suppress(FileExistsError):
            os.link(written, self._folder / _BORN)
        with self._files():
            return _decoded(self._folder / _BORN, _SECONDS)

    def claim(self, token: str, record: OrderRecord) -> bool:
        """Create an order's record; return False if it exists.

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
        """Replace the record of an order.

        Raises:
            UnavailableError: If the folder cannot be used.
        """
        with self._whole(record) as written:
            os.link(written, self._folder / f"{written}.new")
            (self._folder / f"{written}.new").replace(self._path(token))

    def read(self) -> dict[str, OrderRecord]:
        """Return all records, by token.

        Raises:
            UnavailableError: If the folder cannot be used.
            CorruptError: If another program wrote into it.
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
        """Yield a complete file with this value, to be linked to its name."""
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
    what = f"{path}: is not a record of a machine; remove it"
    return decoded(decoder.decode, path.read_bytes(), what, CorruptError)
