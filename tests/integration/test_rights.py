"""Services with exactly the rights in docs/howto/security.md, and with one right missing."""

from __future__ import annotations

import json
import os
import re
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import httpx2
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from confluent_kafka.admin._scram import (
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialUpsertion,
)
from typer.testing import CliRunner, Result

from common.api.keys import KeyStore
from common.config.settings import Settings, read_settings
from common.core.audit import audit
from common.core.spans import Partition
from common.embedded.process import free_port
from common.embedded.services import EmbeddedService, stop_all
from common.jobs.operations import JobOperations
from common.kafka.names import control_topic, plans_topic, updates_topic
from common.kafka.opening import open_log
from common.kafka.port import NewTopic
from common.kafka.read import read_decoded, records_of
from common.runtime.connect import connect
from common.wire.messages import decode_audit, decode_claim
from services.cli.app import app
from services.cli.system.outside import Ways
from tests.certificates import Authority
from tests.integration.cluster import await_condition
from tests.integration.test_security import GUIDE
from tests.kafka_nodes import GuardedKafka, Safe
from tests.servers import kafka_jars

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from _pytest.mark import ParameterSet

    from common.core.audit import Audit
    from common.embedded.redis import EmbeddedRedis

pytest_plugins = ["tests.redis_servers"]
pytestmark = [pytest.mark.kafka, pytest.mark.redis]

PAGE = "docs/howto/security.md"
PASSWORD = "its-pass-word"  # noqa: S105 -- of a server that lives for a test
MARKER = "s3cr3t"
SERVICES = ("admin", "coordinator", "evaluator", "provisioner", "worker")
DLQ = "doll dlq"
WRONG = "field 'x': a text is not an array of shape [2], each a number that fits float32"
# Time within which a process must use a right that was granted again.
RETURN_S = 15.0
MARKET = """
fleet: process
on_demand: {usd_per_hour: 3600.0}
spot: [{name: spot, usd_per_hour: 360.0}]
process: {availability: 0.0}
"""
Binding = TypeVar("Binding", AclBinding, AclBindingFilter)
TASK = "name: logistic-regression, classes: 2"
YAML = {"Content-Type": "application/yaml"}
JOB = f"""
name: NAME
streams: [clinic-a]
records:
  codec: json
  fields: {{x: {{dtype: float32, shape: [2]}}, label: {{dtype: int64}}}}
task: {{{TASK}}}
batch_size: 8
group_size: 2
optimizer: {{name: sgd, learning_rate: 0.1}}
batch_linger_s: 0.3
group_linger_s: 0.5
hot_snapshot: {{every_s: 0.2}}
evaluation: {{every_updates: 5, stream: clinic-a-test, records: 20}}
provisioning: {{workers: 1, policy: adaptive, review_s: 1}}
"""


IN_CI = (
    ("worker", "topic", "doll.", "write"),
    ("worker", "topic", "clinic-a", "read"),
    ("coordinator", "topic", "doll.", "read"),
    ("coordinator", "topic", "doll.", "write"),
)


class Right(NamedTuple):
    """A right in a row of the guide."""

    row: str
    kind: str
    pattern: str
    name: str
    operation: str

    def __str__(self) -> str:
        return f"{self.row}: {self.operation} {self.kind} {self.name}"

    def named_by(self, text: str) -> bool:
        """Return True if an error names the right. A prefix is enough."""
        kind = self.kind.replace("_", " ")
        operation = rf"(\w+ or )?{self.operation}( or \w+)?"
        return bool(re.search(f"Kafka refuses {operation} on {kind} {self.name}", text))

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return the right without its pattern."""
        return self.row, self.kind, self.name, self.operation

    @property
    def is_in_ci(self) -> bool:
        """Return True if every change tests it, not only the nightly run."""
        return self.key in IN_CI

    def binding(self, make: type[Binding]) -> Binding:
        """Return the right in Kafka's notation."""
        return make(
            ResourceType[self.kind.upper()],
            self.name,
            ResourcePatternType[self.pattern.upper()],
            f"User:{user_of(self.row)}",
            "*",
            AclOperation[self.operation.upper()],
            AclPermissionType.ALLOW,
        )


def user_of(row: str) -> str:
    return row.replace(" ", "-")


