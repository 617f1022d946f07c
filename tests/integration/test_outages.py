"""Outages of Kafka, Redis, storage and the schema registry under real processes.

Each outage is reported everywhere while it lasts, once in each log, and work resumes after it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

import boto3
import fastavro
import httpx2
import pytest
import redis

from common.api.keys import KeyStore
from common.config.settings import Settings
from common.embedded.apache_kafka import ApacheKafka
from common.embedded.process import free_port
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.kafka import names as topics
from common.kafka.port import NewTopic
from common.kafka.read import read_decoded
from common.wire.messages import decode_audit
from load.harness.browser import browser, chromium
from load.harness.s3_servers import S3Server
from tests.contract.test_board_failover import NOBODY, REFUSALS
from tests.integration.cluster import PATIENCE_S, Cluster, await_condition
from tests.kafka_nodes import FurtherBroker
from tests.servers import configure, kafka_jars, lacking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from wsgiref.types import StartResponse, WSGIEnvironment

    from playwright.sync_api import HttpCredentials

    from common.embedded.redis import EmbeddedRedis

pytest_plugins = ["tests.servers", "tests.redis_servers"]
pytestmark = [pytest.mark.kafka, pytest.mark.redis]

COPIES = "default.replication.factor=2\noffsets.topic.replication.factor=2\n"
BUCKET, JOB, AVRO_JOB = "models", "outages", "avro-outages"
SHORT_S, LONG_S = 20.0, 300.0
# Maximum time until every surface reports that a server is unavailable, and since when.
REPORTED_S = 15.0
SLOW = 4  # times slower a machine may be
RECORDS = 60_000
SHORT_RATE, LONG_RATE = 64, 8  # records a second
LOOK_S = 0.5
SINCE = re.compile(r"since (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) UTC")
NAMES = {
    "kafka": "Kafka is unavailable",
    "redis": "Redis is unavailable",
    "storage": "object storage is unavailable",
    "schema_registry": "w2: records wait for a schema",
}
SCHEMA = {
    "type": "record",
    "name": "Row",
    "fields": [{"name": "a", "type": "double"}, {"name": "label", "type": "boolean"}],
}

logger = logging.getLogger(__name__)


class RegistryServer:
    """A schema registry at a fixed address. Each of its schemas is `SCHEMA`."""

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        """Start answering."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps({"schema": json.dumps(SCHEMA)}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class Store(S3Server):
    """Object storage that tests can make read-only."""

    read_only = False

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if self.read_only and environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"]
        return super()._answer(environ, start)


