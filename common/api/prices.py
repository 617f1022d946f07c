"""What machines of the market cost now, pool by pool, as the API and `doll prices` tell it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from common.config.market_file import Market, load_market
from common.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.config.settings import Settings

ON_DEMAND, SPOT = "on-demand", "spot"


class PoolPrice(msgspec.Struct, frozen=True):
    """One pool."""

    name: str
    kind: str  # `ON_DEMAND` or `SPOT`
    usd_per_hour: float | None
    reason: str = ""  # why there is no price


class PriceList(msgspec.Struct, frozen=True):
    """All pools, on-demand first."""

    at_s: float  # since 1970
    pools: tuple[PoolPrice, ...]


def market_of(settings: Settings) -> Market:
    """The market that the settings name.

    Raises:
        NotFoundError: If they name none.
        UserError: If it makes no sense.
    """
    if not settings.market:
        raise NotFoundError("there is no market: set DOLL_MARKET to a market file")
    return load_market(Path(settings.market))


def price_list(market: Market, usd_per_hour: Mapping[str, float], at_s: float) -> PriceList:
    """Tell the prices that were found."""
    kinds = {market.on_demand.name: ON_DEMAND} | {pool.name: SPOT for pool in market.spot}
    return PriceList(
        at_s,
        tuple(
            PoolPrice(name, kind, usd_per_hour.get(name), "" if name in usd_per_hour else _UNKNOWN)
            for name, kind in kinds.items()
        ),
    )


def minimum_billing_s(market: Market) -> dict[str, float]:
    """How long a machine is paid for at least, by pool."""
    spot = {pool.name: pool.minimum_billing_s for pool in market.spot}
    return {market.on_demand.name: market.on_demand.minimum_billing_s} | spot


_UNKNOWN = "its source names no price of now"
