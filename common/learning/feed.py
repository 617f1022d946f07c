"""Move the records of passes to the device: to a GPU while it computes earlier passes."""

from __future__ import annotations

from collections import deque
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
    """Yield the columns of each pass in main memory. A pass of one batch is not copied."""
    for batches in passes:
        records = concatenate(batches) if len(batches) > 1 else batches[0]
        yield {name: torch.from_numpy(column) for name, column in records.items()}


class _Copied(NamedTuple):
    """Columns of a pass whose copy to the GPU has begun."""

    columns: dict[str, Tensor]
    done: torch.cuda.Event


class GpuFeed:
    """Copies records to a GPU on a stream of its own.

    The copy of each pass is queued before the computation of the previous pass. If the records are
    in pinned memory (see `pinned`), both run at the same time. At most three passes are in the
    GPU's memory: one that is computed, and two that wait. The caller keeps the records unchanged
    until the last pass is computed.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's

    def __call__(self, passes: Iterable[Pass]) -> Iterator[dict[str, Tensor]]:
        """Yield the columns of each pass for computation on torch's current stream."""
        ahead, computed = None, deque[torch.cuda.Event]()
        for batches in passes:
            # The processor may queue work much earlier than the GPU does it.
            if len(computed) > 1:
                computed.popleft().synchronize()
            following = self._begin(batches)
            if ahead is not None:
                yield self._usable(ahead)
                computed.append(_marked(torch.cuda.current_stream(self._device)))
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
        return _Copied(columns, _marked(self._copies))

    def _usable(self, copied: _Copied) -> dict[str, Tensor]:
        """Make the current stream wait for the copy, and return the columns."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied.done)
        for column in copied.columns.values():
            # The memory belongs to the stream of the copies, which must not reuse it too early.
            column.record_stream(stream)
        return copied.columns


def _marked(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event that happens once all work queued on a stream is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's
    event.record(stream)
    return event


def pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array in pinned memory, which a GPU reads without help of the processor.

    Once an array is freed and its copies are done, torch reuses its memory for the next array of a
    similar size.
    """
    like = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty(shape, dtype=like, pin_memory=True).numpy()
