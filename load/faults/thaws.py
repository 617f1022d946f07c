"""Freezes all workers of a job, and optionally its leader, and measures the job after the thaw.

The leader assigns batches to free workers, so after a pause of all processes each worker must soon
compute as much as before.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from load.faults.drill import Conditions, Drill
from load.harness import report
from load.harness.processor import Neighbours
from load.harness.stack import Servers, await_until, check, events, freeze, thaw

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.embedded.services import EmbeddedService
    from load.harness.witness import SeenRound

FLEETS = (2, 8)  # workers
FROZEN_S = (10.0, 20.0)
TIMES = 3
# Updates/s after the thaw relative to those before.
LEAST_OF_UPDATES = 0.9
# Batches of one worker after the thaw relative to those before.
LEAST_OF_BATCHES = 0.8
# Length of the two windows that are compared: the last before the freeze, and the second after all
# workers own partitions again.
_WINDOW_S = 5.0
# Time limit for all workers to own partitions again.
_OWNED_S = 60.0
_START_S = 60.0
# Additional time of backlog for each freeze.
_AROUND_S = 60.0


class Thawed(NamedTuple):
    """One freeze, and the job's throughput afterwards."""

    workers: int
    frozen_s: float
    # True if the leader was frozen, too.
    leader: bool
    # Time from the thaw until every worker owned partitions again.
    owned_s: float
    # Updates/s after the freeze relative to before.
    updates_share: float
    # Batches of each worker after the freeze relative to before.
    batches_share: dict[str, float]

    @property
    def name(self) -> str:
        """Name of the case."""
        who = "workers and leader" if self.leader else "workers"
        return f"{self.workers} {who}, {self.frozen_s:g} s"


class Thaws:
    """Result of `--only thaw`."""

    name = "thaw"

    def __init__(self, conditions: Conditions, found: list[Thawed], others: float) -> None:
        self._conditions = conditions
        self._found = found
        # Number of cores that other processes used meanwhile.
        self._others = others

    @property
    def missed(self) -> list[str]:
        """Descriptions of the cases that fall short."""
        short = list[str]()
        for each in self._found:
            worker, batches = min(each.batches_share.items(), key=lambda item: item[1])
            if each.updates_share < LEAST_OF_UPDATES:
                short.append(
                    f"{each.name}: updates/s {each.updates_share:.2f} of before the freeze,"
                    f" required {LEAST_OF_UPDATES}"
                )
            if batches < LEAST_OF_BATCHES:
                short.append(
                    f"{each.name}: {worker} computes {batches:.2f} of its batches before the"
                    f" freeze, required {LEAST_OF_BATCHES}"
                )
        return short

    def as_data(self) -> dict[str, Any]:
        """Return the result for the JSON file."""
        return {
            "each": [each._asdict() for each in self._found],
            "missed": self.missed,
            "conditions": self._conditions.as_data(),
            "others": self._others,
        }

    def draw(self, on: Servers) -> None:
        """Print the result as a table."""
        rows = [
            (
                each.name,
                f"{each.owned_s:.1f}",
                f"{each.updates_share:.2f}",
                f"{min(each.batches_share.values()):.2f}",
            )
            for each in self._found
        ]
        columns = ("frozen", "s to own partitions", "updates/s", "least batches of a worker")
        title = f"thaw: processes are stopped and continued; after over before; {on.kafka}"
        report.draw(title, columns, rows)
        print(f"other processes used {self._others:.2f} cores meanwhile")


def measure(on: Servers, conditions: Conditions, fleets: Iterable[int], times: int) -> Thaws:
    """Freeze fleets of several sizes, `times` times for each duration.

    Raises:
        NotMeasuredError: If a fleet does not reach undisturbed rounds, or the backlog ends.
    """
    found, others = list[Thawed](), 0.0
    for workers in fleets:
        sized = replace(
            conditions, workers=workers, group_size=workers, partitions=max(8, 2 * workers)
        )
        seconds = _START_S + sum(2 * times * (frozen_s + _AROUND_S) for frozen_s in FROZEN_S)
        with closing(Drill(on, f"thaw-{workers}", sized, seconds=seconds)) as drill:
            neighbours = Neighbours(lambda: [*on.pids.values(), *drill.pids()])
            for frozen_s in FROZEN_S:
                for leader in (False, True):
                    for _ in range(times):
                        found.append(_freeze_once(drill, frozen_s, leader=leader))
                        print(found[-1], flush=True)
            others = max(others, neighbours.cores())
    return Thaws(conditions, found, others)


def _freeze_once(drill: Drill, frozen_s: float, *, leader: bool) -> Thawed:
    drill.await_undisturbed()
    time.sleep(_WINDOW_S)  # This window is measured.
    processes = [*drill.workers, *(drill.coordinators if leader else ())]
    frozen_at = monotonic()
    for process in processes:
        freeze(process)
    time.sleep(frozen_s)  # the fault
    thawed_at, thawed_on = monotonic(), time.time()
    for process in processes:
        thaw(process)
    owned_s = _owned(drill, thawed_on) - thawed_on
    begin = thawed_at + owned_s + _WINDOW_S
    await_until(lambda: monotonic() > begin + _WINDOW_S, 4 * _WINDOW_S, "the time is over")
    check(drill.workers)
    rounds = drill.witness.rounds()
    before = [each for each in rounds if _is_in(each, frozen_at - _WINDOW_S)]
    after = [each for each in rounds if _is_in(each, begin)]
    computed = _computed(before), _computed(after)
    return Thawed(
        len(drill.workers),
        frozen_s,
        leader,
        owned_s,
        len(after) / max(len(before), 1),
        {w.name: computed[1][w.name] / max(computed[0][w.name], 1) for w in drill.workers},
    )


def _owned(drill: Drill, since: float) -> float:
    """Wait until each worker owns partitions assigned since a time.

    Returns when the last one did.
    """

    def first(worker: EmbeddedService) -> float | None:
        logged = (
            datetime.fromisoformat(entry["time"]).timestamp()
            for entry in events(worker, "partitions_assigned")
            if entry["partitions"]
        )
        return min((at for at in logged if at >= since), default=None)

    def all_own() -> bool:
        check(drill.workers)
        return all(first(worker) is not None for worker in drill.workers)

    await_until(all_own, _OWNED_S, "every worker owns partitions again")
    return max(at for worker in drill.workers if (at := first(worker)) is not None)


def _is_in(round_: SeenRound, begin: float) -> bool:
    applied_at = round_.applied_at
    return applied_at is not None and begin <= applied_at < begin + _WINDOW_S


def _computed(rounds: Sequence[SeenRound]) -> Counter[str]:
    """Count batches by worker. If several workers had a batch, it counts for the last of them."""
    computed = Counter[str]()
    for round_ in rounds:
        by_batch = {
            batch.offset: order.worker
            for _, trigger in round_.triggers
            for order in trigger.orders
            for batch in order.batches
        }
        computed.update(by_batch.values())
    return computed