class Feeder:
    """A thread that writes ids to the counting model's job at a steady rate."""

    def __init__(self, stack: Stack) -> None:
        self.produced, self.rate = 0, 0
        self._stack = stack
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def rest(self) -> None:
        """Pause until the next rate."""
        with self._lock:
            self.rate = 0

    def stop(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            with self._lock:
                if count := int(self.rate * LOOK_S):
                    self._stack.cluster.produce(count)
                    self.produced += count


class Stack:
    """All servers, and processes of each kind with jobs that train."""

    def __init__(
        self,
        kafka: ApacheKafka,
        second: ApacheKafka,
        server: EmbeddedRedis,
        folder: Path,
        closing_: ExitStack,
    ) -> None:
        self.kafka, self.redis = kafka, server
        self.redis_admin = redis.Redis.from_url(server.url)
        self.registry = RegistryServer()
        self.registry.start()
        self.store_port = free_port()
        self.store = Store(self.store_port)
        closing_.callback(self.registry.stop)
        closing_.callback(self._close_store)
        os.environ["AWS_ENDPOINT_URL_S3"] = self.store.url
        closing_.callback(os.environ.pop, "AWS_ENDPOINT_URL_S3")
        boto3.client("s3", endpoint_url=self.store.url).create_bucket(Bucket=BUCKET)
        api_port = free_port()
        settings = Settings(
            kafka=kafka.settings.bootstrap,
            kafka_group_protocol="consumer",
            redis=server.url,
            blobs=f"s3://{BUCKET}/doll",
            schema_registry={"url": self.registry.url},
            api_port=api_port,
        )
        options = "checkpoint: {every_updates: 4, keep: 3}"
        self.cluster = cluster = Cluster(settings, folder, JOB, RECORDS, options)
        closing_.callback(cluster.close)
        self.feeder = Feeder(self)
        closing_.callback(self.feeder.stop)
        with closing(KeyStore(cluster.log)) as keys:
            key, _ = keys.create("olga", "operator")
        self.avro = self._submit_avro()
        # The replicas on the second broker stay unavailable, so `min.insync.replicas` decides if
        # writes succeed.
        second.stop()
        self.ports = {name: free_port() for name in ("c1", "c2", "w1", "w2", "e1")}
        services = {"c": "coordinator", "w": "worker", "e": "evaluator"}
        for name, port in self.ports.items():
            job = AVRO_JOB if name == "w2" else ""
            cluster.start(services[name[0]], name, job, metrics_port=port)
        cluster.start("admin", "a1")
        url = f"http://127.0.0.1:{api_port}"
        self.key = key
        self.environ = {**os.environ, "DOLL_API": url, "DOLL_API_KEY": key, "COLUMNS": "200"}
        self.client = httpx2.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_S
        )
        closing_.callback(self.client.close)
        self.schema = 0

    def _close_store(self) -> None:
        self.store.close()

    @property
    def processes(self) -> tuple[str, ...]:
        """Names of all of them."""
        return (*self.ports, "a1")

    def _submit_avro(self) -> str:
        spec = parse_job(f"""
name: {AVRO_JOB}
streams: [{AVRO_JOB}-rows]
records: {{codec: avro, fields: {{a: {{dtype: float32}}, label: {{dtype: int64}}}}}}
task: {{name: logistic-regression, classes: 2, inputs: [a]}}
batch_size: 16
group_size: 1
optimizer: {{name: sgd, learning_rate: 0.1}}
batch_linger_s: 0.3
group_linger_s: 0.3
checkpoint: {{every_updates: 100000}}
""")
        self.cluster.log.create_topics([NewTopic(f"{AVRO_JOB}-rows")])
        with closing(JobOperations(self.cluster.log)) as jobs:
            return jobs.submit(spec).id

    def produce_avro(self, count: int) -> None:
        """Write rows with a new schema."""
        self.schema += 1
        parsed = fastavro.parse_schema(SCHEMA)
        with closing(self.cluster.log.writer()) as writer:
            for number in range(count):
                data = io.BytesIO()
                row = {"a": number / count, "label": number % 2 == 1}
                fastavro.schemaless_writer(data, parsed, row)
                value = b"\0" + self.schema.to_bytes(4, "big") + data.getvalue()
                writer.append(f"{AVRO_JOB}-rows", value)
            assert writer.flush(30.0)

    def avro_samples(self) -> int:
        """Return the number of records in updates of the Avro job."""
        found = read_decoded(self.cluster.log, topics.updates_topic(self.avro), decode_audit)
        return sum(getattr(record, "samples", 0) for _, record in found)

    # --- reports --------------------------------------------------------------------------------

    def job(self, job: str) -> str:
        """Return the state of a single job."""
        answer = self.client.get(f"/v1/jobs/{job}").json()
        return f"{answer.get('state')}: {answer.get('why', answer)}"

    def jobs(self, job: str) -> str:
        """Return the state of a job in the list."""
        answer = self.client.get("/v1/jobs").json()
        for each in answer.get("jobs", answer.get("items", [])):
            if job in (each.get("name"), each.get("id"), each.get("job")):
                return f"{each['state']}: {each['why']}"
        return str(answer)

    def listed(self) -> list[str]:
        """Return the lines of `doll job list`."""
        command = [sys.executable, "-m", "services.cli", "job", "list"]
        ran = subprocess.run(command, capture_output=True, text=True, env=self.environ, check=False)  # noqa: S603 -- our own command line
        return (ran.stdout + ran.stderr).splitlines()

    def readiness(self) -> dict[str, Any]:
        """Return the answer of /readyz."""
        found: dict[str, Any] = self.client.get("/readyz").json()
        return found

    def log_lines(self, event: str) -> dict[str, int]:
        """Return how often each process logged an event."""
        return {name: self.cluster.said(name).count(f" {event} ") for name in self.processes}

    def outage_s(self, server: str) -> float:
        """Return a server's longest outage in the metrics of all processes."""
        urls = [f"http://127.0.0.1:{port}/metrics" for port in self.ports.values()]
        lines = [line for url in urls for line in httpx2.get(url).text.splitlines()]
        lines += self.client.get("/metrics").text.splitlines()
        label = f'doll_outage_seconds{{server="{server}"}}'
        return max(float(line.split()[-1]) for line in lines if line.startswith(label))


