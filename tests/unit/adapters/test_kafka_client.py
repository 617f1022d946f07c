"""What Kafka's client complains about, and which of it waiting will not mend."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, KafkaError

from common.adapters.kafka.client import Complaints, made
from common.errors import OutsideError, UnavailableError, UserError

WRONG_PASSWORD = KafkaError(
    KafkaError._AUTHENTICATION,  # noqa: SLF001 -- the library's name for its own error
    "sasl_ssl://k:9092/bootstrap: SASL authentication error: no (after 31ms in state AUTH_REQ, 2"
    " identical error(s) suppressed)",
)
ALL_DOWN = KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down")  # noqa: SLF001 -- likewise
NO_CONNECTION = KafkaError(KafkaError._TRANSPORT, "k:9092: connection refused")  # noqa: SLF001 -- likewise


def complaints(*errors: KafkaError) -> Complaints:
    told = Complaints()
    for error in errors:
        told(error)
    return told


@pytest.mark.parametrize("then", [(), (ALL_DOWN,), (NO_CONNECTION, ALL_DOWN)])
def test_a_refused_password_is_told_with_what_to_do(then: tuple[KafkaError, ...]) -> None:
    with pytest.raises(
        OutsideError, match=r"SASL auth.*: no \(check .*DOLL_KAFKA_SASL_PASS"
    ) as told:
        complaints(WRONG_PASSWORD, *then).raise_shut_out("asking")
    assert not told.value.retriable


def test_who_may_wait_hears_the_reason_once_for_each_time() -> None:
    told = complaints(WRONG_PASSWORD, ALL_DOWN)
    with pytest.raises(UnavailableError, match=r"^asking: Kafka does not let us in") as first:
        told.raise_away("asking")
    told.raise_away("asking")
    told(ALL_DOWN)
    with pytest.raises(UnavailableError) as second:
        told.raise_away("asking")
    assert str(first.value) == str(second.value)


def test_brokers_that_are_down_are_no_longer_said_to_refuse_us() -> None:
    told = complaints(WRONG_PASSWORD, NO_CONNECTION, ALL_DOWN)
    with pytest.raises(UnavailableError, match="1/1 brokers are down"):
        told.raise_away("asking")


def test_who_only_found_nobody_was_not_refused() -> None:
    told = complaints(NO_CONNECTION, ALL_DOWN)
    told.raise_shut_out("asking")
    with pytest.raises(UnavailableError, match="1/1 brokers are down"):
        told.raise_away("asking")


def test_a_setting_that_the_client_refuses_is_named_without_its_value() -> None:
    with pytest.raises(UserError, match=r'^DOLL_KAFKA_.*property "security.protocol"') as told:
        made(Consumer, {"group.id": "g", "security.protocol": 'hun"ter2'})
    assert "ter2" not in str(told.value)
    assert told.value.__suppress_context__
