"""External services on this machine: Kafka, Redis and object storage."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from common.config.settings import Settings, read_settings
from common.embedded.kafka import EmbeddedKafka
from common.embedded.redis import EmbeddedRedis


class EmbeddedStack(ExitStack):
    """Servers that start and end with this object, except those whose address is given.

    Args:
        base: Optional. Further settings of the services, such as Kafka's group protocol and
            security, tasks and logs. The metrics port is dropped, since two services cannot share
            it.
        kafka: Optional. Address of a running Kafka. If unset, starts an embedded one.
        redis: Optional. URL of a running Redis. If unset, starts an embedded one.
        blobs: Optional. Folder of object storage, created if missing. If unset, a temporary one.

    Raises:
        UserError: If an address is invalid, or no Redis server is installed.
        UnavailableError: If a server does not start.

    Attributes:
        servers: The servers that were started.
        settings: Settings for the services.
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
                    # If the machine ends, all servers do.
                    "DOLL_NOTICES": "none",
                    "DOLL_KAFKA": kafka,
                    "DOLL_REDIS": redis,
                    "DOLL_BLOBS": blobs.absolute().as_uri(),
                }
            )
            self.push(parts.pop_all())
