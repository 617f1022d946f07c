"""Real servers that require authentication: we connect with credentials, and report refusals.

The rights are those of docs/howto/security.md, word for word.
"""

from __future__ import annotations

import time
import traceback
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import pytest
import redis
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from common.api.keys import Keys, KeyStore
from common.config.settings import read_settings
from common.core.job_placement import JobDemand
from common.core.messages import (
    LeaderStatus,
    ModelId,
    TriggerId,
    UpdateTrigger,
    WorkerId,
    WorkerLeaving,
)
from common.core.spans import Assigned, Partition, Span
from common.embedded.process import free_port
from common.embedded.redis import EmbeddedRedis
from common.errors import BrokenWriterError, ForbiddenError, OutsideError, UserError
from common.kafka.opening import kafka_settings, open_log
from common.kafka.port import Fetched, NewRecord, NewTopic
from common.redis.board import open_board
from common.redis.boards import open_boards
from common.redis.exchange import open_leader_boards
from tests.certificates import Authority
from tests.contract.log_fixtures import KafkaFullLog
from tests.kafka_nodes import GuardedKafka, Safe
from tests.redis_servers import system_redis_server
from tests.servers import kafka_jars, lacking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.kafka.port import Log
    from common.redis.port import Board

GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "security.md"
PASSWORD, WRONG = "its-pass-word", "not-its-pass"
LONG_S = 20.0
WORKER, OTHER = WorkerId("w1"), WorkerId("w2")


def rights(beginnings: tuple[str, ...]) -> list[str]:
    """Return the lines of the guide's lists of rights."""
    listings = GUIDE.read_text().split("```acl\n")[1:]
    lines = [line for text in listings for line in text.partition("```")[0].splitlines()]
    return [line for line in lines if line.startswith(beginnings)]


def all_text(error: BaseException) -> str:
    """Return all text of an error and its causes that a traceback may show."""
    return "".join(traceback.format_exception(error))


def await_condition(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds. Fails with its description if it never does."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, f"it never came true: {what}"
        time.sleep(0.01)


# --- Redis ---------------------------------------------------------------------------------------


class SafeRedis(NamedTuple):
    """A server with TLS and one user."""

    environ: dict[str, str]
    admin: redis.Redis  # one that may do everything
    folder: Path


@pytest.fixture(scope="module")
def safe_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SafeRedis]:
    binary = system_redis_server()
    if binary is None:
        lacking("no redis-server on PATH: install Redis (Debian: apt-get install redis-server)")
    folder, port = tmp_path_factory.mktemp("redis"), free_port()
    authority = Authority(folder)
    server, ours = authority.issue("redis"), authority.issue("ours")
    (user,) = rights(("user doll ",))
    users = f"user default off\nuser root on >{PASSWORD} ~* &* +@all\n"
    (folder / "users.acl").write_text(users + user.replace("PASSWORD", PASSWORD) + "\n")
    options = {
        "tls-port": str(port),
        "tls-cert-file": str(server.cert),
        "tls-key-file": str(server.key),
        "tls-ca-cert-file": str(authority.cert),
        "tls-auth-clients": "yes",
        "aclfile": str(folder / "users.acl"),
    }
    environ = {
        "DOLL_REDIS": f"rediss://doll@127.0.0.1:{port}",
        "DOLL_REDIS_PASSWORD": PASSWORD,
        "DOLL_REDIS_CA": str(authority.cert),
        "DOLL_REDIS_CERT": str(ours.cert),
        "DOLL_REDIS_KEY": str(ours.key),
    }
    flat = [word for name, value in options.items() for word in (f"--{name}", value)]
    with EmbeddedRedis(binary, options=flat) as running:
        admin = redis.Redis.from_url(running.url, username="root", password=PASSWORD)
        with admin:
            yield SafeRedis(environ, admin, folder)


def board_with(server: SafeRedis, user: str = "doll@", **changes: str) -> Board:
    changed = {f"DOLL_REDIS{name}": value for name, value in changes.items()}
    changed.setdefault("DOLL_REDIS", server.environ["DOLL_REDIS"].replace("doll@", user))
    return open_board(read_settings({**server.environ, **changed}), "job")


