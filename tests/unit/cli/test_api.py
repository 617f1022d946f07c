"""`doll --api`: commands say the same over the REST API as they do through Kafka."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from common.api.keys import KeyStore
from common.config.servers import Outside
from common.config.settings import Settings
from common.core.history import History
from common.core.messages import (
    GENESIS,
    Lead,
    LeaderStatus,
    ModelId,
    Requeued,
    Skipped,
    WorkerId,
)
from common.core.spans import Partition
from common.jobs.changes import local_user
from common.jobs.check import Report
from common.jobs.store import JobStore
from common.kafka.dead_letters import letter_of
from common.kafka.table import NUMBER
from common.ports.servers import NewTopic
from common.spot.planning.replan import read_ledger
from common.spot.provisioning import records as plans
from common.storage.snapshot_file import to_bytes
from common.wire.messages import decode_audit, encode_audit
from services.admin.app import create_app
from services.cli import exits
from services.cli.app import app
from services.cli.system.api import Api
from services.cli.system.direct import Direct
from services.cli.system.outside import Ways
from tests.unit.admin.conftest import LIMITS
from tests.unit.admin.live.helpers import eventually
from tests.unit.admin.test_model import kept, trained
from tests.unit.admin.test_provisioning import planned as decided
from tests.unit.cli.conftest import World
from tests.unit.cli.test_dlq import put
from tests.unit.cli.test_job import JOB, claimed, lost_after_training, update
from tests.unit.cli.test_plan import options
from tests.unit.cli.test_requeue import QUARANTINE
from tests.unit.cli.test_simulate import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from typer.testing import Result

    from common.core.messages import AuditRecord
    from common.spot.provisioning.records import PlanRecord
    from services.admin.service import Service
    from services.cli.system.system import System

URL = "http://doll.test"
DRY = "--dry-run"
PROVISIONED = JOB + "provisioning: {workers: 4, policy: adaptive}\n"


def of_both_ways(settings: Settings, outside: Outside) -> tuple[System, System]:
    """Both fulfil the protocol: mypy looks at this."""
    return Direct(outside), Api(settings)


class Bridge(httpx2.BaseTransport):
    """An ASGI application as the service at the other end of a synchronous client."""

    def __init__(self, served: Any) -> None:  # noqa: ANN401 -- as httpx2 takes it
        self._transport = httpx2.ASGITransport(served)
        self.runner = asyncio.Runner()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Ask the application."""
        return self.runner.run(self._asked(request))

    async def _asked(self, request: httpx2.Request) -> httpx2.Response:
        body = request.read()
        sent = httpx2.Request(request.method, request.url, headers=request.headers, content=body)
        answer = await self._transport.handle_async_request(sent)
        return httpx2.Response(
            answer.status_code, headers=answer.headers, content=await answer.aread()
        )


@dataclass
class Both:
    """One system behind a command line that reaches it directly, and over its API."""

    direct: World = field(default_factory=World)
    market: str = ""

    def __post_init__(self) -> None:
        world = self.direct
        self.keys = {
            role: KeyStore(world.log).create(role, role)[0] for role in ("viewer", "operator")
        }
        settings = Settings(blobs="s3://memory", market=self.market)
        outside = Outside(settings, lambda: world.log, world.board, lambda: world.blobs)
        served = create_app(outside, LIMITS)
        self.service: Service = served.state.service
        self.bridge = Bridge(served)

    def remote(
        self,
        *arguments: str,
        code: int = 0,
        typed: str = "",
        key: str = "operator",
        end: httpx2.BaseTransport | None = None,
    ) -> Result:
        """Run a command line over the API; Kafka is not there."""
        environment = {"COLUMNS": "200", "DOLL_API": URL, "DOLL_API_KEY": self.keys.get(key, key)}
        result = CliRunner().invoke(
            app,
            list(arguments),
            input=typed,
            obj=Ways(_nothing, end or self.bridge),
            env=environment,
            catch_exceptions=False,
        )
        assert result.exit_code == code, result.output
        return result

    @property
    def ways(self) -> tuple[Callable[..., Result], ...]:
        """How to run a command line: over the API, and directly."""
        return self.remote, self.direct.run

    def same(self, *arguments: str, code: int = 0) -> str:
        """Run a command line both ways, see that both say the same, and return it."""
        remote, direct = self.remote(*arguments, code=code), self.direct.run(*arguments, code=code)
        assert remote.stdout == direct.stdout
        return remote.stdout

    def decide(self, *records: PlanRecord) -> None:
        """Write records of the job's provisioning."""
        from common.spot.plans import encode_plan  # noqa: PLC0415 -- only here

        self.direct.log.create_topics([NewTopic("doll.digits.plans")])
        self.direct.write("doll.digits.plans", *map(encode_plan, records))


