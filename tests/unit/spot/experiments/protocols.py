"""A small job in virtual time, with a learner that counts the uses of each record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.config.synchronisation import SYNCHRONOUS, SynchronisationSpec
from common.core.spans import Partition
from common.spot.experiments.arrivals import SimulatedStream, even
from common.spot.experiments.protocol import (
    Computed,
    GradientTimeDraws,
    Learner,
    Protocol,
    SimulatedJob,
    VirtualTime,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.core import commands as do
    from common.core.messages import Vector
    from common.core.order_queue import Compute

GROUP_SIZE, BATCH_SIZE = 3, 4
RATE_PER_S = 10.0
MOST_RECORDS = 1000  # records of a stream


class Counting(Learner):
    """A `Learner` whose weights count the uses of each record."""

    def __init__(self, streams: int) -> None:
        self.used: npt.NDArray[np.float32] = np.zeros((streams, MOST_RECORDS), np.float32)
        self.sums = list[int]()  # samples of each update
        self._rounds: dict[int, npt.NDArray[np.float32]] = {}

    def gradient(self, compute: Compute) -> Computed:
        """Count the records of the batches."""
        vector = np.zeros_like(self.used)
        for batch in compute.batches:
            for span in batch.address:
                vector[span.partition, span.start : span.end] += 1
        return Computed(float(len(compute.batches)), vector)

    def add(self, round_: int, computed: Vector | None, samples: int) -> None:
        """Add counts."""
        assert computed is not None
        assert computed.sum() == samples
        self._rounds[round_] = self._rounds.get(round_, 0) + computed

    def apply(self, command: do.Apply, now: float) -> None:
        """Apply counts."""
        del now
        added = self._rounds.pop(command.round)
        self.used += added
        self.sums.append(int(added.sum()))
        assert command.update.version == len(self.sums)

    def discard(self, round_: int) -> None:
        """Discard counts."""
        self._rounds.pop(round_, None)


class Bench:
    """A protocol with streams, and machines that tests start."""

    def __init__(
        self,
        streams: int,
        updates: int,
        gradient_s: float = 0.01,
        variation: float = 0.5,
        synchronisation: SynchronisationSpec = SYNCHRONOUS,
    ) -> None:
        self.time = VirtualTime()
        self.streams = [
            SimulatedStream(Partition("s", index), even(RATE_PER_S, index / streams))
            for index in range(streams)
        ]
        self.learner = Counting(streams)
        group_s = GROUP_SIZE * BATCH_SIZE / (streams * RATE_PER_S)
        times = GradientTimeDraws(gradient_s, variation, np.random.default_rng(1))
        job = SimulatedJob(GROUP_SIZE, BATCH_SIZE, updates, group_s, synchronisation)
        self.protocol = Protocol(self.time, job, self.streams, times, self.learner)
