"""Workers, as real processes, go to jobs with work. A worker pinned to one job stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.core.messages import WorkerId
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from common.config.settings import Settings
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

FREE = {WorkerId("w1"), WorkerId("w2")}
PINNED = WorkerId("w3")
# Seconds per batch of eight. One worker processes fewer than 160 records/s.
SLOW_S = 0.05


@pytest.fixture
def settings(likest_to_production: Settings) -> Settings:
    return likest_to_production


def test_workers_move_from_drained_job_to_backlog_and_pinned_one_stays(
    make: Make,
) -> None:
    # first    ████ drained
    # second          ██████████████████ more than one worker manages in a minute
    # w1, w2   ▒▒▒▒▒▒▒▒▒▒  to second
    # w3       ████████████████████████ pinned to first
    first = make(name="spread-first", records=400)
    second = make(name="spread-second", records=20_000, seconds=SLOW_S)
    first.start("coordinator", "c1")
    for name in sorted(FREE):
        first.start_free_worker(name)
    first.start("worker", PINNED)
    first.produce(400)
    await_condition(first.drained, "the first job is drained")
    await_condition(
        lambda: PINNED in first.board.heartbeats(), "the pinned worker is at the first job"
    )
    second.produce(20_000)

    await_condition(
        lambda: second.board.heartbeats().keys() >= FREE, "both free workers are at the second job"
    )
    await_condition(lambda: second.version() >= 10, "the second job trains")
    await_condition(
        lambda: first.board.heartbeats().keys() == {PINNED},
        "only the pinned worker is at the first job",
    )
    assert PINNED not in second.board.heartbeats()
    assert first.audit().flaws == second.audit().flaws == ()
    assert first.audit().trained == 400
