"""Several processes change a job, or a key, at the same time: acknowledged changes are kept.

Two operators send PATCH requests to one admin service each. The job's model cannot be built, so a
coordinator holds it whenever an operator resumes it. A thousand rounds:

    pytest -m nightly tests/integration/test_writers.py
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, NamedTuple

import httpx2
import pytest
from confluent_kafka.admin._resource import ResourceType

from common.api.keys import Keys, KeyStore
from common.config.settings import Settings
from common.core.spans import Partition
from common.embedded.process import free_port
from common.embedded.services import EmbeddedService
from common.errors import ConflictError, NotFoundError
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.kafka.names import JOBS
from common.kafka.opening import open_log
from common.kafka.port import NewTopic
from tests.contract.log_fixtures import everything
from tests.integration.cluster import await_condition
from tests.servers import configure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.embedded.apache_kafka import ApacheKafka
    from common.embedded.redis import EmbeddedRedis
    from common.jobs.store import JobRecord
    from common.kafka.port import Log

pytest_plugins = ["tests.servers", "tests.redis_servers"]
pytestmark = pytest.mark.kafka

NAME = "contested"
TASK = "tests.integration.bad_tasks:RaisesInBuild"
SPEC = f"""
name: {NAME}
streams: [{NAME}-a]
records: {{codec: tensor, fields: {{id: {{dtype: int64}}}}}}
task: {{entrypoint: "{TASK}", records: 100}}
batch_size: 8
group_size: 2
reduction: sum
optimizer: {{name: sgd, learning_rate: 1.0}}
"""
ROUNDS = [30, pytest.param(1_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3_600)])]
PATIENCE_S = 240.0
PLACE = Partition(JOBS, 0)
OPERATORS = ("olga", "mia")  # names of keys


class World(NamedTuple):
    """Processes that change the job."""

    bootstrap: str
    log: Log
    job_store: JobOperations
    operators: list[httpx2.Client]  # one admin service each
    admins: list[EmbeddedService]
    coordinator: EmbeddedService


@pytest.fixture
def world(
    apache_kafka: ApacheKafka, likest_redis: EmbeddedRedis, tmp_path: Path
) -> Iterator[World]:
    bootstrap = apache_kafka.settings.bootstrap
    settings = Settings(
        kafka=bootstrap,
        kafka_group_protocol="consumer",
        redis=likest_redis.url,
        tasks=(TASK,),
        threads=1,
    )
    with ExitStack() as stack:
        log = stack.enter_context(closing(open_log(settings)))
        job_store = stack.enter_context(closing(JobOperations(log)))
        made = dict[str, str]()
        with closing(KeyStore(log)) as keys:
            for name in OPERATORS:
                made[name], _ = keys.create(name, "operator")
                stack.callback(KeyStore(log).revoke, name)
        log.create_topics([NewTopic(f"{NAME}-a")])
        job_store.submit(parse_job(SPEC))
        stack.callback(job_store.patch, NAME, "the test is over", wanted="stopped")
        operators, admins = list[httpx2.Client](), list[EmbeddedService]()
        for name, key in made.items():
            port = free_port()
            own = settings.model_copy(update={"api_host": "127.0.0.1", "api_port": port})
            admins.append(EmbeddedService("admin", f"admin-of-{name}", own, tmp_path))
            stack.callback(admins[-1].kill)
            client = httpx2.Client(
                base_url=f"http://127.0.0.1:{port}",
                headers={"Authorization": f"Bearer {key}"},
                timeout=PATIENCE_S,
            )
            operators.append(stack.enter_context(client))
        coordinator = EmbeddedService("coordinator", "c1", settings, tmp_path)
        stack.callback(coordinator.kill)
        for client in operators:
            await_condition(lambda client=client: ready(client), "the service is ready", PATIENCE_S)  # type: ignore[misc]
        yield World(bootstrap, log, job_store, operators, admins, coordinator)


def ready(client: httpx2.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.parametrize("rounds", ROUNDS)
def test_acknowledged_changes_are_kept_and_refused_ones_are_not(world: World, rounds: int) -> None:
    held = 0
    with ThreadPoolExecutor(2) as pool:
        for number in range(rounds):
            # The coordinator may write between these writes.
            if number % 3 == 0:
                await_condition(
                    lambda: world.job_store.get(NAME).held, "the job is held", PATIENCE_S
                )
            before = world.job_store.get(NAME)
            bodies: list[dict[str, object]] = [
                {"group_size": 3 + number % 50, "reason": f"a{number}"},
                {"batch_size": 9 + number % 50, "reason": f"b{number}"},
            ]
            if before.held:
                held += 1
                bodies[number % 4 // 2] |= {"wanted": "running"}
            same_revision = bool(number % 2)
            if same_revision:
                bodies = [{**body, "revision": before.revision} for body in bodies]
            answers = pool.map(
                lambda client, body: client.patch(f"/v1/jobs/{NAME}", json=body),
                world.operators,
                bodies,
            )
            statuses = [answer.status_code for answer in answers]
            assert sorted(statuses) == ([200, 409] if same_revision else [200, 200])
            check(world.job_store.get(NAME), before, bodies, statuses)

    # Whichever operator resumes the job last, the coordinator holds it again. No hold was lost
    # either.
    world.operators[0].patch(f"/v1/jobs/{NAME}", json={"wanted": "running"})
    await_condition(lambda: world.job_store.get(NAME).held, "the job is held", PATIENCE_S)
    assert held >= rounds // 3
    assert "hold_not_written" not in world.coordinator.log.read_text()
    check_audit(world)
    check_crash(world)
    check_compacted(world)


def check(
    made: JobRecord, before: JobRecord, bodies: list[dict[str, object]], statuses: list[int]
) -> None:
    """Check that the job has each acknowledged change, and no refused one."""
    settings = [change for change in made.changes if change.action == "changed"]
    changes = {change.reason: change for change in settings}
    for name, body, status in zip(OPERATORS, bodies, statuses, strict=True):
        field = "group_size" if "group_size" in body else "batch_size"
        spec = before.spec if status == 409 else None
        assert (body["reason"] in changes) == (status == 200), (body, status)
        assert status == 409 or changes[str(body["reason"])].by == name
        expected = body[field] if spec is None else getattr(spec, field)
        assert getattr(made.spec, field) == expected
    assert made.revision == before.revision + statuses.count(200)
    assert [change.revision for change in settings] == list(
        range(made.revision - len(settings) + 1, made.revision + 1)
    )


def check_audit(world: World) -> None:
    """Check that the record and the services' logs name the author of each change."""
    record = world.job_store.get(NAME)
    found = record.changes
    assert (found[0].action, found[0].role) == ("submitted", "cli")
    assert {(each.by, each.role) for each in found[1:]} == {
        *((name, "operator") for name in OPERATORS),
        ("coordinator", "coordinator"),
    }
    assert (found[-1].action, found[-1].reason) == ("held", record.reason[:500])
    for name, admin in zip(OPERATORS, world.admins, strict=True):
        lines = [line for line in admin.log.read_text().splitlines() if " audit " in line]
        assert any(f"by={name} role=operator action=changed job={NAME}" in each for each in lines)
        ours = [each for each in lines if f"by={name} " in each and "outcome=done" in each]
        assert lines == ours
    assert f"by=coordinator role=coordinator action=held job={NAME}" in (
        world.coordinator.log.read_text()
    )


