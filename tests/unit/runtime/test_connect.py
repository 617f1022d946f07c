"""Which adapter stands behind what the settings and the market name."""

from __future__ import annotations

import base64
import os
import socket
import tempfile
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from common.config.settings import Settings, read_settings
from common.errors import OutsideError, UnavailableError, UserError
from common.kafka.opening import kafka_settings
from common.kafka.settings import (
    client_properties,
    member_properties,
    reader_properties,
    tail_properties,
    writer_properties,
)
from common.redis.memory import MemoryBoards, MemoryRedis
from common.runtime.connect import advertised, open_groups
from common.spot.connect import open_fleet, open_prices
from common.spot.fleets.ec2.fleet import Ec2Fleet
from common.spot.fleets.local.fleet import ProcessFleet
from common.spot.machines import Offer, by_pool
from common.spot.market.market_file import (
    Ec2Provider,
    Market,
    OnDemandPool,
    ProcessProvider,
    SpotPool,
)
from common.spot.traces.spec import TraceSpec
from common.tracking.mlflow import open_tracking
from tests.metadata_server import MetadataServer

ON_DEMAND = OnDemandPool(usd_per_hour=0.3)
EC2 = Ec2Provider(region="eu-central-1", launch_template="doll-worker")
PRICES = TraceSpec(file="prices.csv", start_s=0.0)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "prices.csv").write_text("seconds,usd\n0,0.1\n60,0.2\n120,0.3\n")
    market = tmp_path / "market.yaml"
    market.write_text("")
    return Settings(market=str(market), fleet_directory=str(tmp_path / "fleet"))


def test_machines_are_rented_where_the_market_says(settings: Settings) -> None:
    with closing(open_fleet(settings, Market(on_demand=ON_DEMAND), "digits")) as fleet:
        assert isinstance(fleet, ProcessFleet)
        assert fleet.machines() == ()
    market = Market(fleet="ec2", ec2=EC2, on_demand=ON_DEMAND)
    with closing(open_fleet(settings, market, "digits")) as fleet:
        assert isinstance(fleet, Ec2Fleet)


def test_processes_of_one_kafka_have_a_directory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    market = Market(on_demand=ON_DEMAND)
    for kafka in ("one:9092", "other:9092", "one:9092"):
        open_fleet(Settings(kafka=kafka), market, "digits").close()
    found = [path.name for path in tmp_path.iterdir()]
    assert len(found) == 2
    assert all(name.startswith(f"doll-fleet-{os.getuid()}-") for name in found)


def test_a_recorded_availability_lies_beside_the_market_file(settings: Settings) -> None:
    provider = ProcessProvider(availability=PRICES)
    market = Market(on_demand=ON_DEMAND, process=provider)
    open_fleet(settings, market, "digits").close()
    lost = Market(on_demand=ON_DEMAND, process=ProcessProvider(availability=TraceSpec(file="no")))
    with pytest.raises(UserError, match="no"):
        open_fleet(settings, lost, "digits")


def test_every_pool_has_its_price_wherever_that_comes_from(settings: Settings) -> None:
    replayed = SpotPool(name="replayed", usd_per_hour=PRICES)
    fixed = SpotPool(name="fixed", usd_per_hour=0.15)
    market = Market(on_demand=ON_DEMAND, spot=(replayed, fixed))
    prices = by_pool(open_prices(settings, market).look())
    assert prices.keys() == {"on-demand", "replayed", "fixed"}
    assert (prices["on-demand"], prices["fixed"]) == (0.3, 0.15)
    assert prices["replayed"] in {0.1, 0.2, 0.3}


