"""Convert a market file and recorded availability to the pools of a plan.

A plan in advance knows averages: the mean of a recorded price, and the share of the time and the
frequency of losses of recorded availability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common.errors import UserError
from common.spot.experiments.draws import spot_on_average
from common.spot.experiments.spec import SpotSpec
from common.spot.market.billing_spec import BillingRules
from common.spot.market.market_file import Market, SpotPool
from common.spot.traces.files import read_once, traced
from common.spot.traces.spec import TraceSpec

if TYPE_CHECKING:
    from common.spot.theory.work import Pool

ENDINGS = (".csv", ".json", ".txt")
TOGETHER = (
    "availability was recorded of all machines together, which come and go at once; the probability"
    " is that of machines that each go by themselves: `doll simulate` with `together: true` knows"
)


class Rentable(NamedTuple):
    """Machines of a market that a plan can use, with their prices."""

    pools: tuple[Pool, ...]  # spot
    # None without a market file.
    on_demand_usd_per_hour: float | None
    notes: tuple[str, ...]
    # Recorded prices by pool: pairs of a second and the price from then on. The last second is the
    # end of the recording.
    past_usd_per_hour: Mapping[str, Sequence[tuple[float, float]]]


@read_once()
def rentable(
    market: Path | None, traces: Path | None, usd_per_hour: float | None, workers: int | None
) -> Rentable:
    """Read a market file, recordings of availability, or both.

    Args:
        market: The market file.
        traces: A folder of recordings, each named after its pool. Without a market file, each is a
            pool.
        usd_per_hour: Price of all spot machines, without a market file.
        workers: Number of machines that may be wanted; None if unknown.

    Raises:
        UserError: If a file cannot be read or is invalid, by its field and place.
    """
    recorded = {} if traces is None else _recordings(traces)
    if market is None:
        if usd_per_hour is None:
            raise UserError(
                "--traces: needs the price of spot machines; add --spot-price or --market"
            )
        specs = [
            SpotSpec(name=name, usd_per_hour=usd_per_hour, availability=one, together=True)
            for name, one in recorded.items()
        ]
        pools = tuple(
            _on_average(f"--traces: {one.name}: availability", one, Path(), workers)
            for one in specs
        )
        return Rentable(pools, None, (TOGETHER,), {})
    found = Market.load(market)
    names = [pool.name for pool in found.spot]
    if not names:
        raise UserError(f"{market}: spot: must have at least one pool")
    for name in recorded:
        if name not in names:
            problem = f"the market has no spot pool {name!r}"
            raise UserError(
                f"--traces: {traces}: {problem}; name the file after one of {', '.join(names)}"
            )
    pool_specs = [_spec(pool, recorded.get(pool.name), market) for pool in found.spot]
    average = (
        _on_average(f"{market}: {one.name}", one, market.parent, workers) for one in pool_specs
    )
    pools = tuple(
        replace(one, billing=found.billing(pool))
        for one, pool in zip(average, found.spot, strict=True)
    )
    together = any(isinstance(spec.availability, TraceSpec) for spec in pool_specs)
    past = {
        one.name: _past(one.usd_per_hour, market.parent)
        for one in pool_specs
        if isinstance(one.usd_per_hour, TraceSpec)
    }
    alone_usd = found.on_demand.least_usd_per_hour
    return Rentable(pools, alone_usd, (TOGETHER,) * together, past)


def _past(spec: TraceSpec, folder: Path) -> list[tuple[float, float]]:
    trace = traced(spec, folder)
    times_s, usd_per_hour = trace.times_s.tolist(), trace.values.tolist()
    # End of the last price.
    if trace.end_s > times_s[-1]:
        times_s, usd_per_hour = [*times_s, trace.end_s], [*usd_per_hour, usd_per_hour[-1]]
    return list(zip(times_s, usd_per_hour, strict=True))


def _recordings(folder: Path) -> dict[str, TraceSpec]:
    """Return recordings by the name of the pool."""
    if not folder.is_dir():
        raise UserError(f"--traces: {folder}: is not a folder")
    found: dict[str, TraceSpec] = {}
    for path in sorted(folder.iterdir()):
        name = path.name.removesuffix(".gz").removesuffix(".xz")
        ending = next((each for each in ENDINGS if name.endswith(each)), None)
        if ending and path.is_file():
            found[name.removesuffix(ending)] = TraceSpec(file=str(path.resolve()))
    if not found:
        endings = ", ".join(ENDINGS)
        raise UserError(
            f"--traces: {folder}: has no file that ends with {endings} (or these with .gz or .xz)"
        )
    return found


def _on_average(where: str, spec: SpotSpec, folder: Path, workers: int | None) -> Pool:
    try:
        return spot_on_average(spec, folder, workers or _least_workers(spec, folder))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _least_workers(spec: SpotSpec, folder: Path) -> int:
    recorded = spec.availability
    most = traced(recorded, folder).values.max() if isinstance(recorded, TraceSpec) else 1
    if most > 1:
        raise UserError(f"has up to {most:g} machines; add --workers with the number of workers")
    return 1


def _spec(pool: SpotPool, recorded: TraceSpec | None, market: Path) -> SpotSpec:
    if pool.usd_per_hour == "history":
        problem = "usd_per_hour: `history` is known only while machines are rented; for a plan,"
        raise UserError(
            f"{market}: {pool.name}: {problem} write the price that `doll prices` shows, or a"
            " recorded series"
        )
    availability = recorded or pool.trace or pool.availability
    known = {field: value for field, value in pool if field in SpotSpec.model_fields}
    together = isinstance(availability, TraceSpec)
    others = {"availability": availability, "together": together, "billing": BillingRules()}
    return SpotSpec(**known | others)
