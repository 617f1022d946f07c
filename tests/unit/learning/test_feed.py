"""Order in which passes are copied and computed, on the CPU and on an imitated GPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from common.learning.feed import GpuFeed, feed_of, host_feed, pinned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.learning.feed import Pass

CPU = torch.device("cpu")
PASSES: list[Pass] = [
    [{"x": np.array([[1.0], [2.0]], np.float32)}],
    [{"x": np.array([[3.0]], np.float32)}, {"x": np.array([[4.0], [5.0]], np.float32)}],
    [{"x": np.array([[6.0]], np.float32)}],
]
KEEP = "keep the memory for the computation"
VALUES = [[[1.0], [2.0]], [[3.0], [4.0], [5.0]], [[6.0]]]


class ImitatedStreams:
    """Imitates streams and events of a GPU, and records the order of its work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order = list[str]()
        self.events = 0
        streams = self

        class Event:
            name: str

            def record(self, stream: object) -> None:
                if stream is streams.compute:
                    self.name = streams.order[-1]
                    return
                self.name = f"copy {streams.events}"
                streams.events += 1
                streams.order.append(self.name)

            def synchronize(self) -> None:
                streams.order.append(f"the processor waits for {self.name}")

        class Compute:
            def wait_event(self, event: Event) -> None:
                streams.order.append(f"wait for {event.name}")

        @contextmanager
        def stream(given: object) -> Iterator[None]:
            assert given is streams.copies
            yield

        self.copies, self.compute = object(), Compute()
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: self.copies)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.compute)

        def keep(_: torch.Tensor, stream: object) -> None:
            assert stream is streams.compute
            streams.order.append(KEEP)

        monkeypatch.setattr(torch.Tensor, "record_stream", keep)


def test_each_pass_is_copied_before_the_one_in_front_of_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = ImitatedStreams(monkeypatch)
    found = []
    for number, columns in enumerate(GpuFeed(CPU)([*PASSES, PASSES[0]])):
        streams.order.append(f"compute {number}")
        found.append(columns["x"].tolist())
    assert found == [*VALUES, VALUES[0]]
    assert streams.order == [
        *("copy 0", "copy 1", "wait for copy 0", KEEP, "compute 0"),
        *("copy 2", "wait for copy 1", KEEP, "compute 1"),
        *("the processor waits for compute 0", "copy 3", "wait for copy 2", KEEP, "compute 2"),
        *("wait for copy 3", KEEP, "compute 3"),
    ]


def test_feed_of_the_cpu_copies_only_batches_that_share_a_pass() -> None:
    found = list(feed_of(CPU)(PASSES))
    assert [columns["x"].tolist() for columns in found] == VALUES
    [[alone]] = PASSES[:1]
    assert np.shares_memory(found[0]["x"].numpy(), alone["x"])


def test_feed_without_passes_is_empty() -> None:
    assert list(host_feed([])) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_memory_is_pinned_and_copied_correctly() -> None:
    rows = pinned((2, 3), np.dtype(np.float32))
    rows[:] = 7
    assert torch.from_numpy(rows).is_pinned()
    [columns] = feed_of(torch.device("cuda", 0))([[{"x": rows}]])
    assert columns["x"].tolist() == rows.tolist()