class Case(NamedTuple):
    """An outage of some servers.

    Args:
        servers: The servers, each with the job whose state reports it.
        begin: Starts the outage.
        end: Ends the outage.
        works: Returns True if work was done since `before`.
        before: Returns the progress of the work.
        streams: True if the streams accept records during the outage.
    """

    servers: dict[str, str]
    begin: Callable[[Stack], object]
    end: Callable[[Stack], object]
    before: Callable[[Stack], Any]
    works: Callable[[Stack, Any], bool]
    streams: bool = True
    resumes_s: float = 15.0


def version(stack: Stack) -> int:
    return stack.cluster.version()


def is_newer(stack: Stack, before: int) -> bool:
    return stack.cluster.version() > before


def freeze_kafka(stack: Stack) -> None:
    os.kill(stack.kafka.pid, signal.SIGSTOP)


def thaw_kafka(stack: Stack) -> None:
    os.kill(stack.kafka.pid, signal.SIGCONT)


def let_kafka_refuse(stack: Stack, replicas: int) -> None:
    job = stack.cluster.record().id
    for topic in (topics.control_topic(job), topics.updates_topic(job)):
        settings = {"min.insync.replicas": str(replicas)}
        configure(stack.kafka.settings.bootstrap, topic, settings)


def of_redis(refusal: str) -> Case:
    begin, end = REFUSALS[refusal]
    return Case(
        {"redis": JOB},
        lambda stack: begin(stack.redis_admin),
        lambda stack: end(stack.redis_admin),
        version,
        is_newer,
    )


def stop_stores(stack: Stack) -> None:
    stack.store.close()
    stack.registry.stop()
    stack.produce_avro(64)


def start_stores(stack: Stack) -> None:
    stack.store = Store(stack.store_port)
    stack.registry.start()


def let_store_be(stack: Stack, *, read_only: bool) -> None:
    stack.store.read_only = read_only


def checkpoints(stack: Stack) -> int:
    return stack.log_lines("checkpoint_written")["c1"] + stack.log_lines("checkpoint_written")["c2"]


KAFKA = {"kafka": JOB}
CASES = {
    "kafka frozen": Case(
        KAFKA, freeze_kafka, thaw_kafka, version, is_newer, streams=False, resumes_s=30.0
    ),
    "kafka killed": Case(
        KAFKA,
        lambda stack: stack.kafka.kill(),
        lambda stack: stack.kafka.restart(),
        version,
        is_newer,
        streams=False,
        resumes_s=30.0,
    ),
    "kafka refuses writes": Case(
        KAFKA,
        partial(let_kafka_refuse, replicas=2),
        partial(let_kafka_refuse, replicas=1),
        version,
        is_newer,
        resumes_s=30.0,
    ),
    "redis away": Case(
        {"redis": JOB},
        lambda stack: stack.redis.kill(),
        lambda stack: stack.redis.restart(),
        version,
        is_newer,
    ),
    "redis full": of_redis("out of memory"),
    "redis is a replica": of_redis("a replica"),
    "storage and registry away": Case(
        {"storage": JOB, "schema_registry": AVRO_JOB},
        stop_stores,
        start_stores,
        lambda stack: (checkpoints(stack), stack.avro_samples()),
        lambda stack, before: checkpoints(stack) > before[0] and stack.avro_samples() > before[1],
    ),
    "storage read-only": Case(
        {"storage": JOB},
        partial(let_store_be, read_only=True),
        partial(let_store_be, read_only=False),
        checkpoints,
        lambda stack, before: checkpoints(stack) > before,
    ),
}


