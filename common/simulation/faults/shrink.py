"""Make a failing scenario small: leave out whatever the failure does not need."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.simulation.faults.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.simulation.faults.scenario import Scenario


def shrink(scenario: Scenario, tell: Callable[[str], None]) -> Scenario:
    """Leave out faults, records and nuisances one after the other while the same thing fails.

    Raises:
        ValueError: If the scenario does not fail.
    """
    kind = Cluster(scenario).run().kind
    if not kind:
        raise ValueError(f"seed {scenario.seed} does not fail: there is nothing to shrink")
    progress = True
    while progress:
        progress = False
        for candidate in smaller(scenario):
            if Cluster(candidate).run().kind == kind:
                scenario, progress = candidate, True
                records = sum(map(len, scenario.arrivals))
                tell(f"{len(scenario.faults)} faults, {records} records: still {kind}")
                break
    return scenario


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with something less, the largest cuts first."""
    yield from _fewer_faults(scenario)
    yield from _fewer_records(scenario)
    if scenario.workers > 1:
        yield replace(scenario, workers=scenario.workers - 1)
    for less in (
        replace(scenario, bad=frozenset()),
        replace(scenario, poisons=scenario.poisons[:-1]),
        replace(scenario, lossy=0.0),
        replace(scenario, copies=0.0),
    ):
        if less != scenario:
            yield less


def _fewer_faults(scenario: Scenario) -> Iterator[Scenario]:
    faults = scenario.faults
    size = len(faults)
    while size >= 1:
        for start in range(0, len(faults), size):
            yield replace(scenario, faults=faults[:start] + faults[start + size :])
        size //= 2


def _fewer_records(scenario: Scenario) -> Iterator[Scenario]:
    """Empty one partition, or halve it."""
    for i, records in enumerate(scenario.arrivals):
        for rest in ((), records[: len(records) // 2]):
            arrivals = (*scenario.arrivals[:i], rest, *scenario.arrivals[i + 1 :])
            if len(rest) < len(records) and any(arrivals):
                yield replace(scenario, arrivals=arrivals)