def _nothing(settings: Settings) -> Outside:
    def none(*_: object) -> Any:  # noqa: ANN401 -- it never gives one
        raise AssertionError("over the API, no server of the system is reached")

    return Outside(settings, none, none, none)


@contextmanager
def opened(market: str = "") -> Iterator[Both]:
    made = Both(market=market)
    made.direct.log.create_topics([NewTopic("clinic-a", 2)])
    try:
        yield made
    finally:
        made.service.close()
        made.bridge.runner.close()


@pytest.fixture
def both() -> Iterator[Both]:
    """A system with a datastream, and no job."""
    with opened() as made:
        yield made


@pytest.fixture
def submitted(both: Both) -> Both:
    """A job was posted over the API."""
    both.remote("job", "submit", "-", typed=PROVISIONED)
    return both


def test_a_job_is_submitted_listed_and_shown_as_directly(both: Both) -> None:
    assert both.same("job", "list").startswith("no jobs yet")
    said = both.remote("job", "submit", "-", typed=PROVISIONED).stdout
    assert said == "job digits submitted: 2 partitions of clinic-a, from earliest on\n"
    assert "digits" in both.same("job", "list")
    shown = json.loads(both.remote("job", "show", "digits").stdout)
    assert shown["first"] == [["clinic-a", 0, 0], ["clinic-a", 1, 0]]
    shown_directly = json.loads(both.direct.run("job", "show", "digits").stdout)
    shown_directly.pop("request")  # who may send it again is nobody else's affair
    shown_directly.pop("topic_ids")  # which logs its positions are of is for who reads those
    assert shown == shown_directly


def test_lists_are_printed_as_json_as_directly(submitted: Both) -> None:
    (job,) = json.loads(submitted.same("job", "list", "--json"))["jobs"]
    assert (job["id"], job["streams"]) == ("digits", ["clinic-a"])
    assert json.loads(submitted.same("job", "requeue", "digits", "--json")) == []
    submitted.direct.write("doll.digits.updates", *map(encode_audit, QUARANTINE))
    batches = json.loads(submitted.same("job", "requeue", "digits", "--json"))
    assert [each["batch"] for each in batches] == [0, 1, 2]
    requeued = submitted.remote("job", "requeue", "digits", "--batch", "1", "--json").stdout
    assert json.loads(requeued) == [{"batch": 1, "outcome": "requeued"}]
    for run in submitted.ways:
        (line,) = run("job", "watch", "digits", "--once", "--json").stdout.splitlines()
        assert json.loads(line)["progress"]["version"] == 0


def change(
    at_s: float, action: str, *, changed: dict[str, int] | None = None, reason: str = ""
) -> dict[str, object]:
    """Return a change as an answer has it."""
    who = {"by": "olga", "role": "operator", "revision": 0}
    return {"at_s": at_s, "action": action, **who, "changed": changed or {}, "reason": reason}


