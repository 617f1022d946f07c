"""Spot prices on EC2 (`common.spot.machines.Prices`): the latest in its price history."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

from common.errors import UnavailableError
from common.spot.fleets.ec2.client import asking, connect
from common.spot.machines import Offer, PriceHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.literals import InstanceTypeType
    from types_boto3_ec2.type_defs import FilterTypeDef, SpotPriceTypeDef

    from common.spot.market.market_file import Ec2Provider, SpotPool

# Every account has a VPC now, but the history uses both names.
_LINUX = ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"]
REMEMBERED_S = 90 * 86400.0
_LONG_AGO = datetime.fromtimestamp(0, UTC)


class Ec2Prices:
    """Prices of each type in each zone; a pool's price is the lowest of them.

    Args:
        provider: The EC2 region and endpoint.
        pools: Pools by name, each with its instance types, and zones unless any will do.
        clock: Returns seconds since 1970.
        client: Optional. If unset, one is made for the provider.
    """

    def __init__(
        self,
        provider: Ec2Provider,
        pools: Mapping[str, SpotPool],
        clock: Callable[[], float] = time.time,
        client: EC2Client | None = None,
    ) -> None:
        self._pools = dict(pools)
        self._clock = clock
        self._region = provider.region
        self._client = client or connect(provider)

    def look(self) -> dict[Offer, float]:
        """Return USD per hour of one machine now.

        Raises:
            UnavailableError: If EC2 is unavailable, or returns no price.
            OutsideError: If it refuses.
        """
        prices: dict[Offer, float] = {}
        for name, pool in self._pools.items():
            found = self._found(name, pool)
            prices |= found | {Offer(name): min(found.values())}
        return prices

    def past(self) -> dict[str, PriceHistory]:
        """Return past prices of each pool's cheapest machine, as far back as EC2 has them.

        Raises:
            UnavailableError: If EC2 is unavailable, or returns no price.
            OutsideError: If it refuses.
        """
        since_s = self._clock() - REMEMBERED_S
        return {
            name: _cheapest(self._records(name, pool, since_s), since_s, self._clock())
            for name, pool in self._pools.items()
        }

    def _found(self, name: str, pool: SpotPool) -> dict[Offer, float]:
        records = self._records(name, pool, self._clock())
        return {
            Offer(name, *where): _usd_per_hour(record) for where, record in _newest(records).items()
        }

    def _records(self, name: str, pool: SpotPool, since_s: float) -> list[SpotPriceTypeDef]:
        """Request valid price records since a time, and those in force at that time."""
        with asking(f"the price of pool {name!r} on EC2 in {self._region}"):
            pages = self._client.get_paginator("describe_spot_price_history").paginate(
                InstanceTypes=cast("list[InstanceTypeType]", list(pool.instance_types)),
                ProductDescriptions=_LINUX,
                Filters=[_in(pool.zones)] if pool.zones else [],
                # Without an end time, EC2 returns all records until now.
                StartTime=datetime.fromtimestamp(since_s, UTC),
            )
            records = [record for page in pages for record in page["SpotPriceHistory"]]
        prices = [_usd_per_hour(record) for record in records]
        # NaN fails this check, too.
        if not all(0 < price < math.inf for price in prices):
            raise UnavailableError(f"EC2 returned an invalid price for pool {name!r}: {prices}")
        if not prices:
            where = f"{', '.join(pool.instance_types)} in {', '.join(pool.zones) or self._region}"
            raise UnavailableError(f"EC2 returned no price for pool {name!r}: {where}")
        return records


def _in(zones: Sequence[str]) -> FilterTypeDef:
    return {"Name": "availability-zone", "Values": list(zones)}


def _newest(records: Iterable[SpotPriceTypeDef]) -> dict[tuple[str, str], SpotPriceTypeDef]:
    """Return the last record of each type and zone. Older prices do not count, however low."""
    last: dict[tuple[str, str], SpotPriceTypeDef] = {}
    for record in records:
        where = record.get("InstanceType", ""), record.get("AvailabilityZone", "")
        if where not in last or _timestamp(record) > _timestamp(last[where]):
            last[where] = record
    return last


def _cheapest(records: Iterable[SpotPriceTypeDef], since_s: float, until_s: float) -> PriceHistory:
    """Return the lowest price of all types and zones, at each change."""
    now: dict[tuple[str, str], float] = {}
    prices: dict[float, float] = {}
    for record in sorted(records, key=_timestamp):
        where = record.get("InstanceType", ""), record.get("AvailabilityZone", "")
        now[where] = _usd_per_hour(record)
        prices[max(_timestamp(record).timestamp(), since_s)] = min(now.values())
    return PriceHistory(tuple(prices), tuple(prices.values()), until_s)


def _timestamp(record: SpotPriceTypeDef) -> datetime:
    return record.get("Timestamp", _LONG_AGO)


def _usd_per_hour(record: SpotPriceTypeDef) -> float:
    try:
        return float(record.get("SpotPrice", ""))
    except ValueError:
        return math.nan
