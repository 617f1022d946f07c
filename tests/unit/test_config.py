"""Settings come from the environment once, and go back into it for children."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Settings, read_settings
from common.errors import UserError

FULL = {
    "DOLL_KAFKA": "a:9092,b:9092",
    "DOLL_KAFKA_GROUP_PROTOCOL": "consumer",
    "DOLL_KAFKA_REPLICATION": "3",
    "DOLL_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
    "DOLL_KAFKA_SASL_USERNAME": "doll",
    "DOLL_KAFKA_SASL_PASSWORD": "secret",
    "DOLL_REDIS": "rediss://:secret@r:6379/0",
    "DOLL_BLOBS": "s3://bucket/models",
    "DOLL_S3_ENDPOINT": "http://localhost:9000",
    "DOLL_TASKS": "a.b:C, d:E",
    "DOLL_DEVICE": "cpu",
    "DOLL_THREADS": "2",
    "DOLL_NOTICES": "ec2",
    "DOLL_METADATA_ENDPOINT": "http://[fd00:ec2::254]:80",
    "DOLL_ON_REBALANCE": "stay",
    "DOLL_LEAVE_S": "7.5",
    "DOLL_METRICS_PORT": "9464",
    "DOLL_METRICS_HOST": "::1",
    "DOLL_LOG_FORMAT": "json",
    "DOLL_LOG_LEVEL": "debug",
}


def test_every_variable_has_its_place() -> None:
    settings = read_settings(FULL)
    assert settings.kafka == "a:9092,b:9092"
    assert settings.kafka_replication == 3
    assert settings.kafka_security == {
        "security.protocol": "SASL_SSL",
        "sasl.username": "doll",
        "sasl.password": "secret",
    }
    assert settings.tasks == ("a.b:C", "d:E")
    assert settings.threads == 2
    assert settings.leave_s == 7.5


def test_an_empty_environment_is_one_machine_with_kafka_and_redis() -> None:
    assert read_settings({}) == Settings()
    assert read_settings({"DOLL_KAFKA": "", "DOLL_THREADS": "", "PATH": "/bin"}) == Settings()


def test_a_child_gets_the_same_settings() -> None:
    settings = read_settings(FULL)
    assert read_settings(settings.environ()) == settings
    assert Settings().environ() == {}


def test_an_embedded_broker_is_named_by_its_socket() -> None:
    assert read_settings({"DOLL_KAFKA": "embedded:/run/k.sock"}).embedded_kafka == "/run/k.sock"
    assert read_settings({}).embedded_kafka == ""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DOLL_THREADS", "many", 'DOLL_THREADS: must be a whole number, got "many"'),
        ("DOLL_THREADS", "-1", 'DOLL_THREADS: must be at least 0, got "-1"'),
        ("DOLL_DEVICE", "tpu", "DOLL_DEVICE: must be 'auto', 'cpu' or 'cuda', got \"tpu\""),
        ("DOLL_BLOBS", "/tmp", "DOLL_BLOBS: must be file:///directory or s3://bucket/prefix, g"),  # noqa: S108 -- only a text
        ("DOLL_NOTICES", "gce", "DOLL_NOTICES: must be 'none' or 'ec2', got \"gce\""),
        ("DOLL_ON_REBALANCE", "no", "DOLL_ON_REBALANCE: must be 'leave' or 'stay', got \"no\""),
        ("DOLL_LEAVE_S", "-1", 'DOLL_LEAVE_S: must be at least 0.0, got "-1"'),
        ("DOLL_LEAVE_S", "inf", 'DOLL_LEAVE_S: must be a finite number, got "inf"'),
        ("DOLL_REDIS", "r:6379", "DOLL_REDIS: must be redis://host:port/db, rediss://... or unix"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_variable(
    name: str, value: str, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        read_settings({name: value})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "endpoint", ["http://169.254.169.254", "http://[fd00:ec2::254]/", "http://metadata.local:8080"]
)
def test_a_metadata_service_is_named_by_host_and_port(endpoint: str) -> None:
    assert read_settings({"DOLL_METADATA_ENDPOINT": endpoint}).metadata_endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        *(
            "169.254.169.254",
            "https://a",
            "http://",
            "http://a/latest",
            "http://a:0",
            "http://a..b",
        ),
        *(
            "http://a:70000",
            "http://u@a",
            "http://a b",
            "http://ä",
            "http://" + 64 * "a",
            "http://[",
        ),
    ],
)
def test_what_names_no_metadata_service_is_refused(endpoint: str) -> None:
    with pytest.raises(UserError, match="DOLL_METADATA_ENDPOINT: "):
        read_settings({"DOLL_METADATA_ENDPOINT": endpoint})


def test_passwords_are_not_shown() -> None:
    assert "secret" not in repr(read_settings(FULL))


@given(st.dictionaries(st.sampled_from(sorted(FULL)), st.text(max_size=10)))
def test_whatever_the_environment_holds_it_is_settings_or_refused(environ: dict[str, str]) -> None:
    try:
        settings = read_settings(environ)
    except UserError as error:
        assert "DOLL_" in str(error)  # noqa: PT017 -- both ends are right
    else:
        assert read_settings(settings.environ()) == settings
