"""Records of the plans topic to bytes and back, as JSON; both ways they must make sense.

What is decided stays in Kafka for programs yet to be written; `common.wire.messages` says how
formats grow.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping

import msgspec

from common.errors import WireError
from common.spot.provisioning.records import (
    EstimateRecord,
    LaunchRequested,
    Planned,
    PlanRecord,
    Priced,
    Reviewed,
    Started,
)
from common.wire.messages import Codec

_LIMIT = 2**63  # Kafka's offsets are signed 64-bit

# What a field may be, by its name, which means the same in all records.
_LEAST = {"after": -1, "answers": -1, "launch": 1, "number": 1}
_COUNTS = {"term", "slot", "spot", "on_demand", "version", "running", "wanted", *_LEAST}
_NUMBERS = {
    *("at_s", "updates_left", "deadline_left_s", "spent_usd", "expected_cost_usd", "stability"),
    *("expected_runtime_s", "on_demand_only_usd", "predicted_usd"),
}
_WORDS = {"candidate", "policy", "why", "pool", "worker", "machine", "by"}


def _need(holds: bool, field: str, found: object, expected: str) -> None:  # noqa: FBT001 -- a condition
    if not holds:
        raise WireError(f"{field} is {reprlib.repr(found)}, expected {expected}")


def _check_number(field: str, value: float) -> None:
    _need(math.isfinite(value) and value >= 0, field, value, "a number of at least 0")


def _check_field(field: str, value: object) -> None:
    if field in _COUNTS and isinstance(value, int):
        least = _LEAST.get(field, 0)
        expected = f"a whole number from {least} to 2^63 - 1"
        _need(least <= value < _LIMIT, field, value, expected)
    elif field in _NUMBERS and isinstance(value, (int, float)):
        _check_number(field, value)
    elif field in _WORDS:
        _need(bool(value), field, value, "a text that is not empty")


def _check_prices(prices: Mapping[str, float]) -> None:
    for pool, usd_per_hour in prices.items():
        _need(bool(pool), "usd_per_hour", pool, "a pool's name")
        _check_number(f"usd_per_hour[{pool!r}]", usd_per_hour)


def _check_believed(believed: Mapping[str, EstimateRecord]) -> None:
    for name, belief in believed.items():
        for field in ("value", "std", "low", "high"):
            _check_number(f"believed[{name!r}].{field}", getattr(belief, field))


def _check_bid(field: str, usd_per_hour: float | None) -> None:
    if usd_per_hour is not None:
        _check_number(field, usd_per_hour)


def _check_planned(planned: Planned) -> None:
    _need(bool(planned.reason), "reason", planned.reason, "why this plan")
    _need(bool(planned.pools), "pools", planned.pools, "at least the on-demand one")
    known = len(planned.pools)
    for place in planned.places:
        _need(-1 <= place < known, "places", place, f"-1 or the index of one of {known} pools")
    for wanted in planned.machines:
        _need(wanted.pool in planned.pools, "machines", wanted, "one of the plan's pools")
        _need(wanted.count >= 0, "machines", wanted, "a count of at least 0")
        _check_bid("machines", wanted.bid_usd_per_hour)
    both = bool(planned.places and planned.machines)
    _need(not both, "machines", planned.machines, "none beside places")


def check_plan(record: PlanRecord) -> None:
    """Refuse what no provisioner can have decided, and nobody can have asked."""
    for field in record.__struct_fields__:
        _check_field(field, getattr(record, field))
    match record:
        case Planned():
            _check_planned(record)
            _check_prices(record.usd_per_hour)
            _check_believed(record.believed)
        case Priced():
            some = bool(record.usd_per_hour or record.offers)
            _need(some, "usd_per_hour", {}, "at least one pool")
            _check_prices(record.usd_per_hour)
            for offer in record.offers:
                _need(bool(offer.pool and offer.type), "offers", offer, "a pool and a type")
                _check_number(f"offers[{offer.type!r}]", offer.usd_per_hour)
        case Started(usd_per_hour=float(usd_per_hour)):
            _check_number("usd_per_hour", usd_per_hour)
        case LaunchRequested(bid_usd_per_hour=bid):
            _check_bid("bid_usd_per_hour", bid)
        case Reviewed():
            _check_believed(record.believed)


_PLAN = Codec("plan", msgspec.json.Decoder(PlanRecord), check_plan)

encode_plan, decode_plan = _PLAN.encode, _PLAN.decode
