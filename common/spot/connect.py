"""Opens the machines and the prices of a market file: see `common.runtime.connect`."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError
from common.spot.machines import Offer
from common.spot.traces.spec import TraceSpec

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.spot.machines import Fleet, Prices
    from common.spot.market.market_file import Market

# A released worker waits up to DOLL_LEAVE_S for its gradients. It is killed this much later.
_MORE_LEAVE_S = 10.0


def open_fleet(settings: Settings, market: Market, job: str) -> Fleet:
    """Open the fleet of a job.

    Raises:
        UserError: If a recorded series of the market is invalid, or the default directory belongs
            to another user.
        UnavailableError: If the directory of processes cannot be used.
    """
    if market.fleet == "ec2" and market.ec2 is not None:
        from common.spot.fleets.ec2.fleet import Ec2Fleet  # noqa: PLC0415 -- see above

        return Ec2Fleet(market, market.ec2, job)
    from common.embedded.services import start_machine  # noqa: PLC0415 -- see above
    from common.spot.fleets.local.fleet import LocalMarket, ProcessFleet  # noqa: PLC0415 -- see above
    from common.spot.fleets.local.market import schedule_of  # noqa: PLC0415 -- see above
    from common.spot.market.market_file import with_common_start  # noqa: PLC0415 -- see above

    directory, path = _fleet_directory(settings), Path(settings.market)
    begun = with_common_start(market, path.parent)
    schedule = schedule_of(begun, path.parent, _replayed_from_s(market, path))
    return ProcessFleet(
        LocalMarket(market, schedule, open_prices(settings, market)),
        job,
        directory,
        partial(start_machine, job, settings, directory / job),
        settings.leave_s + _MORE_LEAVE_S,
        time.time,
    )


def open_prices(settings: Settings, market: Market) -> Prices:
    """Open prices of all pools of a market.

    Raises:
        UserError: If a recorded series is invalid, or the market file is missing.
    """
    from common.spot.fleets import prices  # noqa: PLC0415 -- see above
    from common.spot.market.market_file import with_common_start  # noqa: PLC0415 -- see above

    path = Path(settings.market)
    market = with_common_start(market, path.parent)
    asked = {pool.name: pool.usd_per_hour for pool in market.spot}
    fixed = {Offer(name): usd for name, usd in asked.items() if isinstance(usd, float)}
    fixed |= market.on_demand.prices()
    replayed = {name: usd for name, usd in asked.items() if isinstance(usd, TraceSpec)}
    history = {pool.name: pool for pool in market.spot if pool.usd_per_hour == "history"}
    sources: list[Prices] = [prices.FixedPrices(fixed)]
    if replayed:
        origin_s = _replayed_from_s(market, path)
        sources.append(prices.ReplayedPrices(replayed, path.parent, origin_s, time.time))
    if history and market.ec2 is not None:
        from common.spot.fleets.ec2.prices import Ec2Prices  # noqa: PLC0415 -- see above

        sources.append(Ec2Prices(market.ec2, history))
    return prices.PricesTogether(sources)


def _fleet_directory(settings: Settings) -> Path:
    """Return the directory for records and logs of machines that are processes.

    Names of jobs are unique only within one Kafka, so each Kafka has a directory.
    """
    if settings.fleet_directory:
        return Path(settings.fleet_directory).resolve()
    kafka = hashlib.sha256(settings.kafka.encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir()).resolve() / f"doll-fleet-{os.getuid()}-{kafka}"
    path.mkdir(mode=0o700, exist_ok=True)
    # Every user can write to the parent.
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UserError(
            f"{path}: is not a folder of this user; set DOLL_FLEET_DIRECTORY to one that is"
        )
    return path


def _replayed_from_s(market: Market, path: Path) -> float:
    """Return the beginning of the market's replay in seconds since 1970; 0 without recordings."""
    specs = [(pool.usd_per_hour, pool.trace) for pool in market.spot]
    if not any(isinstance(series, TraceSpec) for pool in specs for series in pool):
        return 0.0
    if market.replayed_from_s is not None:
        return market.replayed_from_s
    try:
        return path.stat().st_mtime
    except OSError as error:
        raise UserError(f"DOLL_MARKET: {path}: {error}") from error
