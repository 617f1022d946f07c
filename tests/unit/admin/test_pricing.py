"""Requests that wait for prices at the same time share one lookup, even if it finds none."""

from __future__ import annotations

import asyncio
import threading

import pytest

from common.config.settings import Settings
from common.errors import UnavailableError
from services.admin import pricing
from services.admin.pricing import PriceCache
from tests.unit.admin.live.helpers import happens


def test_concurrent_price_requests_share_one_failed_lookup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, going_on = list[int](), threading.Event()

    def away(_settings: Settings) -> None:
        looks.append(1)
        going_on.wait()
        raise UnavailableError("EC2 does not answer")

    monkeypatch.setattr(pricing, "market_of", away)

    async def ask() -> None:
        cache = PriceCache(Settings(), lambda: 0.0)
        waiting = [asyncio.create_task(cache.now()) for _ in range(10)]
        await happens(lambda: bool(looks))
        going_on.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(each) for each in found] == ["EC2 does not answer"] * 10
        assert len(looks) == 1
        with pytest.raises(UnavailableError):
            await cache.now()
        # A later request starts a lookup of its own.
        assert len(looks) == 2

    asyncio.run(ask())
