"""Records of the plans topic as JSON: they are read as written, and invalid ones are rejected."""

from __future__ import annotations

import msgspec
import pytest

from common.errors import FutureFormatError, WireError
from common.spot.plans import decode_plan, encode_plan
from common.spot.provisioning.records import (
    EstimateRecord,
    LaunchRequested,
    Left,
    OfferCount,
    OfferPrice,
    Planned,
    PlanRecord,
    Priced,
    ReplanAsked,
    Reviewed,
    Settled,
    SlotAssigned,
    Started,
    client_token,
)
from tests.unit.spot.provisioning.examples import T0, ended, lead, ordered, planned, priced, started


def planned_by_count(*machines: OfferCount) -> Planned:
    """Return a decision with numbers of machines."""
    return msgspec.structs.replace(planned(), places=(), machines=machines)


RECORDS: tuple[PlanRecord, ...] = (
    lead(),
    priced(),
    planned(),
    ordered(1),
    started(1),
    Started(0, 1, T0, "m-1", "c5.large", "1a", 0.1),
    Priced(0, T0, {}, (OfferPrice("spot", "c5.large", "1a", 0.1),)),
    ended(1),
    Reviewed(0, T0, 3, 7.0, 4, 4, 0.5, 0.9, 1.1, {"x": EstimateRecord(1.0, 0.1, 0.8, 1.2)}, "low"),
    ReplanAsked(T0, "ada", "to see"),
    Settled(0, T0, "done", 1.0, 2.0, None),
    LaunchRequested(0, 1, T0, None, "spot", "digits-m1", bid_usd_per_hour=0.1),
    SlotAssigned(0, T0, 0, 1, "digits-w0"),
    Left(0, T0, 1),
    planned_by_count(OfferCount("spot", 3), OfferCount("spot", 0, "c5.large", "1a", 0.1)),
)
replace = msgspec.structs.replace


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_plan_records_round_trip(record: PlanRecord) -> None:
    assert decode_plan(encode_plan(record)) == record


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (Priced(0, T0, {}), "Priced.usd_per_hour"),
        (replace(planned(), places=(2, 0)), "Planned.places"),
        (planned_by_count(OfferCount("moon", 1)), "Planned.machines"),
        (replace(planned(), machines=(OfferCount("spot", 1),)), "Planned.machines"),
        (replace(planned(), expected_cost_usd=float("inf")), "expected_cost_usd"),
        (replace(ordered(1), bid_usd_per_hour=float("nan")), "is read as another message"),
    ],
)
def test_invalid_plan_record_is_rejected_by_its_field(record: PlanRecord, expected: str) -> None:
    with pytest.raises(WireError, match=expected):
        encode_plan(record)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"type":"taken"}', b'{"type":"lead"}'])
def test_decode_plan_of_invalid_bytes_raises_wire_error(data: bytes) -> None:
    with pytest.raises(WireError, match="plan: "):
        decode_plan(data)


def test_plan_record_of_a_later_format_raises_future_format_error() -> None:
    with pytest.raises(FutureFormatError, match="of format 2, expected at most 1"):
        decode_plan(b'{"type":"planned","format":2}')


def test_client_token_is_unique_and_at_most_64_characters() -> None:
    tokens = {client_token(job, launch) for job in ("a", "a/1") for launch in (1, 11)}

    assert len(tokens) == 4
    assert all(len(token) <= 64 for token in tokens)
    assert client_token("a", 1) == client_token("a", 1)