def test_events_of_a_job_are_printed_until_it_is_deleted(both: Both) -> None:
    progress = {"version": 3, "lag": None}
    paused = change(0.0, "paused", reason="prices are high")
    resumed = change(86_400.0, "resumed", changed={"group_size": 8})
    job = {
        "state": "running",
        "why": "",
        "revision": 0,
        "progress": progress,
        "changes": [paused],
    }
    again = {**job, "changes": [paused, resumed]}
    update = {"version": 4, "epoch": 1, "at_s": 0.0, "loss": 0.25, "metrics": {"accuracy": 1.0}}

    def told(request: httpx2.Request) -> httpx2.Response:
        if "Last-Event-ID" in request.headers:
            return httpx2.Response(404, json={"detail": 'there is no job "digits"'})
        parts = [("job", job), ("update", update), ("job", again)]
        return httpx2.Response(
            200,
            text="".join(f"id: a-1\nevent: {n}\ndata: {json.dumps(d)}\n\n" for n, d in parts),
        )

    end = httpx2.MockTransport(told)
    shown = both.remote("job", "events", "digits", code=exits.REFUSED, end=end)
    lines = [line.split(maxsplit=2) for line in shown.stdout.splitlines()]
    assert [" ".join(rest.split()) for _, _, rest in lines] == [
        "change action=paused by=olga role=operator reason=prices are high",
        "job state=running revision=0 version=3",
        "update version=4 epoch=1 loss=0.25",
        "change action=resumed by=olga role=operator group_size=8",
        "job state=running revision=0 version=3",
    ]
    assert (lines[0][:2], lines[3][0]) == (["1970-01-01", "00:00:00"], "1970-01-02")
    assert 'there is no job "digits"' in shown.stderr
    told_json = both.remote("job", "events", "digits", "--json", code=exits.REFUSED, end=end).stdout
    assert [json.loads(line) for line in told_json.splitlines()] == [
        {"event": "job", "data": job},
        {"event": "update", "data": update},
        {"event": "job", "data": again},
    ]
    said = both.direct.run("job", "events", "digits", code=exits.REFUSED).stderr
    assert "give --api" in said


def test_dead_letters_of_a_job_are_counted_as_directly(submitted: Both) -> None:
    assert submitted.same("dlq", "show", "--job", "digits") == "0 dead letters\n"
    put(submitted.direct, letter_of("digits", Skipped("clinic-a", 0, 3, "no label"), 3, b"r3"))
    told = submitted.same("dlq", "show", "--job", "digits").splitlines()
    assert told[1].split() == ["clinic-a", "digits", "1", "0", "0", "no", "label"]
    assert submitted.same("dlq", "show", "--job", "digits", "--json").startswith("[")
    said = submitted.remote("--api", URL, "dlq", "show", "clinic-a", code=exits.REFUSED).stderr
    assert "needs Kafka itself: leave out --api" in said


def test_a_job_is_paused_resumed_and_stopped_as_directly(submitted: Both) -> None:
    for command, listed in (
        ("pause", "paused: why"),
        ("resume", "waiting"),
        ("stop", "stopped: why"),
    ):
        assert ": why" in submitted.same("job", command, "digits", "--reason", "why")
        assert f"digits: {listed}" in submitted.same("job", "list")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("batch_size:", "batchsize:"),
        ("group_size: 1", "group_size: 0"),
        ("clinic-a", "clinic-x"),
        ("classes: 10", "classes: ten"),
    ],
)
def test_a_bad_job_is_refused_as_directly(both: Both, old: str, new: str) -> None:
    typed = JOB.replace(old, new)
    remote = both.remote("job", "submit", "-", typed=typed, code=exits.REFUSED)
    direct = both.direct.run("job", "submit", "-", typed=typed, code=exits.REFUSED)
    assert remote.stderr == direct.stderr


def test_settings_are_changed_and_a_stopped_job_deleted_as_directly(submitted: Both) -> None:
    change = ("job", "change", "digits", "--reason", "why")
    said = submitted.remote(*change, "--group-size", "3", "--deadline", "100").stdout
    assert said == "job digits changed: deadline_s 100, group_size 3 (revision 1): why\n"
    said = submitted.remote(*change, "--no-deadline", "--learning-rate", "0.1").stdout
    assert said == "job digits changed: deadline_s none, learning_rate 0.1 (revision 2): why\n"
    assert "has these settings already" in submitted.same(*change, "--group-size", "3")
    for run in submitted.ways:
        shown = json.loads(run("job", "show", "digits").stdout)
        assert (shown["spec"]["group_size"], shown["spec"]["stop"]["deadline_s"]) == (3, None)
        assert [each["revision"] for each in shown["changes"]] == [0, 1, 2]
        assert "group_size" in run(*change, "--group-size", "0", code=exits.REFUSED).stderr
        assert "nothing to change" in run(*change, code=exits.REFUSED).stderr
        assert "stop it first" in run("job", "delete", "digits", code=exits.REFUSED).stderr
    submitted.remote("job", "stop", "digits")
    assert "is deleted" in submitted.remote("job", "delete", "digits").stdout
    assert submitted.same("job", "list").startswith("no jobs yet")


