"""The services with exactly the rights of docs/howto/security.md, and without one of them."""

from __future__ import annotations

import json
import os
from contextlib import closing
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
from common.embedded.apache_kafka import ApacheKafka, Safe
from common.embedded.process import free_port
from common.embedded.services import Service, stop_all
from common.jobs.store import JobStore
from common.ports.servers import NewTopic
from common.runtime.connect import connect, open_log
from common.topics.names import control_topic, updates_topic
from common.topics.read import read_decoded
from common.wire.messages import decode_audit, decode_claim
from services.cli.app import app
from services.cli.system.outside import Ways
from tests.certificates import Authority
from tests.integration.cluster import await_condition
from tests.integration.test_security import GUIDE
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
# A right that is there again must be used within 15 s. Machines of CI are busy, too.
RETURN_S = 45.0
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
poison_in_a_row: 1000
batch_linger_s: 0.3
group_linger_s: 0.5
deadline_floor_s: 0.3
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
    """A right of a row of the guide."""

    row: str
    kind: str
    pattern: str
    name: str
    operation: str

    def __str__(self) -> str:
        return f"{self.row}: {self.operation} {self.kind} {self.name}"

    @property
    def told(self) -> str:
        """How an error names it, up to the name that a prefix begins."""
        kind = self.kind.replace("_", " ")
        return f"Kafka refuses {self.operation} on {kind} {self.name}"

    @property
    def is_in_ci(self) -> bool:
        """True if each change takes it away, and not the nightly run alone."""
        return (self.row, self.kind, self.name, self.operation) in IN_CI

    def binding(self, make: type[Binding]) -> Binding:
        """The right as Kafka writes it."""
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
    """All rights of the guide."""
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
    """A system each of whose services has the rights of its row alone."""

    def __init__(self, kafka: ApacheKafka, redis: str, ca: Path, folder: Path) -> None:
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
        self.services = dict[str, Service]()
        self._jobs = 0
        with closing(KeyStore(self.log)) as keys:
            key, _ = keys.create("olga", "operator")
        headers = {"Authorization": f"Bearer {key}"}
        url = f"http://127.0.0.1:{self._api}"
        self.client = httpx2.Client(base_url=url, timeout=30.0, headers=headers)

    def begin(self) -> None:
        """Start all services, and submit the job."""
        for service in SERVICES:
            self.start(service, service)
        await_condition(self._ready, "the admin service is ready")
        answer = self.submit("clinic")
        assert answer.status_code == 201, answer.text
        with closing(JobStore(self.log)) as book:
            self._record = book.get("clinic")

    def close(self) -> None:
        """End the job, and so its machine, and all processes."""
        with closing(JobStore(self.log)) as book:
            for name in book.read():
                book.want(name, "stopped", "the test is over")
        await_condition(lambda: "provisioning_finished" in self.said("provisioner"), "no machine")
        stop_all([each for each in self.services.values() if each.exit_code is None])
        self.client.close()
        self._writer.close()
        self.log.close()

    def give(self, *given: Right) -> None:
        """Add rights."""
        for answer in self._admin.create_acls(
            [each.binding(AclBinding) for each in given]
        ).values():
            answer.result()

    def take(self, right: Right) -> None:
        """Take a right away."""
        filters = [right.binding(AclBindingFilter)]
        for answer in self._admin.delete_acls(filters).values():
            assert answer.result()

    def start(self, service: str, name: str) -> None:
        """Start a service with the rights of its row."""
        settings = self._settings(service)
        self.services[name] = Service(service, name, settings, self._folder, forks=True)

    def said(self, name: str) -> str:
        """What a process logged."""
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

    def produce(self, count: int, bad: int = 0, poison: int = 0) -> None:
        """Write records; some do not decode, and some have a label that is no class."""
        for number in range(count):
            self._write("clinic-a", [number - count // 2, 1], int(number > count // 2), number % 2)
        for number in range(bad):
            self._write("clinic-a", f"{MARKER}-{number}", 0, number % 2)
        for number in range(poison):
            self._write("clinic-a", [0, 0], 8675309, number % 2)
        assert self._writer.flush(30.0)

    def audit(self) -> Audit:
        """What both topics prove."""
        control = read_decoded(self.log, control_topic("clinic"), decode_claim)
        updates = read_decoded(self.log, updates_topic("clinic"), decode_audit)
        return audit(self._record.first, control, updates, known=self._record.known)

    def settled(self) -> bool:
        """True if everything that was produced is settled."""
        proof = self.audit()
        return not proof.unsettled and all(
            proof.settled.get(place) == self.log.bounds(place).end for place in self._record.first
        )

    def state(self) -> str:
        """All that the admin service tells of the job."""
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
def guarded(
    tmp_path_factory: pytest.TempPathFactory, system_redis: EmbeddedRedis
) -> Iterator[Guarded]:
    jars, folder = kafka_jars(), tmp_path_factory.mktemp("guarded")
    authority = Authority(folder)
    pair = authority.issue("kafka")
    keystore = folder / "keystore.pem"
    keystore.write_bytes(pair.key.read_bytes() + pair.cert.read_bytes())
    with ApacheKafka(jars, folder / "data", safe=Safe(keystore, "doll", PASSWORD)) as kafka:
        system = Guarded(kafka, system_redis.url, authority.cert, folder)
        system.begin()
        yield system
        system.close()


def dead_letters(guarded: Guarded) -> dict[str, int]:
    """Dead letters by reason."""
    found = guarded.doll("dlq", "show", "clinic-a", "--json")
    assert found.exit_code == 0, found.output
    return {row["reason"]: row["records"] + row["batches"] for row in json.loads(found.output)}


def test_services_need_no_more_than_the_rights_of_their_rows(guarded: Guarded) -> None:
    guarded.produce(200, bad=3, poison=8)
    await_condition(guarded.settled, "all is trained or quarantined")
    await_condition(lambda: dead_letters(guarded).get(WRONG) == 3, "there are letters")
    await_condition(lambda: len(dead_letters(guarded)) == 2, "a batch is quarantined")
    (quarantined,) = dead_letters(guarded).keys() - {WRONG}
    assert "label: a number is outside 0..1" in quarantined

    # The worker announces batches that nobody orders: the next worker reads them back.
    control = Partition(control_topic("clinic"), 0)
    guarded.services["coordinator"].kill()
    announced = guarded.log.bounds(control).end
    guarded.produce(100)
    await_condition(lambda: guarded.log.bounds(control).end > announced, "batches are announced")
    guarded.services["worker"].kill()
    guarded.start("coordinator", "coordinator")
    guarded.start("worker", "worker")
    await_condition(guarded.settled, "the next leader and worker go on")

    replayed = guarded.doll("dlq", "replay", "clinic-a", "--all")
    assert replayed.exit_code == 0, replayed.output
    await_condition(guarded.settled, "what was replayed is read")
    await_condition(lambda: " evaluated " in guarded.said("evaluator"), "versions are judged")
    await_condition(lambda: " machine_ordered " in guarded.said("provisioner"), "one is rented")
    assert guarded.client.get("/v1/jobs/clinic/dead-letters").status_code == 200
    for name, service in guarded.services.items():
        assert service.exit_code is None
        assert "Kafka refuses" not in guarded.said(name), name


# These rights are asked for when a process or a job begins.
AT_BEGIN = (("group", "doll.alone"), ("topic", "clinic-a-test"))


def is_missed(right: Right) -> bool:
    """True if a running service of this system notices that the right is missing."""
    if right.operation == "describe_configs":  # else nobody notices settings that lose records
        return False
    if right.kind == "group":  # the others read no addresses back at once
        return right.row in {"coordinator", "worker"}
    if right.row == "evaluator" and right.name == "clinic-a-test":  # it is read once
        return False
    if right.row == "admin" and right.operation == "create" and right.name.endswith(".dlq"):
        return False  # the coordinator makes the topic first
    if right.operation == "create" and right.name == "doll.":  # of others: `doll.jobs`, schemas
        return right.row in {"admin", "provisioner"}
    return True


def each_right() -> Iterator[ParameterSet]:
    """Rights that are taken away; those of every change first."""
    for right in sorted(RIGHTS, key=lambda each: not each.is_in_ci):
        if is_missed(right) and right.row != DLQ:
            marks = [] if right.is_in_ci else [pytest.mark.nightly]
            yield pytest.param(right, id=str(right), marks=marks)


@pytest.mark.parametrize("right", list(each_right()))
def test_service_without_a_right_names_it_waits_and_goes_on(guarded: Guarded, right: Right) -> None:
    log_end = len(guarded.said(right.row))
    if right.operation == "create" and right.name.endswith(".dlq"):
        guarded.log.delete_topics([right.name])
    guarded.take(right)
    answers = list[str]()

    def told() -> str:
        return guarded.said(right.row)[log_end:] + "".join(answers)

    def is_named() -> bool:
        """True if the right is named; asks the service for all that it does."""
        guarded.produce(10, bad=1)
        if right.row == "admin":
            paths = ("/v1/jobs/clinic", "/v1/jobs/clinic/dead-letters")
            answers.extend(guarded.client.get(path).text for path in paths)
            change = {"group_size": 2 + len(answers) % 3}
            answers.append(guarded.client.patch(paths[0], json=change).text)
        if right.row == "admin" or (right.row, right.operation) == ("provisioner", "create"):
            answers.append(guarded.submit_next().text)
        return right.told in told()

    if (right.kind, right.name) in AT_BEGIN and right.row != "admin":
        guarded.services[right.row].kill()
        guarded.start(right.row, right.row)
    await_condition(is_named, f"{right} is named")
    assert PAGE in told()
    lines = [line for line in told().splitlines() if right.told in line and " info " not in line]
    names = {line.partition("Kafka refuses ")[2].partition(":")[0] for line in lines}
    # A line for each topic whose reader or writer misses the right, not one for each attempt.
    assert len(lines) <= 2 * len(names) + len(answers)
    assert guarded.services[right.row].exit_code is None

    guarded.give(right)
    guarded.produce(50)
    await_condition(guarded.settled, "all is trained", RETURN_S)
    if right.row == "admin":
        await_condition(lambda: guarded.submit_next().status_code == 201, "it goes on", RETURN_S)
    else:
        recovered = len(told())
        await_condition(
            lambda: guarded.said(right.row)[log_end:].find("Kafka refuses", recovered) < 0, "quiet"
        )
    assert all(service.exit_code is None for service in guarded.services.values())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "right",
    [
        pytest.param(right, id=str(right))
        for right in RIGHTS
        if right.row == DLQ and is_missed(right)
    ],
)
def test_command_without_a_right_names_it(guarded: Guarded, right: Right) -> None:
    guarded.produce(10, bad=1, poison=8)
    await_condition(guarded.settled, "there is something to write anew")
    guarded.take(right)

    def is_named() -> bool:
        found = guarded.doll("dlq", "replay", "clinic-a", "--all", "--again")
        return found.exit_code == 4 and right.told in found.output and PAGE in found.output

    await_condition(is_named, f"{right} is named")
    guarded.give(right)

    def goes_on() -> bool:
        return guarded.doll("dlq", "replay", "clinic-a", "--all").exit_code == 0

    await_condition(goes_on, "it is there again", RETURN_S)


def test_ten_thousand_wrong_texts_have_one_reason_and_stand_nowhere_but_in_their_letters(
    guarded: Guarded,
) -> None:
    guarded.produce(10, bad=10_000)
    await_condition(guarded.settled, "all records are settled")

    await_condition(lambda: dead_letters(guarded).get(WRONG, 0) >= 10_000, "all are there")
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
