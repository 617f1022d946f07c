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
# Room in a Redis that evicts: enough for a model and a snapshot or two.
_ROOM_BYTES = 100_000
# If a broker loses power, its logs lose the records of this time.
_LOST_S = 2.0
# The harness's S3 server accepts any credentials, but its clients require some.
_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "chaos",
    "AWS_SECRET_ACCESS_KEY": "chaos",
    "AWS_DEFAULT_REGION": _REGION,
}


class Outside:
    """Everything that services talk to, on real servers, until the context ends.

    Coordinators reach Kafka and Redis directly, and each worker through proxies of its own. Object
    storage is behind one proxy for all.

    Args:
        folder: Folder for data and logs.
        workers: Number of pairs of proxies.
        tasks: Entrypoints that jobs may name.
    """

    def __init__(self, folder: Path, workers: int, tasks: tuple[str, ...]) -> None:
        # boto3 reads them from the environment, in the services too.
        os.environ.update(_CREDENTIALS)
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

            # A broker takes seconds to restart. One thread keeps the order of operations. It lives
            # to the end, because the kernel kills a child when the thread that started it ends.
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
        """Return the settings of the worker behind the proxies of this number."""
        return self.settings.model_copy(
            update={
                "kafka": f"127.0.0.1:{self.kafka_links[number].port}",
                "redis": f"redis://127.0.0.1:{self.redis_links[number].port}/0",
            }
        )

    def squeeze_redis(self) -> None:
        """Make Redis evict keys to make room for writes."""
        admin = self.redis_admin()
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] + _ROOM_BYTES)

    def empty_redis(self) -> None:
        """Make Redis accept and keep all writes again."""
        self.redis_admin().config_set("maxmemory", "0")
        self.redis_admin().config_set("maxmemory-policy", "noeviction")

    def lie(self, job: str, lie: Lie) -> None:
        """Make object storage answer wrongly about a job's objects."""
        self.answer_truthfully()
        finished = CheckpointStore(open_blobs(self.settings), job).finished()
        self._store.newest[job] = folder_of(finished[0]) if finished else ""
        self._store.lies[job] = lie

    def answer_truthfully(self) -> None:
        """Make object storage answer correctly."""
        self._store.lies.clear()

    def append_to_redis(self, key: str, entry: str, content: dict[str, bytes]) -> None:
        """Append to a Redis stream under an id, unless the stream has a higher one."""
        with suppress(redis.ResponseError):
            fields: dict[FieldT, EncodableT] = dict(content.items())
            self.redis_admin().xadd(key, fields, entry)

    def in_turn(self, do: Callable[[], object]) -> Future[object]:
        """Run an operation on the broker after all operations requested before."""
        self._operations.append(self._operator.submit(do))
        return self._operations[-1]

    def cut_tails(self, log: Log, places: Collection[Partition]) -> None:
        """Kill Kafka and cut the last records off some logs, like a loss of power."""

        def cut() -> None:
            since = time.time() - _LOST_S
            ends = {place: log.position_at(place, since) for place in places}
            self.kafka.kill()
            for place, end in ends.items():
                with suppress(ValueError):
                    # The log got no records in that time.
                    self.kafka.cut(*place, end)

        self.in_turn(cut)

    def await_broker(self) -> None:
        """Wait until all operations on the broker are done.

        Raises:
            UnavailableError: If the broker did not restart.
        """
        for operation in self._operations:
            operation.result()
        self._operations.clear()

    def heal(self) -> None:
        """Undo all network faults and wrong answers."""
        for link in (*self.redis_links, *self.kafka_links, self.storage_link):
            link.heal()
        self.answer_truthfully()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def redis_admin(self) -> redis.Redis:
        """Return a client that connects to Redis directly, without a proxy."""
        return redis.Redis.from_url(self.redis.url)