def test_a_name_is_purged_as_directly(submitted: Both) -> None:
    purge = "job", "delete", "digits", "--purge"
    for run in submitted.ways:
        assert "stop it first" in run(*purge, "--yes", code=exits.REFUSED).stderr
    submitted.remote("job", "stop", "digits")
    told = [run(*purge, typed="n\n", code=1).stdout for run in submitted.ways]
    assert told[0] == told[1]
    assert "would be removed: topic doll.digits.control, 0 records" in told[0]
    assert "the name digits is free" in submitted.remote(*purge, "--yes").stdout
    assert submitted.same("job", "list").startswith("no jobs yet")
    assert "doll.digits.control" not in submitted.direct.log.topics()
    assert "the name digits is free" in submitted.same(*purge, "--yes")


def test_a_quarantine_is_listed_and_taken_back_as_directly(submitted: Both) -> None:
    world = submitted.direct
    assert "nothing is quarantined" in submitted.same("job", "requeue", "digits")
    world.write("doll.digits.updates", *map(encode_audit, QUARANTINE))
    listed = submitted.same("job", "requeue", "digits")
    assert "clinic-a[0]@2:7" in listed
    assert "without --dry-run: 2 batches" in submitted.same(
        *("job", "requeue", "digits", "--all", DRY)
    )
    for named in (("--batch", "2"), ("--batch", "7"), ("--batch", "0", "--all")):
        for line in (named, (*named, DRY)):
            remote, direct = (
                run("job", "requeue", "digits", *line, code=exits.REFUSED).stderr
                for run in submitted.ways
            )
            assert remote == direct
    JobStore(world.log).hold("digits", "its task raises KeyError")
    eventually(lambda: "held" in submitted.remote("job", "list").stdout)
    said = submitted.remote("job", "requeue", "digits", "--all").stdout
    assert said.splitlines() == [
        "batch 0: waits again",
        "batch 1: waits again",
        "2 of 2 batches of digits wait for an update again",
        "digits is held: go on with `doll job resume digits`",
    ]
    again = submitted.same("job", "requeue", "digits", "--batch", "1")
    assert again.startswith("batch 1: was requeued before: nothing was done\n")
    written = world.log.tail(Partition("doll.digits.updates", 0), 4).read(100, 0.0)
    records = [decode_audit(record.value or b"") for record in written]
    assert [each.by for each in records if isinstance(each, Requeued)] == ["operator"] * 2


def test_what_is_not_there_or_contradicts_ends_as_directly(submitted: Both) -> None:
    for command in ("show", "pause", "watch"):
        said = submitted.remote("job", command, "letters", code=exits.REFUSED).stderr
        assert 'there is no job "letters"' in said
    again = submitted.remote("job", "submit", "-", typed=JOB, code=exits.REFUSED).stderr
    assert 'the name "digits" belongs to a job' in again
    begun = submitted.remote("job", "submit", "-", "--from", "a", typed=JOB, code=exits.REFUSED)
    assert "leave out --api" in begun.stderr


def look(run: Callable[..., Result]) -> str:
    """What `doll job watch` shows, but for a rate: a service has looked for longer."""
    shown: str = run("job", "watch", "digits", "--once").stdout
    return re.sub(r"records/s \S+", "", shown)


def test_watch_shows_what_it_shows_directly(submitted: Both) -> None:
    world, place = submitted.direct, Partition("clinic-a", 0)
    world.write("clinic-a", *[b"record"] * 5)
    claimed(world, 1)
    lead = encode_audit(Lead(-1, GENESIS, "c", 0))
    world.write("doll.digits.updates", lead, encode_audit(update(0, 1)))
    board = world.board("digits")
    first = {place: 2, Partition("clinic-a", 1): 0}
    board.hold_lease("c1", 60.0)
    board.put_leader_status(LeaderStatus(0, 1, first, 1, 7, 2, first))
    board.beat(WorkerId("w1"), "alive", 60.0)
    board.beat(WorkerId("w2"), "leaving", 60.0)
    eventually(lambda: look(submitted.remote) == look(submitted.direct.run))
    shown = look(submitted.remote)
    assert "workers 1 (+1 leaving)" in shown
    assert "lag 3" in shown
    assert "accuracy" in shown


