"""Everything that the services need outside, on this machine: Kafka, Redis and object storage."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from common.config.settings import Settings, read_settings
from common.embedded.kafka import EmbeddedKafka
from common.embedded.redis import EmbeddedRedis


class EmbeddedStack(ExitStack):
    """Servers that begin and end with this object; where an address is given, that server is used.

    Args:
        base: What the services are told besides (Kafka's group protocol and security, tasks, logs);
            not a port of metrics, which no two of them could have.
        kafka: Address of a Kafka that is there; an embedded one if empty.
        redis: URL of a Redis that is there; an embedded one if empty.
        blobs: Folder of the object storage, made if it is not there; a temporary one if None.

    Raises:
        UserError: If an address makes no sense, or there is no Redis here to start.
        UnavailableError: If a server does not start.

    Attributes:
        servers: The servers that were started.
    """

    def __init__(
        self,
        base: Settings | None = None,
        *,
        kafka: str = "",
        redis: str = "",
        blobs: Path | None = None,
    ) -> None:
        super().__init__()
        self.servers = list[EmbeddedKafka | EmbeddedRedis]()
        with ExitStack() as parts:
            if not kafka:
                broker = parts.enter_context(EmbeddedKafka())
                kafka = f"embedded:{broker.control.path}"
                self.servers.append(broker)
            if not redis:
                server = parts.enter_context(EmbeddedRedis())
                redis = server.url
                self.servers.append(server)
            if blobs is None:
                folder = tempfile.TemporaryDirectory(prefix="doll-blobs-")
                blobs = Path(parts.enter_context(folder))
            self.settings = read_settings(
                {
                    **(base or Settings()).environ(),
                    "DOLL_METRICS_PORT": "",
                    "DOLL_KAFKA": kafka,
                    "DOLL_REDIS": redis,
                    "DOLL_BLOBS": blobs.absolute().as_uri(),
                }
            )
            self.push(parts.pop_all())
