"""Addresses and credentials for Kafka, from the settings."""

from __future__ import annotations

import base64
import os
import time

import pytest

from common.config.settings import Settings, read_settings
from common.errors import UserError
from common.kafka.opening import kafka_settings
from common.kafka.settings import (
    client_properties,
    member_properties,
    reader_properties,
    tail_properties,
    writer_properties,
)
from tests.metadata_server import MetadataServer


def test_rack_comes_from_the_settings_or_the_zone_of_the_machine() -> None:
    assert kafka_settings(Settings(kafka_client_rack="b"), "w1").rack == "b"
    with MetadataServer() as server:
        auto = Settings(kafka_client_rack="auto", metadata_endpoint=server.endpoint)
        server.place("use1-az4")
        assert kafka_settings(auto, "w1").rack == "use1-az4"


@pytest.mark.parametrize("zone", ["", "no zone", "<html>"])
def test_unknown_zone_means_no_rack_and_a_warning(
    zone: str, caplog: pytest.LogCaptureFixture
) -> None:
    with MetadataServer() as server:
        auto = Settings(kafka_client_rack="auto", metadata_endpoint=server.endpoint)
        server.place(zone)
        assert kafka_settings(auto, "w1").rack == ""
        server.go_away()
        assert kafka_settings(auto, "w1").rack == ""
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert all("client_rack_unknown" in str(record.msg) for record in caplog.records)


def test_only_stream_readers_use_the_rack() -> None:
    kafka = kafka_settings(Settings(kafka_client_rack="b"), "w1")
    assert member_properties(kafka, "g", "m", hold=False)["client.rack"] == "b"
    # Readers of batches use the rack, too.
    assert reader_properties(kafka)["client.rack"] == "b"
    assert tail_properties(kafka)["client.rack"] == ""


def test_client_property_overrides_our_default() -> None:
    settings = read_settings({"DOLL_KAFKA_LINGER_MS": "50", "DOLL_KAFKA_SOCKET_TIMEOUT_MS": "3000"})
    kafka = kafka_settings(settings, "w1")
    assert writer_properties(kafka)["linger.ms"] == "50"
    assert client_properties(kafka)["socket.timeout.ms"] == "3000"


@pytest.mark.parametrize(
    ("bootstrap", "region"),
    [
        ("b-1.demo.x1.c2.kafka.us-east-1.amazonaws.com:9098,b-2:9098", "us-east-1"),
        ("boot-x.c1.kafka-serverless.eu-west-1.amazonaws.com:9098", "eu-west-1"),
        # The brokers have a private name, so the AWS settings give the region.
        ("kafka.internal:9098", "ap-south-1"),
    ],
)
def test_msk_token_is_signed_for_the_region_of_the_brokers(
    bootstrap: str, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "its-secret-key")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "ap-south-1")
    settings = read_settings({"DOLL_KAFKA": bootstrap, "DOLL_KAFKA_SASL_MECHANISM": "AWS_MSK_IAM"})
    kafka = kafka_settings(settings, "w1")
    assert kafka.properties["sasl.mechanism"] == "OAUTHBEARER"
    assert kafka.token is not None
    token, until_s = kafka.token("")
    request = base64.urlsafe_b64decode(token + "==").decode()
    assert request.startswith(f"https://kafka.{region}.amazonaws.com/?Action=kafka-cluster")
    assert "its-secret-key" not in request
    assert 0 < until_s - time.time() <= 900
    assert client_properties(kafka)["oauth_cb"] is kafka.token


def test_msk_brokers_of_unknown_region_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    settings = read_settings({"DOLL_KAFKA": "k:1", "DOLL_KAFKA_SASL_MECHANISM": "AWS_MSK_IAM"})
    with pytest.raises(UserError, match="set AWS_DEFAULT_REGION"):
        kafka_settings(settings, "w1")


def test_explicit_kafka_address_is_passed_on_to_child_processes() -> None:
    default = Settings()
    named = Settings(kafka=default.kafka)
    assert [kafka_settings(each, "w1").named for each in (default, named)] == [False, True]
    assert kafka_settings(read_settings(named.environ()), "w1").named
    assert not kafka_settings(read_settings(default.environ()), "w1").named