def test_during_a_takeover_both_show_the_history_that_counts(submitted: Both) -> None:
    world, history = submitted.direct, History()
    world.write("clinic-a", *[b"record"] * 8)
    claimed(world, 1, 2, 3, 4)
    world.board("digits").hold_lease("c2", 60.0)
    course: list[AuditRecord] = [
        Lead(-1, GENESIS, "c1", 0),
        update(0, 1),
        update(0, 2),
        update(0, 3),
        Lead(0, ModelId(0, 1), "c2", 4),  # takes back 2 and 3
        update(0, 4),  # by the one before, who does not know it yet
        Lead(0, ModelId(0, 3), "c3", 6),  # too late: counts for nobody
        update(4, 2),
        update(6, 9),
    ]
    for offset, record in enumerate(course):
        world.write("doll.digits.updates", encode_audit(record))
        history.feed(offset, record)
        eventually(lambda: look(submitted.remote) == look(world.run))
        lines = look(world.run).splitlines()
        shown = [tuple(map(int, line.split()[:2])) for line in lines if "0.5000" in line]
        assert shown == [(each.version, each.epoch) for each in reversed(history.path[1:])]


def test_lists_say_the_same_of_every_job(submitted: Both) -> None:
    world = submitted.direct
    world.log.create_topics([NewTopic("clinic-b")])
    typed = JOB.replace("digits", "letters").replace("clinic-a", "clinic-b")
    submitted.remote("job", "submit", "-", typed=typed)
    world.write("clinic-a", *[b"record"] * 8)
    claimed(world, 1, 2, skipped=1)
    world.log.expire(Partition("clinic-a", 0), 6)
    writer = world.log.writer()
    writer.append("doll.jobs", b"[]", key=b"odd", headers=[(NUMBER, b"1")])
    assert writer.flush(1.0)
    world.board("letters").put_unable("c1", "its task cannot be imported", 60.0)
    listed = ("job", "list")
    eventually(lambda: submitted.remote(*listed).stdout == world.run(*listed).stdout)
    shown = submitted.same(*listed)
    assert "c1: its task cannot be imported" in shown
    assert "unreadable: the record of 'odd' at offset 2 of doll.jobs" in shown
    JobStore(world.log).hold("digits", "its task raises KeyError", "Traceback: boom")
    JobStore(world.log).finish("letters", "400 updates applied", 0)
    eventually(lambda: submitted.remote(*listed).stdout == world.run(*listed).stdout)
    shown = submitted.same(*listed)
    assert "digits: held: its task raises KeyError" in shown
    assert "letters: finished: 400 updates applied" in shown
    assert "has finished and stays as it is" in submitted.remote("job", "stop", "letters").stdout
    for run in submitted.ways:
        assert "Traceback: boom" in run("job", "show", "digits").stderr


def test_what_was_trained_and_then_lost_is_told_by_both(submitted: Both) -> None:
    lost_after_training(submitted.direct)
    watched, listed = ("job", "watch", "digits", "--once"), ("job", "list")
    eventually(lambda: "trained, then lost 1\n" in submitted.remote(*watched).stdout)
    eventually(lambda: submitted.remote(*listed).stdout == submitted.direct.run(*listed).stdout)


def test_models_are_pulled_with_the_same_tensors(submitted: Both, tmp_path: Path) -> None:
    world = submitted.direct
    lead = encode_audit(Lead(-1, GENESIS, "c", 0))
    world.write("doll.digits.updates", lead, encode_audit(update(0, 1)))
    world.board("digits").put_snapshot(0, to_bytes(kept(ModelId(0, 1), 2, trained(1))), "c1")
    assert "1" in submitted.same("model", "list", "digits")
    for run in submitted.ways:
        assert 'no job "letters"' in run("model", "list", "letters", code=exits.REFUSED).stderr
    files = tmp_path / "remote.safetensors", tmp_path / "direct.safetensors"
    for run, file in zip(submitted.ways, files, strict=True):
        said = run("model", "pull", "digits", "-o", str(file)).stdout
        assert said.startswith("digits version 1 (made by leader 0): ")
    remote, direct = (safetensors.torch.load_file(file) for file in files)
    assert remote.keys() == direct.keys()
    assert all(torch.equal(remote[name], direct[name]) for name in direct)
    arguments = ("model", "pull", "digits", "-o", str(files[0]), "--version", "7")
    assert "kept: 1" in submitted.remote(*arguments, code=exits.REFUSED).stderr


