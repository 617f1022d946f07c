"""A partition far behind the others in time is reported once, and again when it has caught up."""

from __future__ import annotations

import logging

import pytest

from common.core.spans import Partition
from common.core.weighted_turns import FAR_BEHIND_S
from common.kafka.port import Fetched
from common.telemetry.logging import event_logger, fields_of
from common.telemetry.metrics.worker import WorkerMetrics
from services.worker.time_lag import LOOK_S, TimeLag

OLD, NEW, OTHER = Partition("old", 0), Partition("new", 0), Partition("new", 1)
NOW_S = 1_800_000_000.0


class Bench:
    """One worker's reader of three partitions."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self._metrics = WorkerMetrics(("old", "new"))
        self.time_lag = TimeLag(("old", "new"), event_logger("test"), self._metrics)

    def read(self, *partitions: Partition, at_s: float) -> None:
        """Receive a record of each partition with this timestamp."""
        for partition in partitions:
            self.time_lag.read(Fetched(partition, [0], [b""], at_s - 1, at_s, [0]))

    def behind_s(self, stream: str) -> float | None:
        """Return the sample of a stream."""
        return self._metrics.registry.get_sample_value(
            "doll_stream_behind_seconds", {"stream": stream}
        )

    def events(self) -> list[str]:
        """Return the logged events."""
        return self._caplog.messages


@pytest.fixture
def bench(caplog: pytest.LogCaptureFixture) -> Bench:
    return Bench(caplog)


def test_partition_an_hour_behind_is_reported_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.read(NEW, OTHER, at_s=NOW_S)
    bench.read(OLD, at_s=NOW_S - 3_600)
    for _ in range(3):
        bench.time_lag.look({OLD: 500, NEW: 3, OTHER: 0})
    assert bench.events() == ["partition_far_behind"]
    fields = fields_of(caplog.records[0])
    assert (fields["partition"], fields["behind_s"], fields["records"]) == (str(OLD), 3_600, 500)
    assert (bench.behind_s("old"), bench.behind_s("new")) == (3_600, 0)

    bench.read(OLD, at_s=NOW_S - FAR_BEHIND_S)
    bench.time_lag.look({OLD: 20})
    assert bench.events() == ["partition_far_behind", "partition_caught_up"]


@pytest.mark.parametrize("backlog", [0, 7])
def test_idle_or_slightly_late_partition_is_not_reported(bench: Bench, backlog: int) -> None:
    bench.read(NEW, OTHER, at_s=NOW_S)
    bench.read(OLD, at_s=NOW_S - (FAR_BEHIND_S - 1 if backlog else 86_400))
    bench.time_lag.look({OLD: backlog})
    assert bench.events() == []
    assert bench.behind_s("old") == (FAR_BEHIND_S - 1 if backlog else 0)


def test_revoked_partition_is_forgotten(bench: Bench) -> None:
    bench.read(NEW, OTHER, at_s=NOW_S)
    bench.read(OLD, at_s=NOW_S - 3_600)
    bench.time_lag.look({OLD: 500})
    bench.time_lag.revoke([OLD])
    bench.time_lag.look({OLD: 500})
    assert bench.behind_s("old") == 0
    assert bench.events() == ["partition_far_behind"]


def test_poll_is_due_after_its_interval(bench: Bench) -> None:
    assert [bench.time_lag.due(now) for now in (0.0, 0.1, LOOK_S, LOOK_S + 0.1)] == [
        *(True, False, True, False)
    ]