@pytest.fixture(scope="module")
def stack(system_redis: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    jars, folder = kafka_jars(), tmp_path_factory.mktemp("outages")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as undo:
        kafka = ApacheKafka(jars, folder / "1", properties=COPIES)
        undo.callback(kafka.kill)
        second = FurtherBroker(jars, folder / "2", kafka, 2, COPIES)
        undo.callback(second.kill)
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            patch.setenv(name, value)
        made = Stack(kafka, second, system_redis, folder, undo)
        made.feeder.rate = SHORT_RATE
        made.produce_avro(64)
        await_condition(lambda: version(made) >= 3, "three updates")
        await_condition(lambda: made.avro_samples() > 0, "an update of Avro records")
        await_condition(lambda: checkpoints(made) > 0, "a checkpoint")
        await_condition(lambda: made.readiness().get("status") is None, "the admin service")
        yield made


class Watch:
    """Records how soon each surface (logs, metrics, API, command line) reports an outage."""

    def __init__(self, stack: Stack, case: Case) -> None:
        self._stack, self._case = stack, case
        self._lines = {
            server: (
                stack.log_lines(f"{server}_unavailable"),
                stack.log_lines(f"{server}_recovered"),
            )
            for server in case.servers
        }
        self.begun_s = time.time()
        self.seen = dict[str, float]()
        self._listing: threading.Thread | None = None

    def look(self) -> bool:
        """Check the surfaces that have not reported the outage. Returns True once all have."""
        for server, job in self._case.servers.items():
            looks: dict[str, Callable[[], bool]] = {
                "log": lambda s=server: any(self.new_lines(s)[0].values()),  # type: ignore[misc]
                "metric": lambda s=server: self._stack.outage_s(s) > 0,  # type: ignore[misc]
                "job": lambda s=server, j=job: self.says(s, self._stack.job(j)),  # type: ignore[misc]
                "jobs": lambda s=server, j=job: self.says(s, self._stack.jobs(j)),  # type: ignore[misc]
                "readyz": lambda s=server: self._readyz_says(s),  # type: ignore[misc]
            }
            for what, says in looks.items():
                if f"{server} {what}" not in self.seen and says():
                    self._saw(f"{server} {what}")
        if self._listing is None or not self._listing.is_alive():  # a command takes a second
            self._listing = threading.Thread(target=self._list)
            self._listing.start()
        return len(self.seen) == len(self._case.servers) * (len(looks) + 1)

    def _saw(self, what: str) -> None:
        self.seen.setdefault(what, round(time.time() - self.begun_s, 1))

    def _list(self) -> None:
        printed = self._stack.listed()
        for server, job in self._case.servers.items():
            lines = [line for line in printed if line.startswith(f"{job}:")]
            if lines and self.says(server, lines[0]):
                self._saw(f"{server} list")

    def says(self, server: str, state: str) -> bool:
        """Return True if a state names the server and the time of the outage's begin."""
        found = SINCE.search(state)
        if NAMES[server] not in state or not found:
            return False
        at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
        assert abs(at.timestamp() - self.begun_s) < REPORTED_S * SLOW, state
        return True

    def _readyz_says(self, server: str) -> bool:
        check = self._stack.readiness()[server]
        since_s = check.get("since_s")
        return not check["ok"] and since_s and abs(since_s - self.begun_s) < REPORTED_S * SLOW

    def new_lines(self, server: str) -> tuple[dict[str, int], dict[str, int]]:
        """Return the number of lines per process that report this outage, and its end."""
        begun, over = self._lines[server]
        return (
            _since(self._stack.log_lines(f"{server}_unavailable"), begun),
            _since(self._stack.log_lines(f"{server}_recovered"), over),
        )

    def picture(self) -> str:
        """Describe what was seen and what is reported now, for a failure message."""
        says = {
            server: (self._stack.job(job), self._stack.jobs(job))
            for server, job in self._case.servers.items()
        }
        return f"{self.seen}\n{says}\n{self._stack.listed()}\n{self._stack.readiness()}"

    def flickers(self) -> list[str]:
        """Return the states that do not report the outage."""
        states = {server: self._stack.job(job) for server, job in self._case.servers.items()}
        return [state for server, state in states.items() if not self.says(server, state)]

    def is_over(self) -> bool:
        """Return True if no surface reports the outage any more."""
        stack = self._stack
        return all(
            stack.outage_s(server) == 0
            and stack.readiness()[server]["ok"]
            and NAMES[server] not in stack.job(job)
            for server, job in self._case.servers.items()
        )


def _since(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: now[name] - before[name] for name in now}


def check(stack: Stack, name: str, lasts_s: float, rate: int) -> None:
    """Run an outage. Every surface reports it, and all records are trained once."""
    case, cluster, feeder = CASES[name], stack.cluster, stack.feeder
    before = version(stack)
    feeder.rate = rate
    await_condition(lambda: version(stack) > before, "an update")
    if not case.streams:
        feeder.rest()
    watch = Watch(stack, case)
    case.begin(stack)
    flickers, reported = list[str](), False
    try:
        while time.time() < watch.begun_s + lasts_s or not reported:
            if reported:
                flickers += watch.flickers()
            reported = reported or watch.look()
            assert reported or time.time() < watch.begun_s + REPORTED_S * SLOW, watch.picture()
            time.sleep(LOOK_S)
        logger.info("%s: reported after s: %s; flickers: %s", name, watch.seen, flickers)
        done = case.before(stack) if case.streams else None
    finally:
        case.end(stack)
    ended_s = time.time()
    feeder.rate = rate
    if done is None:
        done = case.before(stack)
    await_condition(lambda: case.works(stack, done), "work", case.resumes_s * SLOW)
    works_s = time.time() - ended_s
    await_condition(watch.is_over, "nothing tells it any more", case.resumes_s * SLOW)
    over_s = time.time() - ended_s
    lines = {server: watch.new_lines(server) for server in case.servers}
    logger.info("%s: works after %.1f s, over after %.1f s; %s", name, works_s, over_s, lines)
    assert cluster.ended() == []
    for begun, over in lines.values():
        assert max(begun.values()) == 1
        assert begun == over
    assert flickers == []
    feeder.rest()
    await_condition(cluster.drained, "everything is settled")
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), feeder.produced, 0)


