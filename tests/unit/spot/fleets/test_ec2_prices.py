"""EC2's price history: the request, and the record that has a machine's current price."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import boto3
import pytest
from botocore.stub import ANY, Stubber

from common.errors import OutsideError, UnavailableError
from common.spot.fleets.ec2.prices import Ec2Prices
from common.spot.machines import Offer, PriceHistory, by_pool
from common.spot.market.market_file import Ec2Provider, SpotPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from types_boto3_ec2 import EC2Client

NOW_S = 1_800_000_000.0
CALL = "describe_spot_price_history"
PROVIDER = Ec2Provider(region="eu-central-1", launch_template="doll-worker")


SMALL = SpotPool(usd_per_hour="history", instance_types=("c5.large", "c6i.large"))
BIG = SpotPool(usd_per_hour="history", instance_types=("c5.xlarge",), zones=("eu-central-1a",))


@pytest.fixture(scope="module")
def client() -> EC2Client:
    return boto3.client(
        "ec2",
        region_name="eu-central-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",  # noqa: S106 -- no secret
    )


@pytest.fixture
def ec2(client: EC2Client) -> Iterator[Stubber]:
    with Stubber(client) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


@pytest.fixture
def prices(client: EC2Client) -> Ec2Prices:
    return Ec2Prices(PROVIDER, {"small": SMALL, "big": BIG}, lambda: NOW_S, client)


def record(
    price: str, zone: str = "a", kind: str = "c5.large", before_s: float = 60.0
) -> dict[str, object]:
    return {
        "SpotPrice": price,
        "AvailabilityZone": f"eu-central-1{zone}",
        "InstanceType": kind,
        "Timestamp": datetime.fromtimestamp(NOW_S - before_s, UTC),
    }


def answers(ec2: Stubber, *histories: list[dict[str, object]]) -> None:
    for history in histories:
        ec2.add_response(CALL, {"SpotPriceHistory": history})


def test_prices_are_requested_by_types_and_zones_of_each_pool(
    ec2: Stubber, prices: Ec2Prices
) -> None:
    common = {"StartTime": datetime.fromtimestamp(NOW_S, UTC), "ProductDescriptions": ANY}
    zone = {"Name": "availability-zone", "Values": ["eu-central-1a"]}
    for types, filters in ((["c5.large", "c6i.large"], []), (["c5.xlarge"], [zone])):
        ec2.add_response(
            CALL,
            {"SpotPriceHistory": [record("0.05")]},
            {"InstanceTypes": types, "Filters": filters, **common},
        )
    assert by_pool(prices.look()) == {"small": 0.05, "big": 0.05}


def test_pool_price_is_the_lowest_of_the_latest_per_zone_and_type(
    ec2: Stubber, prices: Ec2Prices
) -> None:
    small = [
        record("0.010", "a", before_s=7200.0),  # outdated
        record("0.052", "a", before_s=60.0),
        record("0.051", "b", before_s=3600.0),
        record("0.090", "a", kind="c6i.large"),
    ]
    answers(ec2, small, [record("0.2")])
    assert by_pool(prices.look()) == {"small": 0.051, "big": 0.2}
    answers(ec2, small[::-1], [record("0.2")])
    assert prices.look() == {
        Offer("small"): 0.051,
        Offer("small", "c5.large", "eu-central-1a"): 0.052,
        Offer("small", "c5.large", "eu-central-1b"): 0.051,
        Offer("small", "c6i.large", "eu-central-1a"): 0.09,
        Offer("big"): 0.2,
        Offer("big", "c5.large", "eu-central-1a"): 0.2,
    }


def test_pool_history_is_that_of_its_cheapest_machine(ec2: Stubber, prices: Ec2Prices) -> None:
    day_s = 86400.0
    small = [
        record("0.05", "a", before_s=100 * day_s),  # in force 90 days ago
        record("0.03", "b", before_s=10 * day_s),
        record("0.08", "a", before_s=5 * day_s),
        record("0.09", "b", before_s=day_s),
    ]
    answers(ec2, small[::-1], [record("0.2", before_s=95 * day_s)])
    past = prices.past()
    begins_s = NOW_S - 90 * day_s
    times_s = begins_s, NOW_S - 10 * day_s, NOW_S - 5 * day_s, NOW_S - day_s
    assert past["small"] == PriceHistory(times_s, (0.05, 0.03, 0.03, 0.08), NOW_S)
    assert past["big"] == PriceHistory((begins_s,), (0.2,), NOW_S)


def test_prices_are_read_from_all_pages(ec2: Stubber, prices: Ec2Prices) -> None:
    ec2.add_response(CALL, {"SpotPriceHistory": [record("0.05")], "NextToken": "more"})
    answers(ec2, [record("0.04", "b")], [record("0.2")])
    assert by_pool(prices.look()) == {"small": 0.04, "big": 0.2}


@pytest.mark.parametrize("price", ["", "cheap", "0", "-1", "nan", "inf"])
def test_invalid_price_raises_unavailable_error(
    ec2: Stubber, prices: Ec2Prices, price: str
) -> None:
    answers(ec2, [record("0.05", "b"), record(price)])
    with pytest.raises(UnavailableError, match="small"):
        prices.look()


def test_empty_price_history_raises_unavailable_error(ec2: Stubber, prices: Ec2Prices) -> None:
    answers(ec2, [])
    with pytest.raises(UnavailableError, match=r"c5\.large, c6i\.large in eu-central-1"):
        prices.look()


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("RequestLimitExceeded", 503, UnavailableError),
        ("InternalError", 500, UnavailableError),
        ("UnauthorizedOperation", 403, OutsideError),
        ("InvalidParameterValue", 400, OutsideError),
    ],
)
def test_unavailable_and_denied_price_requests_raise_different_errors(
    ec2: Stubber, prices: Ec2Prices, code: str, status: int, kind: type[OutsideError]
) -> None:
    ec2.add_client_error(CALL, code, "because", http_status_code=status)
    with pytest.raises(OutsideError, match=code) as caught:
        prices.look()
    assert type(caught.value) is kind