def test_a_replay_began_when_the_market_file_was_changed_or_when_it_says(
    settings: Settings,
) -> None:
    """Both in the future, where the first price holds, and long past."""
    pool = SpotPool(usd_per_hour=PRICES.model_copy(update={"start_s": 130.0}))
    market = Market(on_demand=ON_DEMAND, spot=(pool,))
    later_s = Path(settings.market).stat().st_mtime + 1e6
    os.utime(settings.market, (later_s, later_s))
    assert open_prices(settings, market).look()[Offer("spot")] == 0.3
    replayed = market.model_copy(update={"replayed_from_s": later_s})
    os.utime(settings.market, (0.0, 0.0))
    assert open_prices(settings, replayed).look()[Offer("spot")] == 0.3


def test_a_replay_needs_the_market_file_or_its_word(settings: Settings) -> None:
    market = Market(on_demand=ON_DEMAND, spot=(SpotPool(usd_per_hour=PRICES),))
    Path(settings.market).unlink()
    with pytest.raises(UserError, match=r"DOLL_MARKET.*market\.yaml"):
        open_prices(settings, market)
    assert open_prices(settings, market.model_copy(update={"replayed_from_s": 0.0})).look()


def test_history_is_asked_of_ec2(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, settings.market)  # which holds none
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    pool = SpotPool(usd_per_hour="history", instance_types=("c5.xlarge",))
    prices = open_prices(settings, Market(on_demand=ON_DEMAND, spot=(pool,), ec2=EC2))
    with pytest.raises(OutsideError, match=r"'spot' on EC2 in eu-central-1.*credentials"):
        prices.look()


def test_a_directory_that_somebody_else_prepared_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_fleet(Settings(), Market(on_demand=ON_DEMAND), "digits").close()
    (ours,) = tmp_path.iterdir()
    assert ours.stat().st_mode & 0o777 == 0o700
    elsewhere = tmp_path / "elsewhere"
    ours.rename(elsewhere)
    ours.symlink_to(elsewhere)
    with pytest.raises(UserError, match="DOLL_FLEET_DIRECTORY"):
        open_fleet(Settings(), Market(on_demand=ON_DEMAND), "digits")


def test_where_we_are_is_what_the_settings_say_or_else_the_zone_of_the_machine() -> None:
    assert kafka_settings(Settings(kafka_client_rack="b"), "w1").rack == "b"
    with MetadataServer() as server:
        auto = Settings(kafka_client_rack="auto", metadata_endpoint=server.endpoint)
        server.place("use1-az4")
        assert kafka_settings(auto, "w1").rack == "use1-az4"


