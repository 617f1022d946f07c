"""Providers of machines for the contract of fleets: memory, local processes, and EC2 by Moto.

Moto ignores client tokens, and never lacks machines. `Ec2Server` stands before it: as on EC2, a
token launches machines once only, and machines may be lacking.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qsl

import boto3
import psutil
from botocore.config import Config
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
from werkzeug.test import Client
from werkzeug.wrappers import Request

from common.embedded.process import Child
from common.spot.fleets.ec2.fleet import Ec2Fleet
from common.spot.fleets.local.fleet import LocalMarket, ProcessFleet
from common.spot.fleets.local.table import Table
from common.spot.machines import Offer
from common.spot.market.market_file import (
    Ec2Provider,
    Market,
    OnDemandPool,
    ProcessProvider,
    SpotPool,
)
from tests.fakes.clock import ManualClock
from tests.memory_fleet import MemoryFleet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path
    from wsgiref.types import StartResponse, WSGIEnvironment

    from types_boto3_ec2 import EC2Client

    from common.spot.machines import Fleet, Prices

REGION = "us-east-1"
TEMPLATE = "doll-worker"
ON_DEMAND, SPOT = "on-demand", "spot"
NOWHERE = "nowhere"  # a pool in no market


class Provider(Protocol):
    """A provider of machines, and events there."""

    def fleet(self, job: str = "digits") -> Fleet:
        """Return a job's fleet, each time as in another process."""
        ...

    def preempt(self, launch: int) -> None:
        """Preempt a spot machine."""
        ...

    def fail(self, launch: int) -> None:
        """Let a machine end by itself."""
        ...

    def refuse(self) -> None:
        """Refuse further spot machines."""
        ...

    def offer(self) -> None:
        """Offer spot machines again."""
        ...

    def go_away(self) -> None:
        """Stop answering."""
        ...

    def come_back(self) -> None:
        """Answer again."""
        ...

    def close(self) -> None:
        """End all machines."""
        ...


class WithPrices(Provider, Protocol):
    """A provider whose machines may cost more than their bid."""

    def reprice(self, usd_per_hour: float) -> None:
        """Set the price of spot machines from now on."""
        ...


class Memory:
    """One provider and one fleet in memory, for one job."""

    def __init__(self) -> None:
        self._fleet = MemoryFleet(ManualClock(1e9))
        self._fleet.faults.broken.add(NOWHERE)
        self.preempt, self.fail = self._fleet.preempt, self._fleet.fail
        self.go_away, self.come_back = self._fleet.go_away, self._fleet.come_back

    def fleet(self, job: str = "digits") -> Fleet:
        """Return the one fleet, or an empty one for another job."""
        return self._fleet if job == "digits" else MemoryFleet(ManualClock(1e9))

    def refuse(self) -> None:
        """Refuse spot machines."""
        self._fleet.faults.without.add(SPOT)

    def reprice(self, usd_per_hour: float) -> None:
        """Set the price of spot machines from now on."""
        self._fleet.reprice({Offer(SPOT): usd_per_hour})

    def offer(self) -> None:
        """Offer spot machines again."""
        self._fleet.faults.without.discard(SPOT)

    def close(self) -> None:
        """Do nothing."""
        self._fleet.close()


# --- local processes -----------------------------------------------------------------------------


@dataclass
class HandSchedule:
    """Outages made by a test; times count from the fleet's start."""

    outages_s: dict[int, tuple[float, float]] = field(
        default_factory=dict
    )  # keyed by slot: begin, end
    down: bool = False  # everywhere
    usd_per_hour: float = 0.0  # bids below it are down, too

    def next_down_s(
        self,
        pool: str,
        slot: int,
        at_s: float,
        born_s: float,
        bid_usd_per_hour: float | None = None,
    ) -> float:
        """Return the next time that the slot is down, in any pool."""
        del pool
        if bid_usd_per_hour is not None and bid_usd_per_hour < self.usd_per_hour:
            return at_s
        from_s, to_s = self.outages_s.get(slot, (math.inf, math.inf))
        if self.down:
            return at_s
        return max(born_s + from_s, at_s) if at_s < born_s + to_s else math.inf