def rights() -> list[Right]:
    """Yield all rights of the guide."""
    found, row = list[Right](), ""
    for text in GUIDE.read_text().split("```acl\n")[1:]:
        for line in text.partition("```")[0].splitlines():
            if line.startswith("# "):
                row = line.removeprefix("# ")
            elif row:
                kind, pattern, name, *operations = line.split()
                found += [Right(row, kind, pattern, name, each) for each in operations]
        row = ""
    return found


RIGHTS = rights()


class Guarded:
    """A system in which each service has the rights of its row only."""

    def __init__(self, kafka: GuardedKafka, redis: str, ca: Path, folder: Path) -> None:
        self._folder = folder
        self._api = free_port()
        (folder / "market.yaml").write_text(MARKET)
        self._environ = {
            "DOLL_KAFKA": kafka.safe_address,
            "DOLL_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "DOLL_KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
            "DOLL_KAFKA_SASL_PASSWORD": PASSWORD,
            "DOLL_KAFKA_SSL_CA_LOCATION": str(ca),
            "DOLL_REDIS": redis,
            "DOLL_BLOBS": f"file://{folder}/blobs",
            "DOLL_THREADS": "1",
            "DOLL_API_PORT": str(self._api),
            "DOLL_MARKET": str(folder / "market.yaml"),
            "DOLL_FLEET_DIRECTORY": str(folder / "machines"),
            "DOLL_OWNER_PID": str(os.getpid()),
        }
        bootstrap = kafka.settings.bootstrap
        self._admin = AdminClient({"bootstrap.servers": bootstrap})
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        rows = sorted({right.row for right in RIGHTS})
        users: list[UserScramCredentialAlteration] = [
            UserScramCredentialUpsertion(user_of(row), info, PASSWORD.encode()) for row in rows
        ]
        for answer in self._admin.alter_user_scram_credentials(users).values():
            answer.result()
        self.give(*RIGHTS)
        self.log = open_log(read_settings({"DOLL_KAFKA": bootstrap}))
        self.log.create_topics([NewTopic("clinic-a", 2), NewTopic("clinic-a-test")])
        self._writer = self.log.writer()
        for number in range(20):
            self._write("clinic-a-test", [number - 10, 1], int(number > 10))
        self.services = dict[str, EmbeddedService]()
        self._jobs = self._bad_records = 0
        with closing(KeyStore(self.log)) as keys:
            key, _ = keys.create("olga", "operator")
        headers = {"Authorization": f"Bearer {key}"}
        url = f"http://127.0.0.1:{self._api}"
        self.client = httpx2.Client(base_url=url, timeout=30.0, headers=headers)

    def begin(self) -> None:
        """Start the services that do not run, and submit the job."""
        for service in SERVICES:
            if service not in self.services:
                self.start(service, service)
        await_condition(self._ready, "the admin service is ready")
        answer = self.submit("clinic")
        assert answer.status_code == 201, answer.text
        with closing(JobOperations(self.log)) as job_store:
            self._record = job_store.get("clinic")

    def close(self) -> None:
        """Stop the job, and so its machine, and all processes."""
        with closing(JobOperations(self.log)) as job_store:
            jobs = job_store.read()
            for name in jobs:
                job_store.patch(name, "the test is over", wanted="stopped")
        finished = "provisioning_finished"
        await_condition(lambda: not jobs or finished in self.said("provisioner"), "no machine")
        stop_all([each for each in self.services.values() if each.exit_code is None])
        self.client.close()
        self._writer.close()
        self.log.close()

    def give(self, *given: Right) -> None:
        """Grant rights."""
        for answer in self._admin.create_acls(
            [each.binding(AclBinding) for each in given]
        ).values():
            answer.result()

    @contextmanager
    def without(self, *rights: Right) -> Iterator[None]:
        """Revoke rights. Returns when they are in force again."""
        filters = [right.binding(AclBindingFilter) for right in rights]
        for answer in self._admin.delete_acls(filters).values():
            assert answer.result()
        try:
            yield
        finally:
            self.give(*rights)
        for each in filters:
            await_condition(partial(self._is_in_force, each), "the right is in force")

    def start(self, service: str, name: str) -> None:
        """Start a service with the rights of its row."""
        settings = self._settings(service)
        self.services[name] = EmbeddedService(service, name, settings, self._folder, forks=True)

    def _is_in_force(self, wanted: AclBindingFilter) -> bool:
        return bool(self._admin.describe_acls(wanted).result())

    def restart(self, service: str) -> None:
        """Kill and restart a service."""
        self.services[service].kill()
        self.start(service, service)
        if service == "admin":
            await_condition(self._ready, "the admin service is ready")

    def names(self, right: Right) -> bool:
        """True if the service of a right's row has logged that the right is missing."""
        return any(map(right.named_by, self.said(right.row).splitlines()))

    def is_over(self, name: str) -> bool:
        """True if a service has logged the end of its last outage of Kafka."""
        said = self.said(name)
        return said.rfind(" kafka_recovered ") > said.rfind(" kafka_unavailable ")

    def said(self, name: str) -> str:
        """Return the log of a process."""
        return (self._folder / f"{name}.log").read_text()

    def doll(self, *arguments: str) -> Result:
        """Run a command with the rights of its row."""
        environ = self._settings(DLQ).environ()
        return CliRunner().invoke(app, arguments, obj=Ways(connect), env=environ)

    def submit(self, name: str, task: str = TASK) -> httpx2.Response:
        """Submit a job to the admin service."""
        job = JOB.replace("NAME", name).replace(TASK, task)
        return self.client.post("/v1/jobs", content=job, headers=YAML)

    def submit_next(self) -> httpx2.Response:
        """Submit one more job, which no worker takes."""
        self._jobs += 1
        return self.submit(f"next-{self._jobs}", "entrypoint: not.here:Task")

    def newest_is_planned(self) -> bool:
        """Return True if the provisioner has written a record about the last submitted job."""
        plans = Partition(plans_topic(f"next-{self._jobs}"), 0)
        return self.log.ends([plans]).get(plans, 0) > 0

    def produce(self, count: int, bad: int = 0, poison: int = 0) -> None:
        """Write records. Some do not decode, and some have an invalid label."""
        for number in range(count):
            self._write("clinic-a", [number - count // 2, 1], int(number > count // 2), number % 2)
        for number in range(bad):
            self._bad_records += 1
            self._write("clinic-a", f"{MARKER}-{self._bad_records}.", 0, number % 2)
        for number in range(poison):
            self._write("clinic-a", [0, 0], 8675309, number % 2)
        assert self._writer.flush(30.0)

    def last_dead_letter_is_there(self) -> bool:
        """Return True if the last bad record is a dead letter."""
        text = f"{MARKER}-{self._bad_records}.".encode()
        records = records_of(self.log, Partition("clinic-a.dlq", 0))
        return any(text in (each.value or b"") for each in records)

    def audit(self) -> Audit:
        """Return what the control topic and the updates topic prove."""
        control = read_decoded(self.log, control_topic("clinic"), decode_claim)
        updates = read_decoded(self.log, updates_topic("clinic"), decode_audit)
        return audit(self._record.first, control, updates, known=self._record.known)

    def settled(self) -> bool:
        """Return True if every produced record is settled."""
        proof = self.audit()
        return not proof.unsettled and all(
            proof.settled.get(place) == self.log.bounds(place).end for place in self._record.first
        )

    def state(self) -> str:
        """Return all that the admin service reports about the job."""
        return self.client.get("/v1/jobs/clinic").text

    def _write(self, topic: str, x: object, label: int, partition: int = 0) -> None:
        value = json.dumps({"x": x, "label": label}).encode()
        self._writer.append(topic, value, partition=partition)

    def _settings(self, row: str) -> Settings:
        return read_settings({**self._environ, "DOLL_KAFKA_SASL_USERNAME": user_of(row)})

    def _ready(self) -> bool:
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx2.TransportError:
            return False


@pytest.fixture(scope="module")
def without_services(
    tmp_path_factory: pytest.TempPathFactory, system_redis: EmbeddedRedis
) -> Iterator[Guarded]:
    jars, folder = kafka_jars(), tmp_path_factory.mktemp("guarded")
    authority = Authority(folder)
    pair = authority.issue("kafka")
    keystore = folder / "keystore.pem"
    keystore.write_bytes(pair.key.read_bytes() + pair.cert.read_bytes())
    with GuardedKafka(jars, folder / "data", Safe(keystore, "doll", PASSWORD)) as kafka:
        system = Guarded(kafka, system_redis.url, authority.cert, folder)
        yield system
        system.close()


@pytest.fixture(scope="module")
def guarded(without_services: Guarded) -> Guarded:
    without_services.begin()
    return without_services


def dead_letters(guarded: Guarded) -> dict[str, int]:
    """Return the number of dead letters by reason."""
    found = guarded.client.get("/v1/jobs/clinic/dead-letters").json()["reasons"]
    return {row["reason"]: row["records"] + row["batches"] for row in found}


@pytest.mark.nightly
def test_services_that_may_not_create_the_jobs_topic_wait_until_they_may(
    without_services: Guarded,
) -> None:
    missing = [each for each in RIGHTS if (each.operation, each.name) == ("create", "doll.")]
    assert sorted(right.row for right in missing) == sorted(SERVICES)
    with without_services.without(*missing):
        for service in SERVICES:
            without_services.start(service, service)
        for right in missing:
            is_named = partial(without_services.names, right)
            await_condition(is_named, f"{right} is named")
    for service in SERVICES:
        is_over = partial(without_services.is_over, service)
        await_condition(is_over, f"{service} continues", RETURN_S)


def test_services_need_only_the_documented_rights(guarded: Guarded) -> None:
    begun = {name: len(guarded.said(name)) for name in SERVICES}
    guarded.produce(200, bad=3, poison=8)
    await_condition(guarded.settled, "all is trained or quarantined")
    await_condition(lambda: dead_letters(guarded).get(WRONG) == 3, "there are dead letters")
    await_condition(lambda: len(dead_letters(guarded)) == 2, "a batch is quarantined")
    (quarantined,) = dead_letters(guarded).keys() - {WRONG}
    assert "label: a number is outside 0..1" in quarantined

    # The worker announces batches without receiving orders. The next worker reads them again.
    control = Partition(control_topic("clinic"), 0)
    guarded.services["coordinator"].kill()
    announced = guarded.log.bounds(control).end
    guarded.produce(100)
    await_condition(lambda: guarded.log.bounds(control).end > announced, "batches are announced")
    guarded.services["worker"].kill()
    guarded.start("coordinator", "coordinator")
    guarded.start("worker", "worker")
    await_condition(guarded.settled, "the next leader and worker settle all records")

    replayed = guarded.doll("dlq", "replay", "clinic-a", "--all")
    assert replayed.exit_code == 0, replayed.output
    await_condition(guarded.settled, "the replayed records are read")
    await_condition(lambda: " evaluated " in guarded.said("evaluator"), "versions are evaluated")
    await_condition(
        lambda: " machine_ordered " in guarded.said("provisioner"), "a machine is rented"
    )
    assert guarded.client.get("/v1/jobs/clinic/dead-letters").status_code == 200
    for name, service in guarded.services.items():
        assert service.exit_code is None
        assert "Kafka refuses" not in guarded.said(name)[begun[name] :], name


# A running service does not use these rights again, so it cannot notice that one was revoked.
# A coordinator checks topic settings when it begins to lead. An evaluator reads its test set
# once. Kafka's client keeps the coordinator of the readers' group that it found first.
AT_BEGIN = (
    ("coordinator", "topic", "doll.", "describe_configs"),
    ("coordinator", "topic", "clinic-a.dlq", "describe_configs"),
    ("evaluator", "topic", "clinic-a-test", "read"),
    *((row, "group", "doll.alone", "read") for row in SERVICES),
)
# The test of the jobs topic revokes these. The services create no other topic here.
OF_THE_TOPIC_OF_JOBS = [
    (row, "topic", "doll.", "create") for row in ("coordinator", "evaluator", "worker")
]


def each_right() -> Iterator[ParameterSet]:
    """Yield rights to revoke. Those of every change come first."""
    for right in sorted(RIGHTS, key=lambda each: not each.is_in_ci):
        if right.row != DLQ and right.key not in OF_THE_TOPIC_OF_JOBS:
            marks = [] if right.is_in_ci else [pytest.mark.nightly]
            yield pytest.param(right, id=str(right), marks=marks)


@pytest.mark.parametrize("right", list(each_right()))
def test_service_without_a_right_names_it_and_waits(guarded: Guarded, right: Right) -> None:
    row, answers = right.row, list[str]()
    creates_dead_letters = right.operation == "create" and right.name.endswith(".dlq")
    log_end = len(guarded.said(row))

    def is_named() -> bool:
        """Return True if the missing right is reported. Makes the service use all its rights."""
        if creates_dead_letters:
            guarded.log.delete_topics([right.name])
        # If records were bad, the coordinator would create the dead-letter topic, not the admin
        # service.
        guarded.produce(10, bad=row != "admin")
        if row == "admin":
            paths = ("/v1/jobs/clinic", "/v1/jobs/clinic/dead-letters")
            answers.extend(guarded.client.get(path).text for path in paths)
            change = {"group_size": 2 + len(answers) % 3}
            answers.append(guarded.client.patch(paths[0], json=change).text)
        if row == "admin" or (row, right.operation) == ("provisioner", "create"):
            answers.append(guarded.submit_next().text)
        return any(right.named_by(text) for text in (guarded.said(row)[log_end:], *answers))

    with guarded.without(right):
        if right.key in AT_BEGIN:
            guarded.restart(row)
        await_condition(is_named, f"{right} is named")
        lines = [line for line in guarded.said(row)[log_end:].splitlines() if right.named_by(line)]
        assert all(PAGE in text for text in (*lines, *filter(right.named_by, answers)))
        outages = [line.partition(" ")[2] for line in lines]  # without the time
        assert len(outages) == len(set(outages)), outages
        assert sum(" job_waits " in line for line in lines) <= 1, lines
        assert guarded.services[row].exit_code is None

    ends = len(guarded.said(row))
    guarded.produce(200, bad=1)
    await_condition(guarded.settled, "all is trained", RETURN_S)
    await_condition(guarded.last_dead_letter_is_there, "the dead letter is written", RETURN_S)
    if row == "admin":
        await_condition(lambda: guarded.submit_next().status_code == 201, "it continues", RETURN_S)
    elif row == "evaluator":
        await_condition(
            lambda: " evaluated " in guarded.said(row)[ends:], "it evaluates versions", RETURN_S
        )
    elif row == "provisioner":
        assert guarded.submit_next().status_code == 201
        await_condition(guarded.newest_is_planned, "it plans for jobs", RETURN_S)
    assert all(service.exit_code is None for service in guarded.services.values())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "right", [pytest.param(right, id=str(right)) for right in RIGHTS if right.row == DLQ]
)
def test_command_without_a_right_names_it(
    guarded: Guarded, right: Right, caplog: pytest.LogCaptureFixture
) -> None:
    # A replay writes poison again. A job is held when a tenth of its last batches is poison.
    guarded.produce(800, bad=1, poison=0 if len(dead_letters(guarded)) > 1 else 8)
    await_condition(guarded.settled, "there is something to replay")

    def is_named() -> bool:
        found = guarded.doll("dlq", "replay", "clinic-a", "--all", "--again")
        said = found.output + caplog.text
        return found.exit_code == code and right.named_by(said) and PAGE in said

    # Commands work without the right of the readers' group.
    code = 0 if right.kind == "group" else 4
    with guarded.without(right):
        await_condition(is_named, f"{right} is named")

    def is_replayed() -> bool:
        return guarded.doll("dlq", "replay", "clinic-a", "--all").exit_code == 0

    await_condition(is_replayed, "the right is in force again", RETURN_S)


def test_ten_thousand_wrong_values_share_one_reason_and_stay_in_dead_letters(
    guarded: Guarded,
) -> None:
    guarded.produce(10, bad=10_000)
    await_condition(guarded.settled, "all records are settled")

    await_condition(
        lambda: dead_letters(guarded).get(WRONG, 0) >= 10_000, "all dead letters are written"
    )
    others = dead_letters(guarded).keys() - {WRONG}
    assert all("outside 0..1" in reason for reason in others)
    for topic in (control_topic("clinic"), updates_topic("clinic")):
        for partition in guarded.log.partitions(topic):
            with closing(guarded.log.tail(partition, 0)) as tail:
                end = guarded.log.bounds(partition).end
                while tail.position() < end:
                    for record in tail.read(1000, 5.0):
                        assert MARKER.encode() not in (record.value or b"")
    assert MARKER not in guarded.state()
    for name in guarded.services:
        assert MARKER not in guarded.said(name)