@pytest.mark.redis
def test_documented_rights_are_enough_for_a_board(
    safe_redis: SafeRedis,
) -> None:
    safe_redis.admin.acl_log_reset()
    boards = open_leader_boards(read_settings(safe_redis.environ))
    board = boards.board("job")
    trigger = UpdateTrigger(TriggerId(3, 1), ModelId(3, 1), ())
    board.wipe()
    replies = boards.replies("c1-4711")
    assert replies.pop(1, 0.01) == []
    board.push_reply(WorkerLeaving(WORKER, ModelId(3, 1), ()), "c1-4711")
    assert len(replies.pop(2, LONG_S)) == 1
    board.put_unable("c1-4711", "task x is not in DOLL_TASKS", LONG_S)
    assert board.unable().keys() == {"c1-4711"}
    exchange, answers = boards.exchange(), SimpleQueue[object]()
    exchange.hold_lease("job", "one", LONG_S, answers.put, soon=True)
    assert answers.get(timeout=LONG_S) is True
    exchange.alive("job", answers.put, soon=True)
    assert answers.get(timeout=LONG_S) == {}
    exchange.release_lease("job", "one")
    exchange.close()
    board.put_model(ModelId(3, 1), b"weights.")
    assert board.get_model(ModelId(3, 1)) == b"weights."
    board.offer_model(ModelId(3, 1), b"weights.")
    assert board.offered_model() == (ModelId(3, 1), b"weights.")
    assert board.post_trigger(trigger)
    # The second call compares with the existing trigger.
    assert board.post_trigger(trigger)
    assert board.triggers(TriggerId(0, 0), LONG_S) == [trigger]
    assert board.triggers(TriggerId(3, 1), 0.01) == []
    board.put_leader_status(
        LeaderStatus(3, 4, {Partition("a", 0): 8}, 4, 0, 2, {Partition("a", 0): 7})
    )
    assert board.get_leader_status() is not None
    board.beat(WORKER, "alive", LONG_S)
    board.beat(OTHER, "alive", 0.001)
    await_condition(
        lambda: board.heartbeats().keys() == {WORKER}, "the worker whose heartbeat expired is gone"
    )
    assert board.hold_lease("one", LONG_S)
    assert board.hold_lease("one", LONG_S)
    assert not board.hold_lease("two", LONG_S)
    assert board.is_leased()
    board.release_lease("one")
    for epoch in range(5):
        board.put_snapshot(epoch, b"snapshot", "c1")
    assert len(board.snapshots()) == 3
    safe_redis.admin.lpush("doll:{job}:leader-status:", b"")
    safe_redis.admin.delete("doll:{job}:leader-status")
    safe_redis.admin.lpush("doll:{job}:leader-status", b"garbage of another type")
    assert board.get_leader_status() is None
    board.wipe()
    board.close()
    boards.close()
    refused = {entry["object"] for entry in safe_redis.admin.acl_log()}
    # The guide mentions this refusal.
    assert refused <= {"client|setinfo"}


@pytest.mark.redis
def test_documented_rights_are_enough_for_a_roster(safe_redis: SafeRedis) -> None:
    safe_redis.admin.acl_log_reset()
    boards = open_boards(read_settings(safe_redis.environ))
    roster = boards.roster()
    roster.put([JobDemand("digits")])
    assert roster.read() == [JobDemand("digits")]
    roster.remove(jobs=["digits"])
    boards.close()
    refused = {entry["object"] for entry in safe_redis.admin.acl_log()}
    assert refused <= {"client|setinfo"}


@pytest.mark.redis
def test_documented_rights_cover_only_our_keys(safe_redis: SafeRedis) -> None:
    settings = read_settings(safe_redis.environ)
    with redis.Redis.from_url(
        settings.redis,
        username="doll",
        password=PASSWORD,
        ssl_ca_certs=settings.redis_ca,
        ssl_certfile=settings.redis_cert,
        ssl_keyfile=settings.redis_key,
    ) as client:
        for command in (("GET", "payroll"), ("KEYS", "*"), ("FLUSHALL",), ("CONFIG", "GET", "*")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


@pytest.mark.redis
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_PASSWORD": WRONG}, "rejects the user name or password.*DOLL_REDIS_PASSWORD"),
        ({"user": "nobody@"}, "rejects the user name or password.*the URL in DOLL_REDIS"),
        ({"user": "", "_PASSWORD": ""}, "rejects the user name or password"),
        ({"_CA": ""}, "CERTIFICATE_VERIFY_FAILED.*set DOLL_REDIS_CA to the certificate file"),
    ],
)
def test_caller_that_redis_refuses_gets_a_remedy(
    safe_redis: SafeRedis, changes: dict[str, str], message: str
) -> None:
    board = board_with(safe_redis, **changes)
    for call in (board.is_leased, lambda: board.beat(WORKER, "alive", LONG_S)):
        with pytest.raises(OutsideError, match=message) as raised:
            call()
        assert not raised.value.retriable
        assert PASSWORD not in all_text(raised.value)
        assert WRONG not in all_text(raised.value)


@pytest.mark.redis
def test_client_without_required_certificate_is_refused_by_redis(safe_redis: SafeRedis) -> None:
    # Either the alert or the closed connection arrives first.
    with pytest.raises(OutsideError) as raised:
        board_with(safe_redis, _CERT="", _KEY="").is_leased()
    assert PASSWORD not in all_text(raised.value)


