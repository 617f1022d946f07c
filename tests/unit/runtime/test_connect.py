"""Settings and the market file select the adapter behind each port."""

from __future__ import annotations

import base64
import os
import tempfile
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from common.config.settings import Settings
from common.errors import OutsideError, UnavailableError, UserError
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

ON_DEMAND = OnDemandPool(usd_per_hour=0.3)
EC2 = Ec2Provider(region="eu-central-1", launch_template="doll-worker")
PRICES = TraceSpec(file="prices.csv", start_s=0.0)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "prices.csv").write_text("seconds,usd\n0,0.1\n60,0.2\n120,0.3\n")
    market = tmp_path / "market.yaml"
    market.write_text("")
    return Settings(market=str(market), fleet_directory=str(tmp_path / "fleet"))


def test_market_selects_the_fleet(settings: Settings) -> None:
    with closing(open_fleet(settings, Market(on_demand=ON_DEMAND), "digits")) as fleet:
        assert isinstance(fleet, ProcessFleet)
        assert fleet.machines() == ()
    market = Market(fleet="ec2", ec2=EC2, on_demand=ON_DEMAND)
    with closing(open_fleet(settings, market, "digits")) as fleet:
        assert isinstance(fleet, Ec2Fleet)


def test_each_kafka_has_its_own_fleet_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    market = Market(on_demand=ON_DEMAND)
    for kafka in ("one:9092", "other:9092", "one:9092"):
        open_fleet(Settings(kafka=kafka), market, "digits").close()
    found = [path.name for path in tmp_path.iterdir()]
    assert len(found) == 2
    assert all(name.startswith(f"doll-fleet-{os.getuid()}-") for name in found)


def test_availability_file_is_found_beside_the_market_file(settings: Settings) -> None:
    provider = ProcessProvider(availability=PRICES)
    market = Market(on_demand=ON_DEMAND, process=provider)
    open_fleet(settings, market, "digits").close()
    lost = Market(on_demand=ON_DEMAND, process=ProcessProvider(availability=TraceSpec(file="no")))
    with pytest.raises(UserError, match="no"):
        open_fleet(settings, lost, "digits")


def test_every_pool_has_a_price_from_any_source(settings: Settings) -> None:
    replayed = SpotPool(name="replayed", usd_per_hour=PRICES)
    fixed = SpotPool(name="fixed", usd_per_hour=0.15)
    market = Market(on_demand=ON_DEMAND, spot=(replayed, fixed))
    prices = by_pool(open_prices(settings, market).look())
    assert prices.keys() == {"on-demand", "replayed", "fixed"}
    assert (prices["on-demand"], prices["fixed"]) == (0.3, 0.15)
    assert prices["replayed"] in {0.1, 0.2, 0.3}


def test_replay_starts_at_market_file_change_or_configured_time(
    settings: Settings,
) -> None:
    """Both replays begin in the future, so the recording's first price holds now."""
    pool = SpotPool(usd_per_hour=PRICES.model_copy(update={"start_s": 130.0}))
    market = Market(on_demand=ON_DEMAND, spot=(pool,))
    later_s = Path(settings.market).stat().st_mtime + 1e6
    os.utime(settings.market, (later_s, later_s))
    assert open_prices(settings, market).look()[Offer("spot")] == 0.3
    replayed = market.model_copy(update={"replayed_from_s": later_s})
    os.utime(settings.market, (0.0, 0.0))
    assert open_prices(settings, replayed).look()[Offer("spot")] == 0.3


def test_replay_needs_the_market_file_or_a_start_time(settings: Settings) -> None:
    market = Market(on_demand=ON_DEMAND, spot=(SpotPool(usd_per_hour=PRICES),))
    Path(settings.market).unlink()
    with pytest.raises(UserError, match=r"DOLL_MARKET.*market\.yaml"):
        open_prices(settings, market)
    assert open_prices(settings, market.model_copy(update={"replayed_from_s": 0.0})).look()


def test_price_history_is_requested_from_ec2(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, settings.market)  # a file without credentials
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    pool = SpotPool(usd_per_hour="history", instance_types=("c5.xlarge",))
    prices = open_prices(settings, Market(on_demand=ON_DEMAND, spot=(pool,), ec2=EC2))
    with pytest.raises(OutsideError, match=r"'spot' on EC2 in eu-central-1.*credentials"):
        prices.look()


def test_directory_prepared_by_someone_else_is_refused(
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


class Asked(BaseHTTPRequestHandler):
    """A server that records the clients, and has no data."""

    shown: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        """Answer a request."""
        self.shown.append(self.headers["Authorization"])
        self.send_error(500)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- as above
        """Log nothing."""


def test_tracking_sends_the_configured_credentials() -> None:
    server = HTTPServer(("127.0.0.1", 0), Asked)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    settings = [
        Settings(mlflow=url, mlflow_token="a"),  # noqa: S106 -- of a test
        Settings(mlflow=url, mlflow_username="a", mlflow_password="b"),  # noqa: S106 -- as above
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