def test_plans_are_those_made_directly(both: Both, tmp_path: Path) -> None:
    rates = tmp_path / "rates.csv"
    rates.write_text("\n".join(["60", "125", "250"] * 20))
    many = options("--workers", "--rate", rates=rates, deadline=6200)
    for line in (
        options(),
        options(deadline=6399),
        [*options(probability=0.95), "--json"],
        [*options(availability=0, spot=64)],
        many,
        [*many, "--json"],
    ):
        assert both.same("plan", *line)
    for line in (options(availability=2), options("--updates", "--deadline"), options(spot=99)):
        said = [
            run("plan", *line, code=exits.REFUSED).stderr for run in (both.remote, both.direct.run)
        ]
        assert said[0] == said[1]


def test_simulations_are_those_made_directly(both: Both, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    line = ("simulate", str(file), "--runs", "2", "--policy", "static", "--policy", "on-demand")
    assert both.same(*line, "--json")
    assert "on-demand" in both.same(*line)
    file.write_text(SMALL.replace("usd_per_hour: 0.158", "usd_per_hour: {file: prices.csv}"))
    said = both.remote(*line, code=exits.REFUSED).stderr
    assert "error: spot[0].usd_per_hour.file: files are not read for the API" in said
    file.write_text(SMALL.replace("updates: 60", "updates: 1000000\nmode: protocol"))
    said = both.remote(*line, code=exits.REFUSED).stderr
    assert "error: updates, --runs: mode protocol takes at most" in said


def test_provisioning_is_shown_and_asked_for_as_directly(submitted: Both) -> None:
    assert "none yet" in submitted.same("provisioning", "show", "digits")
    said = submitted.same("provisioning", "replan", "digits", "--reason", "the deadline moved")
    assert "doll provisioning show digits" in said
    asked = read_ledger(submitted.direct.log, "digits").replans.values()
    assert [(each.by, each.reason) for each in asked] == [
        ("operator", "the deadline moved"),
        (local_user().name, "the deadline moved"),
    ]


def test_a_plan_in_force_is_shown_as_directly(submitted: Both) -> None:
    submitted.decide(plans.Lead(-1, "p1", 1000.0), decided(1, 1001.0), decided(2, 1100.0))
    shown = submitted.same("provisioning", "show", "digits")
    assert "2 on spot, 1 on on-demand, 1 on none (number 2)" in shown
    assert "one more would make it late" in shown
    told = json.loads(submitted.remote("provisioning", "show", "digits", "--json").stdout)
    assert [plan["number"] for plan in told["plans"]] == [2, 1]


def test_prices_are_told_as_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    market = tmp_path / "market.yaml"
    market.write_text("on_demand: {usd_per_hour: 0.286}\nspot: [{usd_per_hour: 0.158}]\n")
    monkeypatch.setenv("DOLL_MARKET", str(market))
    with opened(str(market)) as both:
        shown = both.same("prices")
        assert shown.split()[-6:] == ["on-demand", "on-demand", "0.2860", "spot", "spot", "0.1580"]
        pools = json.loads(both.remote("prices", "--json").stdout)["pools"]
        assert pools == json.loads(both.direct.run("prices", "--json").stdout)["pools"]


def test_without_a_market_both_say_what_to_set(both: Both) -> None:
    for run in both.ways:
        assert "set DOLL_MARKET" in run("prices", code=exits.REFUSED).stderr


def test_a_key_that_is_not_valid_or_too_small_is_told_with_what_to_do(submitted: Both) -> None:
    said = submitted.remote("job", "list", key="wrong", code=exits.REFUSED).stderr
    assert "this key is not valid: give one as --api-key, DOLL_API_KEY or DOLL_API_KEY_FILE" in said
    assert "wrong" not in said
    said = submitted.remote("job", "pause", "digits", key="viewer", code=exits.REFUSED).stderr
    assert "needs the role operator" in said
    assert "doll key create NAME --role operator" in said


def test_commands_that_need_kafka_say_so(both: Both) -> None:
    said = both.remote("--api", URL, "audit", "digits", code=exits.REFUSED).stderr
    assert "needs Kafka itself: leave out --api" in said


def test_commands_that_need_kafka_take_it_though_a_service_is_exported(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOLL_API", URL)
    world.run("key", "create", "ada", "--role", "viewer")
    assert "ada" in world.run("key", "list").output


def test_services_start_though_a_service_is_exported(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[tuple[str, ...]]()
    monkeypatch.setenv("DOLL_API", URL)
    monkeypatch.setattr("os.execve", lambda _path, command, _environment: begun.append(command))
    world.run("serve", "digits")
    world.run("worker")
    assert [command[-2:] for command in begun] == [
        ("services.serve", "digits"),
        ("-m", "services.worker"),
    ]


def test_a_broker_that_is_away_is_unavailable_both_ways(both: Both) -> None:
    both.remote("job", "list")  # keys are known
    both.direct.log.go_away()
    said = both.remote("job", "submit", "-", typed=JOB, code=exits.UNAVAILABLE).stderr
    # Above it may stand that the check of the job takes long.
    assert said.splitlines()[-1].startswith(f"error: {URL}: ")
    assert "--api" in said


class Answers(httpx2.BaseTransport):
    """A server that says one thing, or nothing."""

    def __init__(self, status: int, content: bytes = b"") -> None:
        self._answer = status, content

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Say it."""
        status, content = self._answer
        if not status:
            raise httpx2.ConnectError("nobody listens", request=request)
        return httpx2.Response(status, content=content)


@pytest.mark.parametrize(
    ("status", "content", "code", "said"),
    [
        (0, b"", exits.UNAVAILABLE, "cannot be reached: nobody listens"),
        (200, b"<html>", exits.UNAVAILABLE, "does not answer as an admin service does"),
        (200, b"[]", exits.UNAVAILABLE, "does not answer as an admin service does"),
        (302, b"", exits.UNAVAILABLE, "HTTP 302 Found"),
        (500, b"{}", exits.UNAVAILABLE, "HTTP 500 Internal Server Error"),
        (503, b'{"detail": "Kafka is unavailable"}', exits.UNAVAILABLE, "Kafka is unavailable"),
        (429, b'{"detail": "too many"}', exits.UNAVAILABLE, "too many"),
        (413, b'{"detail": "too large"}', exits.REFUSED, "too large"),
        (404, b"gone", exits.REFUSED, "HTTP 404 Not Found"),
    ],
)
def test_answers_that_are_none_are_told_in_one_line(
    both: Both, status: int, content: bytes, code: int, said: str
) -> None:
    told = both.remote("job", "list", code=code, end=Answers(status, content)).stderr
    assert said in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("how", ["remote", "direct"])
def test_job_that_was_not_checked_says_why(
    how: str, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = both.remote if how == "remote" else both.direct.run
    own = JOB.replace("{name: image-classifier, classes: 10}", "{entrypoint: shop.tasks:Clicks}")
    assert own != JOB
    monkeypatch.setenv("DOLL_TASKS", "shop.tasks:Clicks")
    stuck = Report(unended="the check of the task did not end within 60 s")
    for module in ("services.admin.routes.jobs", "services.cli.system.direct"):
        monkeypatch.setattr(f"{module}.built_apart", lambda *_: stuck)
    monkeypatch.setattr(
        "common.jobs.check._looked_at", lambda spec, tasks, build: build(spec, tasks)
    )
    said = run("job", "submit", "-", typed=own, code=exits.REFUSED).stderr
    assert "did not end within 60 s; if the task is right" in said
    assert "--unchecked" in said
    said = run("job", "submit", "-", "--unchecked", typed=own).stderr
    assert "not checked: the request says so" in said


def test_who_waits_for_a_check_reads_that(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.commands.job._PATIENCE_S", 0.0)
    assert "waiting for the check of the job" in both.remote("job", "submit", "-", typed=JOB).stderr