@pytest.mark.redis
def test_missing_redis_right_is_named(safe_redis: SafeRedis) -> None:
    safe_redis.admin.acl_setuser("narrow", enabled=True, passwords=f"+{PASSWORD}", keys="doll:*")
    board = board_with(safe_redis, user="narrow@")
    with pytest.raises(OutsideError, match=r"denies EXISTS.*howto/security\.md") as raised:
        board.is_leased()
    assert not raised.value.retriable


@pytest.mark.redis
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_CA": "{}/none.pem"}, "DOLL_REDIS_CA: the file cannot be read: No such file"),
        ({"_CA": "{}/ours.key"}, "DOLL_REDIS_CA: the file contains no certificate"),
        ({"_KEY": "{}/redis.key"}, "DOLL_REDIS_CERT or DOLL_REDIS_KEY: the file contains no cert"),
        ({"": "rediss://127.0.0.1/0?colour=red"}, "DOLL_REDIS: the URL has a part or an option"),
    ],
)
def test_unusable_redis_settings_are_refused_before_connecting(
    safe_redis: SafeRedis, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        board_with(
            safe_redis, **{name: value.format(safe_redis.folder) for name, value in changes.items()}
        )


# --- Kafka ---------------------------------------------------------------------------------------


class SafeKafka(NamedTuple):
    """A broker with TLS and one user, who has the rights of the guide."""

    environ: dict[str, str]
    admin: AdminClient  # one that may do everything
    everything: Log


@pytest.fixture(scope="module")
def safe_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SafeKafka]:
    jars, folder = kafka_jars(), tmp_path_factory.mktemp("kafka")
    authority = Authority(folder)
    pair = authority.issue("kafka")
    keystore = folder / "keystore.pem"
    keystore.write_bytes(pair.key.read_bytes() + pair.cert.read_bytes())
    (folder / "password").write_text(PASSWORD + "\n")
    with GuardedKafka(jars, folder / "data", Safe(keystore, "doll", PASSWORD)) as kafka:
        environ = {
            "DOLL_KAFKA": kafka.safe_address,
            "DOLL_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "DOLL_KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
            "DOLL_KAFKA_SASL_USERNAME": "doll",
            "DOLL_KAFKA_SASL_PASSWORD_FILE": str(folder / "password"),
            "DOLL_KAFKA_SSL_CA_LOCATION": str(authority.cert),
        }
        admin = AdminClient({"bootstrap.servers": kafka.settings.bootstrap})
        # Rows of several services name the same rights.
        allowed = {
            acl
            for line in rights(("topic ", "group ", "transactional_id "))
            for acl in acls_of(line)
        }
        # A topic that a user may describe can still be neither created nor written by that user.
        for topic in ("salaries", "ledgers"):
            allowed |= {*acls_of(f"topic literal {topic} describe")}
        for answer in admin.create_acls([*allowed]).values():
            answer.result()
        everything = open_log(read_settings({"DOLL_KAFKA": kafka.settings.bootstrap}))
        everything.create_topics([NewTopic("clinic-a")])
        everything.create_topics([NewTopic("payroll"), NewTopic("ledgers")])
        yield SafeKafka(environ, admin, everything)


def acls_of(line: str) -> list[AclBinding]:
    """Yield the rights in a line of the guide, in Kafka's notation."""
    resource, pattern, name, *operations = line.split()
    return [
        AclBinding(
            ResourceType[resource.upper()],
            name,
            ResourcePatternType[pattern.upper()],
            "User:doll",
            "*",
            AclOperation[operation.upper()],
            AclPermissionType.ALLOW,
        )
        for operation in operations
    ]


def log_with(server: SafeKafka, **changes: str) -> KafkaFullLog:
    changed = {f"DOLL_KAFKA_{name}": value for name, value in changes.items()}
    return KafkaFullLog(kafka_settings(read_settings({**server.environ, **changed}), "doll"))


def append(log: Log, topic: str, value: bytes) -> None:
    with closing(log.writer()) as writer:
        writer.append(topic, value)
        assert writer.flush(LONG_S)


