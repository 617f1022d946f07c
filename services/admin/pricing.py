"""What machines cost now, asked in a thread and kept for a few seconds: EC2 counts questions."""

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

FRESH_S = 5.0  # prices of EC2 change a few times a day, replayed ones as fast as they are told to


class PriceCache:
    """The market's prices, for all who ask; belongs to the event loop.

    Args:
        settings: They name the market.
        clock: Seconds since 1970.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._opened: tuple[Market, Prices] | None = None
        self._known: PricesAnswer | None = None
        self._known_at = 0.0
        self._looking: asyncio.Task[PricesAnswer] | None = None

    async def now(self) -> PricesAnswer:
        """The prices, as of a few seconds ago at most.

        Raises:
            NotFoundError: If there is no market.
            UnavailableError: If the source of prices is unavailable.
            OutsideError: If it refuses, or the market file makes no sense.
        """
        if self._known is not None and monotonic() < self._known_at + FRESH_S:
            return self._known
        if self._looking is None or self._looking.done():  # one look for all who wait for it
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
        except UserError as error:  # of whoever runs this service, not of whoever asks
            raise OutsideError(f"DOLL_MARKET: {error}") from error
        self._known, self._known_at = known, monotonic()
        return known