@dataclass
class Processes:
    """Processes that sleep until they are stopped, in a folder of the test."""

    folder: Path
    program: tuple[str, ...] = ("sleep", "600")
    notice_s: float = 0.0
    leave_s: float = 20.0
    capacity: int | None = None
    clock: Callable[[], float] = time.time
    schedule: HandSchedule = field(default_factory=HandSchedule)
    prices: Prices | None = None
    fleets: list[ProcessFleet] = field(default_factory=list)
    started: list[psutil.Process] = field(default_factory=list)

    def fleet(self, job: str = "digits") -> ProcessFleet:
        """Return one more fleet in the same folder."""
        pool = SpotPool(name=SPOT, usd_per_hour=0.1, capacity=self.capacity)
        provider = ProcessProvider(notice_s=self.notice_s)
        market = Market(on_demand=OnDemandPool(usd_per_hour=0.3), spot=(pool,), process=provider)
        made = ProcessFleet(
            LocalMarket(market, self.schedule, self.prices),
            job,
            self.folder,
            self.start,
            self.leave_s,
            self.clock,
        )
        self.fleets.append(made)
        return made

    def start(self, worker: str, environment: Mapping[str, str]) -> Child:
        """Start a machine."""
        variables = {"PATH": "/usr/bin:/bin", **environment}
        child = Child(self.program, self.folder / f"{worker}.log", variables, stays=True)
        self.started.append(psutil.Process(child.pid))
        return child

    def preempt(self, launch: int) -> None:
        """Take a machine's slot down."""
        # Launches here have the numbers of their slots.
        self.schedule.outages_s[launch] = (0.0, math.inf)

    def fail(self, launch: int) -> None:
        """Kill a machine, once its environment can be read."""
        deadline = time.monotonic() + 20.0
        while launch not in (running := self.running()):
            assert time.monotonic() < deadline, f"launch {launch} has no process"
        running[launch].kill()

    def refuse(self) -> None:
        """Take all slots down."""
        self.schedule.down = True

    def offer(self) -> None:
        """Bring all slots up again."""
        self.schedule.down = False

    def reprice(self, usd_per_hour: float) -> None:
        """Set the price of spot machines from now on."""
        self.schedule.usd_per_hour = usd_per_hour

    def go_away(self) -> None:
        """Move the folder away."""
        (self.folder / "digits").rename(self.folder / "away")

    def come_back(self) -> None:
        """Move it back."""
        (self.folder / "away").rename(self.folder / "digits")

    def running(self) -> dict[int, psutil.Process]:
        """Return the job's machines by launch, which is the end of a token in these tests."""
        found = Table("digits", self.folder).find()
        return {int(token.removeprefix("doll-")): process for token, process in found.items()}

    def close(self) -> None:
        """Kill what still runs."""
        for fleet in self.fleets:
            fleet.close()
        for process in (*self.started, *psutil.process_iter()):
            with contextlib.suppress(psutil.Error):
                # The environment of the newest process may not be readable yet.
                directory = process.environ().get("DOLL_FLEET_DIRECTORY", "")
                if process in self.started or directory == str(self.folder):
                    process.kill()


# --- EC2 -----------------------------------------------------------------------------------------

_NO_MACHINE = """<CreateFleetResponse><fleetId>fleet-none</fleetId><errorSet><item>
<lifecycle>spot</lifecycle><errorCode>{code}</errorCode><errorMessage>there is none</errorMessage>
</item></errorSet><fleetInstanceSet/></CreateFleetResponse>"""
_BUSY = "<Response><Errors><Error><Code>Unavailable</Code><Message/></Error></Errors></Response>"


