"""What machines of the market cost now, pool by pool, as an answer of the API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from common.api.answers import PoolAnswer, PricesAnswer
from common.config.market_file import Market, load_market
from common.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.api.answers import MachineKind
    from common.config.settings import Settings


def market_of(settings: Settings) -> Market:
    """The market that the settings name.

    Raises:
        NotFoundError: If they name none.
        UserError: If it makes no sense.
    """
    if not settings.market:
        raise NotFoundError("there is no market: set DOLL_MARKET to a market file")
    return load_market(Path(settings.market))


def prices_answer(market: Market, usd_per_hour: Mapping[str, float], at_s: float) -> PricesAnswer:
    """Answer with the prices that were found."""

    def answer(name: str, kind: MachineKind) -> PoolAnswer:
        reason = "" if name in usd_per_hour else "its source has no current price"
        return PoolAnswer(name=name, kind=kind, usd_per_hour=usd_per_hour.get(name), reason=reason)

    on_demand = answer(market.on_demand.name, "on-demand")
    spot = [answer(pool.name, "spot") for pool in market.spot]
    return PricesAnswer(at_s=at_s, pools=(on_demand, *spot))


def minimum_billing_s(market: Market) -> dict[str, float]:
    """How long a machine is paid for at least, by pool."""
    spot = {pool.name: pool.minimum_billing_s for pool in market.spot}
    return {market.on_demand.name: market.on_demand.minimum_billing_s} | spot