@pytest.mark.parametrize("zone", ["", "no zone", "<html>"])
def test_a_machine_whose_zone_nobody_knows_reads_from_anywhere_and_says_so(
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


def test_readers_of_streams_alone_look_for_replicas_where_we_are() -> None:
    kafka = kafka_settings(Settings(kafka_client_rack="b"), "w1")
    assert member_properties(kafka, "g", "m", hold=False)["client.rack"] == "b"
    assert reader_properties(kafka)["client.rack"] == "b"  # of batches, too
    assert tail_properties(kafka)["client.rack"] == ""


def test_a_property_of_the_client_is_worth_more_than_our_own_choice() -> None:
    settings = read_settings({"DOLL_KAFKA_LINGER_MS": "50", "DOLL_KAFKA_SOCKET_TIMEOUT_MS": "3000"})
    kafka = kafka_settings(settings, "w1")
    assert writer_properties(kafka)["linger.ms"] == "50"
    assert client_properties(kafka)["socket.timeout.ms"] == "3000"


@pytest.mark.parametrize(
    ("bootstrap", "region"),
    [
        ("b-1.demo.x1.c2.kafka.us-east-1.amazonaws.com:9098,b-2:9098", "us-east-1"),
        ("boot-x.c1.kafka-serverless.eu-west-1.amazonaws.com:9098", "eu-west-1"),
        ("kafka.internal:9098", "ap-south-1"),  # by a name of one's own: AWS says it
    ],
)
def test_a_token_for_amazon_msk_is_a_request_signed_for_the_region_of_the_brokers(
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


def test_brokers_of_amazon_msk_whose_region_nobody_names_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    settings = read_settings({"DOLL_KAFKA": "k:1", "DOLL_KAFKA_SASL_MECHANISM": "AWS_MSK_IAM"})
    with pytest.raises(UserError, match="set AWS_DEFAULT_REGION"):
        kafka_settings(settings, "w1")


@pytest.mark.parametrize(
    ("redis", "advertise", "found"),
    [
        ("unix:///run/redis.sock", "", "127.0.0.1"),
        ("redis://localhost:6379/0", "", "127.0.0.1"),
        ("redis://127.0.0.2", "", "127.0.0.1"),
        ("redis://127.0.0.1", "192.0.2.7", "192.0.2.7"),
        ("redis://127.0.0.1", "localhost", "127.0.0.1"),
    ],
)
def test_others_reach_a_machine_where_it_reaches_redis_unless_set_otherwise(
    redis: str, advertise: str, found: str
) -> None:
    assert advertised(Settings(redis=redis, advertise=advertise)) == found


def test_an_address_that_no_other_machine_reaches_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The name of a machine that resolves to loopback there, and a Redis elsewhere.
    class Elsewhere(socket.socket):
        def connect(self, address: object) -> None:
            del address

        def getsockname(self) -> tuple[str, int]:
            return "192.0.2.7", 1

    monkeypatch.setattr(socket, "socket", Elsewhere)

    with pytest.raises(UserError, match=r"localhost is 127.0.0.1 here.* such as 192.0.2.7"):
        advertised(Settings(redis="redis://192.0.2.1", advertise="localhost"))


def test_a_name_that_is_unknown_may_be_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(
        UnavailableError, match=r"DOLL_ADVERTISE: nobody.invalid cannot be resolved"
    ):
        advertised(Settings(redis="unix:///run/redis.sock", advertise="nobody.invalid"))


@pytest.mark.parametrize("value", ["http://here", "name@host", "a b"])
def test_an_advertised_address_is_a_host_alone(value: str) -> None:
    with pytest.raises(ValueError, match="must be a host's name or address, without a port"):
        Settings(advertise=value)


def test_groups_are_reached_at_the_advertised_address() -> None:
    rendezvous = MemoryBoards(MemoryRedis()).rendezvous("digits")
    groups = open_groups(Settings(advertise="127.0.0.3"), rendezvous)

    assert groups.address.startswith("127.0.0.3:")
    groups.close()


class Asked(BaseHTTPRequestHandler):
    """A server that writes down who asks, and knows nothing."""

    shown: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        """Answer."""
        self.shown.append(self.headers["Authorization"])
        self.send_error(500)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- likewise
        """Keep quiet."""


def test_who_we_are_in_mlflow_is_shown_to_the_server_of_the_settings() -> None:
    server = HTTPServer(("127.0.0.1", 0), Asked)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    settings = [
        Settings(mlflow=url, mlflow_token="a"),  # noqa: S106 -- of a test
        Settings(mlflow=url, mlflow_username="a", mlflow_password="b"),  # noqa: S106 -- likewise
        Settings(mlflow=url),
    ]
    for each in settings:
        tracking = open_tracking(each)
        assert tracking is not None
        with closing(tracking), pytest.raises(UnavailableError):
            tracking.begin("Default", "digits", {}, {})
    server.shutdown()
    thread.join()
    server.server_close()
    basic = base64.b64encode(b"a:b").decode()
    assert Asked.shown == ["Bearer a", f"Basic {basic}", None]
    assert open_tracking(Settings()) is None


def test_address_of_kafka_that_somebody_named_is_known_as_such_in_child_processes() -> None:
    default = Settings()
    named = Settings(kafka=default.kafka)
    assert [kafka_settings(each, "w1").named for each in (default, named)] == [False, True]
    assert kafka_settings(read_settings(named.environ()), "w1").named
    assert not kafka_settings(read_settings(default.environ()), "w1").named