@pytest.mark.kafka
def test_documented_rights_are_enough_for_a_log(safe_kafka: SafeKafka) -> None:
    log = log_with(safe_kafka)
    for topic in ("doll.job.control", "clinic-a.dlq"):
        log.create_topics([NewTopic(topic, kept_forever=True)])
        append(log, topic, b"said")
        refused = list[str]()
        assert log.settings([topic, "payroll"], refused)[topic]["retention.ms"] == "-1"
        assert [text.partition(" (")[0] for text in refused] == [
            "Kafka refuses describe_configs on topic payroll"
        ]
    with closing(log.tail(Partition("doll.job.control", 0), 0)) as tail:
        (record,) = tail.read(1, LONG_S)
    assert record.value == b"said"
    append(safe_kafka.everything, "clinic-a", b"a record")
    stream, place = Partition("clinic-a", 0), log.bounds(Partition("clinic-a", 0)).end - 1
    with closing(log.spans()) as spans:
        assert spans.read(Span(*stream, place, place + 1), LONG_S).values == [b"a record"]
    found = list[object]()
    with closing(log.stream("doll.job", ["clinic-a"], "w1")) as reader:

        def read() -> bool:
            for event in reader.poll(10, 0.2):
                if isinstance(event, Assigned):
                    reader.place({stream: place})
                elif isinstance(event, Fetched):
                    found.extend(event.values)
            return bool(found)

        await_condition(read, "a record of the stream")
        reader.commit({stream: place + 1})
    assert found == [b"a record"]
    with closing(KeyStore(log)) as keys:
        key, _ = keys.create("page", "viewer")
    with closing(KeyStore(log)) as keys:
        assert Keys(keys.read().values()).role_of(key)


@pytest.mark.kafka
def test_readers_without_group_right_still_read_and_one_names_the_right(
    safe_kafka: SafeKafka, caplog: pytest.LogCaptureFixture
) -> None:
    refused = (
        *(ResourceType.GROUP, "doll.alone", ResourcePatternType.LITERAL),
        *("User:doll", "*", AclOperation.ALL, AclPermissionType.DENY),
    )
    append(safe_kafka.everything, "clinic-a", b"a record")
    [answer] = safe_kafka.admin.create_acls([AclBinding(*refused)]).values()
    answer.result()
    place, log = Partition("clinic-a", 0), log_with(safe_kafka)
    with closing(log), closing(log.tail(place, 0)) as tail:
        await_condition(lambda: "group_refused" in caplog.text, "the right is named")
        assert "Kafka refuses read on group doll.alone (principal User:doll)" in caplog.text
        assert tail.read(1, LONG_S)
        for _ in range(3):
            with closing(log.spans()) as spans:
                assert len(spans.read(Span(*place, 0, 1), LONG_S).values) == 1
    [answers] = safe_kafka.admin.delete_acls([AclBindingFilter(*refused)]).values()
    assert len(answers.result()) == 1


@pytest.mark.kafka
def test_topic_without_rights_is_refused_by_name(safe_kafka: SafeKafka) -> None:
    log = log_with(safe_kafka)
    wanted = (
        r"Kafka refuses read or describe on topic payroll \(principal User:doll\): grant it as in"
        r" docs/howto/security\.md \(TOPIC_AUTHORIZATION_FAILED\)"
    )
    with pytest.raises(ForbiddenError, match=wanted):
        log.bounds(Partition("payroll", 0))
    with pytest.raises(ForbiddenError, match=r"create on topic salaries.*, or create it by h"):
        log.create_topics([NewTopic("salaries")])
    with closing(log.writer()) as writer:
        writer.append("ledgers", b"not ours to write")
        with pytest.raises(BrokenWriterError, match="refuses write on topic ledgers"):
            writer.flush(LONG_S)
    log.create_topics([NewTopic("doll.notes")])
    both = [NewRecord(topic, b"a record") for topic in ("doll.notes", "ledgers")]
    with closing(log.transactions("doll.test")) as transactions:
        with pytest.raises(ForbiddenError, match=r"refuses write on topic ledgers \(principal"):
            transactions.write(both)
        transactions.write(both[:1])


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SASL_PASSWORD": WRONG}, "SASL authentication error.*check.*DOLL_KAFKA_SASL_PASSWORD"),
        ({"SASL_USERNAME": "nobody"}, "SASL authentication error.*DOLL_KAFKA_SASL_USERNAME"),
        ({"SASL_MECHANISM": "PLAIN"}, "supported mechanisms: SCRAM-SHA-512.*SASL_MECHANISM"),
        ({"SSL_CA_LOCATION": ""}, "certificate verify failed.*DOLL_KAFKA_SSL_CA_LOCATION"),
    ],
)
def test_caller_that_kafka_refuses_gets_a_remedy(
    safe_kafka: SafeKafka, changes: dict[str, str], message: str
) -> None:
    if "SASL_PASSWORD" in changes:
        changes = {**changes, "SASL_PASSWORD_FILE": ""}
    log = log_with(safe_kafka, **changes)
    with pytest.raises(OutsideError, match=message) as asked:
        log.partitions("clinic-a")
    with pytest.raises(OutsideError, match=message) as created:
        log.create_topics([NewTopic("doll.jobs")])
    for error in (asked.value, created.value):
        assert not error.retriable
        assert PASSWORD not in all_text(error)
        assert WRONG not in all_text(error)
