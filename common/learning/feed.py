"""Move the records of passes to the device, each while the one before it is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from common.data.fields import concatenate

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

# Columns of a batch.
Records: TypeAlias = "Mapping[str, npt.NDArray[Any]]"
# Batches whose records are computed together.
Pass: TypeAlias = Sequence[Records]


class RecordFeed(Protocol):
    """Brings records to a device."""

    def __call__(self, passes: Iterable[Pass]) -> Iterator[dict[str, Tensor]]:
        """Yield the columns of each pass on the device."""


def feed_of(device: torch.device) -> RecordFeed:
    """Return the way to bring records to a device."""
    return GpuFeed(device) if device.type == "cuda" else host_feed


def host_feed(passes: Iterable[Pass]) -> Iterator[dict[str, Tensor]]:
    """Yield the columns of each pass in main memory, without a copy if it has one batch."""
    for batches in passes:
        records = concatenate(batches) if len(batches) > 1 else batches[0]
        yield {name: torch.from_numpy(column) for name, column in records.items()}


class _Copied(NamedTuple):
    """Columns of a pass whose copy to the GPU has begun."""

    columns: dict[str, Tensor]
    done: torch.cuda.Event


class GpuFeed:
    """Copies records to a GPU on a stream of its own.

    The copy of a pass begins before the pass in front of it is computed. Copies from pinned memory
    (see `pinned`) and computation then run at the same time. At most three passes are in the GPU's
    memory: one that is computed, and two that wait.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's

    def __call__(self, passes: Iterable[Pass]) -> Iterator[dict[str, Tensor]]:
        """Yield the columns of each pass; the current stream computes with them."""
        ahead = None
        for batches in passes:
            following = self._begin(batches)
            if ahead is not None:
                yield self._usable(ahead)
            ahead = following
        if ahead is not None:
            yield self._usable(ahead)

    def _begin(self, batches: Pass) -> _Copied:
        columns = dict[str, "Tensor"]()
        with torch.cuda.stream(self._copies):
            for name in batches[0]:
                parts = [torch.from_numpy(batch[name]) for batch in batches]
                count = sum(map(len, parts))
                column = parts[0].new_empty((count, *parts[0].shape[1:]), device=self._device)
                start = 0
                for part in parts:
                    column[start : start + len(part)].copy_(part, non_blocking=True)
                    start += len(part)
                columns[name] = column
            done = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's
            done.record(self._copies)
        return _Copied(columns, done)

    def _usable(self, copied: _Copied) -> dict[str, Tensor]:
        """Make the current stream wait for the copy, and return the columns."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied.done)
        for column in copied.columns.values():
            # The memory belongs to the stream of the copies, which must not reuse it too early.
            column.record_stream(stream)
        return copied.columns


def pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array in pinned memory, which a GPU reads without help of the processor.

    Torch keeps freed memory of this kind and gives it to the next array of a similar size.
    """
    like = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty(shape, dtype=like, pin_memory=True).numpy()
