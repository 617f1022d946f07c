"""Servers and a network that can be broken: Kafka, Redis, object storage, proxies before them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import boto3
import redis

from common.config.settings import Settings
from common.embedded.apache_kafka import ApacheKafka, resolve
from common.embedded.redis import EmbeddedRedis
from common.storage.port import open_blobs
from common.storage.store import CheckpointStore, folder_of
from load.harness.proxy import Network
from load.harness.s3_servers import LyingServer

if TYPE_CHECKING:
    from redis.typing import EncodableT, FieldT

    from common.core.spans import Partition
    from common.kafka.port import Log
    from load.harness.s3_servers import Lie

_BUCKET = "checkpoints"
_REGION = "us-east-1"
_ROOM_BYTES = 100_000  # in a Redis that evicts: a model and a snapshot or two
_LOST_S = 2.0  # a log whose broker loses power loses what it took so long before
# Of our own S3 server, which believes everybody; its clients want to be told something.
_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "chaos",
    "AWS_SECRET_ACCESS_KEY": "chaos",
    "AWS_DEFAULT_REGION": _REGION,
}


class Outside:
    """Everything that services talk to, all of it real; ends with its context.

    Coordinators reach Kafka and Redis directly, each worker through proxies of its own; object
    storage lies behind one proxy for all.

    Args:
        folder: For data and logs.
        workers: How many pairs of proxies there are.
        tasks: Entrypoints that jobs may name.
    """

    def __init__(self, folder: Path, workers: int, tasks: tuple[str, ...]) -> None:
        os.environ.update(_CREDENTIALS)  # boto3 looks for them there, in our services too
        with ExitStack() as stack:
            network = stack.enter_context(Network())
            self.redis_links = tuple(network.proxy() for _ in range(workers))
            self.kafka_links = tuple(network.proxy() for _ in range(workers))
            self.storage_link = network.proxy()
            self._store = LyingServer()
            stack.callback(self._store.close)
            boto3.client("s3", endpoint_url=self._store.url).create_bucket(Bucket=_BUCKET)
            self.storage_link.pass_on_to(urlsplit(self._store.url).port or 0)
            os.environ["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{self.storage_link.port}"

            binary = shutil.which("redis-server")
            self.redis = EmbeddedRedis(Path(binary) if binary else None, tcp=True)
            stack.callback(self.redis.close)
            redis_port = urlsplit(self.redis.url).port or 0
            for link in self.redis_links:
                link.pass_on_to(redis_port)

            # A broker takes seconds to come back. One thread, so that all is done in its order; it
            # stays to the end, since the kernel ends a child with the thread that made it.
            self._operator = stack.enter_context(ThreadPoolExecutor(1, "broker"))
            self._operations = list[Future[object]]()
            proxies = [link.port for link in self.kafka_links]
            self.kafka = ApacheKafka(resolve(), folder / "kafka", proxies=proxies)
            stack.callback(lambda: self._operator.submit(self.kafka.stop).result())
            for link, port in zip(self.kafka_links, self.kafka.proxied, strict=True):
                link.pass_on_to(port)

            self.settings = Settings(
                kafka=self.kafka.settings.bootstrap,
                kafka_group_protocol="consumer",
                redis=self.redis.url,
                blobs=f"s3://{_BUCKET}/jobs",
                tasks=tasks,
                threads=1,
                log_format="json",
            )
            self._ends = stack.pop_all()

    def worker_settings(self, number: int) -> Settings:
        """The settings of the worker behind the proxies of this number."""
        return self.settings.model_copy(
            update={
                "kafka": f"127.0.0.1:{self.kafka_links[number].port}",
                "redis": f"redis://127.0.0.1:{self.redis_links[number].port}/0",
            }
        )

    def squeeze_redis(self) -> None:
        """Let it throw away what it likes, to make room for what is written."""
        admin = self.redis_admin()
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] + _ROOM_BYTES)

    def empty_redis(self) -> None:
        """Let it take and keep everything again."""
        self.redis_admin().config_set("maxmemory", "0")
        self.redis_admin().config_set("maxmemory-policy", "noeviction")

    def lie(self, job: str, lie: Lie) -> None:
        """Let object storage answer wrongly about a job's objects."""
        self.answer_truthfully()
        finished = CheckpointStore(open_blobs(self.settings), job).finished()
        self._store.newest[job] = folder_of(finished[0]) if finished else ""
        self._store.lies[job] = lie

    def answer_truthfully(self) -> None:
        """Let object storage answer rightly."""
        self._store.lies.clear()

    def append_to_redis(self, key: str, entry: str, content: dict[str, bytes]) -> None:
        """Append to a stream under an id, unless a higher one stands there."""
        with suppress(redis.ResponseError):
            fields: dict[FieldT, EncodableT] = dict(content.items())
            self.redis_admin().xadd(key, fields, entry)

    def in_turn(self, do: Callable[[], object]) -> Future[object]:
        """Do something to the broker, or with it, after all that was asked of it before."""
        self._operations.append(self._operator.submit(do))
        return self._operations[-1]

    def cut_tails(self, log: Log, places: Collection[Partition]) -> None:
        """Kill Kafka and take from some logs what they took last, as the loss of power does."""

        def cut() -> None:
            since = time.time() - _LOST_S
            ends = {place: log.position_at(place, since) for place in places}
            self.kafka.kill()
            for place, end in ends.items():
                with suppress(ValueError):  # nothing came so late
                    self.kafka.cut(*place, end)

        self.in_turn(cut)

    def await_broker(self) -> None:
        """Wait until everything that was asked of the broker is done.

        Raises:
            UnavailableError: If it did not start again.
        """
        for operation in self._operations:
            operation.result()
        self._operations.clear()

    def heal(self) -> None:
        """Make the network whole."""
        for link in (*self.redis_links, *self.kafka_links, self.storage_link):
            link.heal()
        self.answer_truthfully()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def redis_admin(self) -> redis.Redis:
        """A client of Redis itself, past all proxies."""
        return redis.Redis.from_url(self.redis.url)