class Ec2Server:
    """Moto's server, plus client tokens, refusals and outages, which Moto lacks."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._answers: dict[str, bytes] = {}  # keyed by client token
        # The session reads the description of EC2 only once.
        self._session = boto3.session.Session()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.honours_tokens = True
        # True to list the launched machines.
        self.shows = True
        self.code = ""  # reason for refusals
        self.away = False
        client = self.client()
        image = client.describe_images()["Images"][0]["ImageId"]
        client.create_launch_template(
            LaunchTemplateName=TEMPLATE,
            LaunchTemplateData={"ImageId": image, "InstanceType": "t3.micro"},
        )

    def client(self) -> EC2Client:
        """Return a client that does not retry."""
        return self._session.client(
            "ec2",
            endpoint_url=self.url,
            region_name=REGION,
            config=Config(retries={"mode": "standard", "total_max_attempts": 1}),
        )

    def forget_tokens(self) -> None:
        """Let another test use the tokens again."""
        self._answers.clear()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if self.away:
            start("503 Service Unavailable", [("Connection", "close")])
            return [_BUSY.encode()]
        body = Request(environ).get_data()
        environ["wsgi.input"] = io.BytesIO(body)
        form = dict(parse_qsl(body.decode()))
        if form.get("Action") == "DescribeInstances" and not self.shows:
            start("200 OK", [("Content-Type", "text/xml")])
            return [b"<DescribeInstancesResponse><reservationSet/></DescribeInstancesResponse>"]
        if form.get("Action") != "CreateFleet":
            answer: Iterable[bytes] = self._moto(environ, start)
            return answer
        # The second of two requests with one token gets the first one's answer.
        with self._lock:
            token = form["ClientToken"]
            if token not in self._answers or not self.honours_tokens:
                self._answers[token] = self._launched(form, environ)
            start("200 OK", [("Content-Type", "text/xml")])
            return [self._answers[token]]

    def _launched(self, form: dict[str, str], environ: WSGIEnvironment) -> bytes:
        if self.code and "SpotOptions.AllocationStrategy" in form:
            return _NO_MACHINE.format(code=self.code).encode()
        answer: bytes = Client(self._moto).open(environ).data
        return answer


@dataclass
class Ec2:
    """EC2, where the provider reports the end of a machine."""

    server: Ec2Server
    # Name of the test, because all tests share one account.
    test: str
    subnets: tuple[str, ...] = ()

    def fleet(self, job: str = "digits") -> Ec2Fleet:
        """Return one more fleet of the same account."""
        provider = Ec2Provider(
            region=REGION, launch_template=TEMPLATE, endpoint=self.server.url, subnets=self.subnets
        )
        market = Market(
            fleet="ec2",
            on_demand=OnDemandPool(usd_per_hour=0.3),
            spot=(SpotPool(name=SPOT, usd_per_hour=0.1, instance_types=("t3.micro", "t3.small")),),
            ec2=provider,
        )
        return Ec2Fleet(market, provider, f"{job}-{self.test}", self.server.client())

    def preempt(self, launch: int) -> None:
        """Preempt a machine."""
        self._end(launch, "Server.SpotInstanceTermination")

    def fail(self, launch: int) -> None:
        """Let a machine switch itself off."""
        self._end(launch, "Client.InstanceInitiatedShutdown")

    def refuse(self) -> None:
        """Refuse spot machines."""
        self.server.code = "InsufficientInstanceCapacity"

    def offer(self) -> None:
        """Offer spot machines again."""
        self.server.code = ""

    def go_away(self) -> None:
        """Stop answering."""
        self.server.away = True

    def come_back(self) -> None:
        """Answer again."""
        self.server.away = False

    def close(self) -> None:
        """Terminate the test's machines, and forget its tokens."""
        self.come_back()
        self.offer()
        for job in ("digits", "other"):
            fleet = self.fleet(job)
            fleet.release([machine.id for machine in fleet.machines()])
            fleet.close()
        self.server.forget_tokens()

    def _end(self, launch: int, code: str) -> None:
        (number,) = {each.id for each in self.fleet().machines() if each.launch == launch}
        instance = ec2_backends[DEFAULT_ACCOUNT_ID][REGION].get_instance(number)
        instance.terminate()
        instance.state_reason = StateReason(f"{code}: it ended", code)
