"""Make a failing scenario small: leave out whatever the failure does not need."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.simulation.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.simulation.scenario import Scenario


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
        for smaller in _smaller(scenario):
            if Cluster(smaller).run().kind == kind:
                scenario, progress = smaller, True
                records = sum(map(len, scenario.arrivals))
                tell(f"{len(scenario.faults)} faults, {records} records: still {kind}")
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with something less, the largest cuts first."""
    faults = scenario.faults
    size = len(faults)
    while size >= 1:
        for start in range(0, len(faults), size):
            yield replace(scenario, faults=faults[:start] + faults[start + size :])
        size //= 2
    if len(scenario.arrivals) > 1:
        for i in range(len(scenario.arrivals)):
            rest = tuple(() if j == i else a for j, a in enumerate(scenario.arrivals) if a)
            if any(rest) and rest != scenario.arrivals:
                yield replace(scenario, arrivals=rest)
    for i, records in enumerate(scenario.arrivals):
        if len(records) > 1:
            half = records[: len(records) // 2]
            yield replace(
                scenario,
                arrivals=(*scenario.arrivals[:i], half, *scenario.arrivals[i + 1 :]),
            )
    if scenario.workers > 1:
        yield replace(scenario, workers=scenario.workers - 1)
    if scenario.bad:
        yield replace(scenario, bad=frozenset())
    if scenario.poison is not None:
        yield replace(scenario, poison=None)
    if scenario.lossy:
        yield replace(scenario, lossy=0.0)
    if scenario.copies:
        yield replace(scenario, copies=0.0)
