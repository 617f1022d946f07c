"""The contract of prices: in memory, constant, replayed, of EC2 by moto's server, and together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from common.errors import UnavailableError
from common.spot.fleets.ec2.prices import Ec2Prices
from common.spot.fleets.prices import FixedPrices, PricesTogether, ReplayedPrices
from common.spot.machines import Offer, by_pool
from common.spot.market.market_file import Ec2Provider, SpotPool
from common.spot.traces.spec import TraceSpec
from tests.contract.fleet_providers import REGION, TEMPLATE
from tests.fakes.clock import ManualClock
from tests.memory_fleet import MemoryPrices

if TYPE_CHECKING:
    from pathlib import Path

    from common.spot.machines import Prices
    from tests.contract.fleet_providers import Ec2Server

pytest_plugins = ["tests.contract.fleet_fixtures"]

POOLS = {"small", "big"}
SERIES = "seconds,small,big\n0,0.1,0.4\n60,0.2,0.3\n120,0.1,0.3\n"


def replayed(folder: Path) -> ReplayedPrices:
    (folder / "prices.csv").write_text(SERIES)
    specs = {pool: TraceSpec(file="prices.csv", column=pool) for pool in POOLS}
    return ReplayedPrices(specs, folder, 1000.0, ManualClock(1234.0))


def of_ec2(server: Ec2Server) -> Ec2Prices:
    provider = Ec2Provider(region=REGION, launch_template=TEMPLATE, endpoint=server.url)
    kinds = {"small": ("t3.micro", "t3.small"), "big": ("t3.large",)}
    pools = {
        pool: SpotPool(name=pool, usd_per_hour="history", instance_types=types)
        for pool, types in kinds.items()
    }
    return Ec2Prices(provider, pools, client=server.client())


@pytest.fixture(params=["memory", "constant", "replayed", "ec2", "together"])
def prices(request: pytest.FixtureRequest, tmp_path: Path) -> Prices:
    if request.param == "memory":
        return MemoryPrices({"small": 0.1, "big": 0.4})
    if request.param == "constant":
        return FixedPrices({Offer("small"): 0.1, Offer("big"): 0.4})
    if request.param == "replayed":
        return replayed(tmp_path)
    if request.param == "together":
        return PricesTogether([FixedPrices({Offer("small"): 0.1}), MemoryPrices({"big": 0.4})])
    return of_ec2(request.getfixturevalue("ec2_server"))


def test_every_pool_has_a_price(prices: Prices) -> None:
    found = prices.look()
    assert by_pool(found).keys() == POOLS
    assert all(offer.pool in POOLS for offer in found)
    assert all(0 < price < math.inf for price in found.values())


def test_changing_a_price_answer_does_not_change_later_ones(prices: Prices) -> None:
    found = prices.look()
    before = dict(found)
    found[Offer("small")] = 7.0
    del found[Offer("big")]
    assert prices.look() == before


def test_unreachable_price_source_raises_until_it_recovers(ec2_server: Ec2Server) -> None:
    memory = MemoryPrices({"other": 0.1})
    ec2 = of_ec2(ec2_server)
    together = PricesTogether([ec2, memory])
    before = together.look()
    memory.away = True
    with pytest.raises(UnavailableError):
        together.look()
    memory.away, ec2_server.away = False, True
    for prices in (ec2, together):
        with pytest.raises(UnavailableError):
            prices.look()
    ec2_server.away = False
    assert together.look() == before