def check_crash(world: World) -> None:
    """Check what happens to a change whose service is killed as soon as the record is there."""
    end, before = world.log.bounds(PLACE).end, world.job_store.get(NAME)
    with ThreadPoolExecutor(1) as pool:
        body = {"batch_size": 100, "reason": "before a crash"}
        answer = pool.submit(world.operators[0].patch, f"/v1/jobs/{NAME}", json=body)
        await_condition(
            lambda: world.log.bounds(PLACE).end > end, "the record is written", PATIENCE_S
        )
        world.admins[0].kill()
        acknowledged = answer.exception() is None and answer.result().status_code == 200
    body = {"group_size": 100, "reason": "after a crash"}
    assert world.operators[1].patch(f"/v1/jobs/{NAME}", json=body).status_code == 200
    made = world.job_store.get(NAME)
    settings = [change for change in made.changes if change.action == "changed"]
    reasons = [change.reason for change in settings[before.revision - made.revision :]]
    assert reasons in (["before a crash", "after a crash"], ["after a crash"])
    assert "before a crash" in reasons or not acknowledged


def check_compacted(world: World) -> None:
    """Check that a new reader sees the same after the broker has compacted the topic."""
    job = world.job_store.get(NAME).id
    eager = {"log.cleaner.backoff.ms": "100"}
    ours = {"min.compaction.lag.ms": "3600000", "segment.ms": "604800000"}
    configure(world.bootstrap, "1", eager, ResourceType.BROKER)
    soon = {"min.compaction.lag.ms": "0", "segment.ms": "50"}
    configure(world.bootstrap, JOBS, {**soon, "min.cleanable.dirty.ratio": "0.001"})

    def compacted() -> bool:
        """Kafka compacts closed segments. A record closes a segment whose time is over."""
        world.job_store.note(job, "noted", f"at {time.monotonic()}")
        expected = world.job_store.get(NAME)
        with closing(JobOperations(world.log)) as job_store:
            assert job_store.get(NAME) == expected
        return sum(record.key == NAME.encode() for record in everything(world.log, PLACE)) < 10

    await_condition(compacted, "Kafka has compacted the topic", PATIENCE_S)
    configure(world.bootstrap, JOBS, {**ours, "min.cleanable.dirty.ratio": "0.5"})


@pytest.mark.parametrize("rounds", ROUNDS)
def test_one_of_two_concurrent_key_changes_succeeds(apache_kafka: ApacheKafka, rounds: int) -> None:
    settings = Settings(kafka=apache_kafka.settings.bootstrap, kafka_group_protocol="consumer")

    def create(store: KeyStore) -> str:
        try:
            return store.create(NAME, "viewer")[0]
        except ConflictError:
            return ""

    def revoke(store: KeyStore) -> bool:
        try:
            store.revoke(NAME)
        except NotFoundError:
            return False
        return True

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        logs = [stack.enter_context(closing(open_log(settings))) for _ in range(3)]
        *writers, reader = (stack.enter_context(closing(KeyStore(log))) for log in logs)
        for _ in range(rounds):
            made = [key for key in pool.map(create, writers) if key]
            assert len(made) == 1
            assert Keys(reader.read().values()).role_of(made[0])
            assert sorted(pool.map(revoke, writers)) == [False, True]
            assert not reader.read()[NAME].sha256
