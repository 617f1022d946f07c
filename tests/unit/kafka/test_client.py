"""Errors of Kafka's client, and those that a retry cannot fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from confluent_kafka import Consumer, KafkaError, Message

from common.core.spans import Partition
from common.errors import OutsideError, UnavailableError, UserError
from common.kafka.client import (
    Complaints,
    are_records,
    epochs_of,
    fetched,
    made,
    offsets_of,
    runs_of,
)

if TYPE_CHECKING:
    from common.kafka.client import ClientMessage

WRONG_PASSWORD = KafkaError(
    KafkaError._AUTHENTICATION,  # noqa: SLF001 -- the library's name for its own error
    "sasl_ssl://k:9092/bootstrap: SASL authentication error: no (after 31ms in state AUTH_REQ, 2"
    " identical error(s) suppressed)",
)
ALL_DOWN = KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down")  # noqa: SLF001 -- as above
NO_CONNECTION = KafkaError(KafkaError._TRANSPORT, "k:9092: connection refused")  # noqa: SLF001 -- as above


def complaints(*errors: KafkaError) -> Complaints:
    complained = Complaints()
    for error in errors:
        complained(error)
    return complained


@pytest.mark.parametrize("then", [(), (ALL_DOWN,), (NO_CONNECTION, ALL_DOWN)])
def test_refused_password_is_reported_with_a_remedy(then: tuple[KafkaError, ...]) -> None:
    with pytest.raises(
        OutsideError, match=r"SASL auth.*: no \(check .*DOLL_KAFKA_SASL_PASS"
    ) as raised:
        complaints(WRONG_PASSWORD, *then).raise_shut_out("asking")
    assert not raised.value.retriable


def test_caller_that_may_wait_gets_the_reason_once_per_outage() -> None:
    complained = complaints(WRONG_PASSWORD, ALL_DOWN)
    with pytest.raises(UnavailableError, match=r"^asking: Kafka refuses the connection") as first:
        complained.raise_away("asking")
    complained.raise_away("asking")
    complained(ALL_DOWN)
    with pytest.raises(UnavailableError) as second:
        complained.raise_away("asking")
    assert str(first.value) == str(second.value)


def test_unreachable_brokers_replace_an_earlier_refusal() -> None:
    complained = complaints(WRONG_PASSWORD, NO_CONNECTION, ALL_DOWN)
    with pytest.raises(UnavailableError, match="1/1 brokers are down"):
        complained.raise_away("asking")


def test_unreachable_broker_is_not_a_refusal() -> None:
    complained = complaints(NO_CONNECTION, ALL_DOWN)
    complained.raise_shut_out("asking")
    with pytest.raises(UnavailableError, match="1/1 brokers are down"):
        complained.raise_away("asking")


def test_invalid_client_setting_is_named_without_its_value() -> None:
    with pytest.raises(UserError, match=r'^DOLL_KAFKA_.*property "security.protocol"') as raised:
        made(Consumer, {"group.id": "g", "security.protocol": 'hun"ter2'})
    assert "ter2" not in str(raised.value)
    assert raised.value.__suppress_context__


def record(topic: str, partition: int, offset: int, **others: object) -> ClientMessage:
    made_of: Any = {"value": f"{topic}[{partition}]@{offset}".encode(), **others}
    return cast("ClientMessage", Message(topic, partition, offset, **made_of))


def test_runs_are_consecutive_records_of_one_partition() -> None:
    # a[0] a[0] | b[0] | b[1] | a[0]
    messages = [
        record("a", 0, 0),
        record("a", 0, 1),
        record("b", 0, 5),
        record("b", 1, 7),
        record("a", 0, 2),
    ]
    assert list(runs_of(messages)) == [
        (("a", 0), messages[:2]),
        (("b", 0), messages[2:3]),
        (("b", 1), messages[3:4]),
        (("a", 0), messages[4:]),
    ]
    assert list(runs_of([])) == []


def test_fields_of_a_run_match_those_of_each_record() -> None:
    run = [
        record("a", 0, 4, leader_epoch=3),
        record("a", 0, 6),
        record("a", 0, 7, value=None, leader_epoch=5),
    ]
    assert offsets_of(run) == [4, 6, 7]
    assert fetched(Partition("a", 0), run).values == [b"a[0]@4", b"a[0]@6", None]
    assert epochs_of(run) == [3, -1, 5]
    assert epochs_of(run[::2]) == [3, 5]
    assert are_records(run)
    assert not are_records([*run, record("a", 0, 8, error=NO_CONNECTION)])