def test_job_page_shows_an_outage_until_it_is_over(stack: Stack) -> None:
    executable = chromium()
    if executable is None:
        lacking("Chromium was not found on PATH")
    with browser(executable) as opened:
        credentials: HttpCredentials = {"username": "me", "password": stack.key}
        page = opened.new_context(http_credentials=credentials).new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        page.goto(f"{stack.client.base_url}/#/jobs/{JOB}")
        page.locator(".badge").first.wait_for()
        since = re.compile(f"{NAMES['redis']} {SINCE.pattern}")
        banner = page.locator(".banner.grave", has_text=since)
        stack.redis_admin.replicaof(*NOBODY)
        try:
            banner.wait_for()
        finally:
            stack.redis_admin.replicaof("NO", "ONE")
        banner.wait_for(state="detached")


# These differ little from others: a frozen broker, a full Redis, an unavailable storage.
AT_NIGHT = ("kafka killed", "redis is a replica", "storage read-only")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in AT_NIGHT)) for name in CASES],
)
@pytest.mark.parametrize(
    ("lasts_s", "rate"),
    [
        pytest.param(SHORT_S, SHORT_RATE, id="20 s"),
        pytest.param(
            LONG_S,
            LONG_RATE,
            id="5 minutes",
            marks=[pytest.mark.nightly, pytest.mark.timeout(LONG_S + 5 * PATIENCE_S)],
        ),
    ],
)
def test_outage_is_reported_once_everywhere_and_work_resumes_after_it(
    stack: Stack, name: str, lasts_s: float, rate: int
) -> None:
    check(stack, name, lasts_s, rate)
