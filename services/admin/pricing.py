"""What machines cost now, asked in a thread and kept for a few seconds: EC2 counts questions."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from common.api.prices import market_of, prices_answer
from common.errors import NotFoundError, OutsideError, UserError
from common.runtime.connect import open_prices

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.config.market_file import Market
    from common.config.settings import Settings
    from common.ports.machines import Prices

FRESH_S = 5.0  # prices of EC2 change a few times a day, replayed ones as fast as they are told to


class PriceDesk:
    """The market's prices, for all who ask; belongs to the event loop.

    Args:
        settings: They name the market.
        clock: Seconds since 1970.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._opened: tuple[Market, Prices] | None = None
        self._known = b""
        self._known_at = -FRESH_S
        self._failed: OutsideError | None = None  # the last look, where it did
        self._failed_at = -FRESH_S
        self._lock = asyncio.Lock()  # one look for all who wait for it

    async def now(self) -> bytes:
        """A `PricesAnswer` as JSON.

        Raises:
            NotFoundError: If there is no market.
            UnavailableError: If the source of prices is unavailable.
            OutsideError: If it refuses, or the market file makes no sense.
        """
        asked_at = monotonic()
        async with self._lock:
            if self._failed is not None and self._failed_at >= asked_at:
                raise self._failed  # else each would wait for its own look, one after the other
            if monotonic() >= self._known_at + FRESH_S:
                try:
                    self._known = await asyncio.to_thread(self._look)
                except OutsideError as error:
                    self._failed, self._failed_at = error, monotonic()
                    raise
                self._known_at = monotonic()
            return self._known

    def _look(self) -> bytes:
        try:
            if self._opened is None:
                market = market_of(self._settings)
                self._opened = market, open_prices(self._settings, market)
            market, prices = self._opened
            told = prices_answer(market, prices.look(), self._clock())
            return told.model_dump_json().encode()
        except NotFoundError:
            raise
        except UserError as error:  # of whoever runs this service, not of whoever asks
            raise OutsideError(f"DOLL_MARKET: {error}") from error
