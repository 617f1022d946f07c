"""Current prices of machines, cached for a few seconds because EC2 limits requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from common.errors import NotFoundError, OutsideError, UserError
from common.spot.api import market_of, prices_answer
from common.spot.connect import open_prices
from common.spot.machines import Prices, by_pool

if TYPE_CHECKING:
    from common.api.answers import PricesAnswer
    from common.config.settings import Settings
    from common.spot.market.market_file import Market

# Seconds. Prices of EC2 change a few times a day, replayed ones at a configured speed.
FRESH_S = 5.0


class PriceCache:
    """Prices of the market, shared by all callers; belongs to the event loop.

    Args:
        settings: Settings that name the market.
        clock: Returns seconds since 1970.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._opened: tuple[Market, Prices] | None = None
        self._known: PricesAnswer | None = None
        self._known_at = 0.0
        self._looking: asyncio.Task[PricesAnswer] | None = None

    async def now(self) -> PricesAnswer:
        """Return the prices, at most a few seconds old.

        Raises:
            NotFoundError: If no market is configured.
            UnavailableError: If the source of prices is unavailable.
            OutsideError: If the source refuses, or the market file is invalid.
        """
        if self._known is not None and monotonic() < self._known_at + FRESH_S:
            return self._known
        # All waiting requests share one look-up.
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(asyncio.to_thread(self._look))
        return await asyncio.shield(self._looking)

    def _look(self) -> PricesAnswer:
        try:
            if self._opened is None:
                market = market_of(self._settings)
                self._opened = market, open_prices(self._settings, market)
            market, prices = self._opened
            known = prices_answer(market, by_pool(prices.look()), self._clock())
        except NotFoundError:
            raise
        # An error of the operator of this service, not of the client.
        except UserError as error:
            raise OutsideError(f"DOLL_MARKET: {error}") from error
        self._known, self._known_at = known, monotonic()
        return known
