"""Health checks of the servers behind this process, in the background with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING

from pydantic import Field

from common.api.answers import Answer
from common.core.spans import Partition
from common.errors import DollError, UnavailableError
from common.kafka import names as topics
from common.telemetry.logging import event_logger
from common.telemetry.outages import Outage, ongoing

if TYPE_CHECKING:
    from common.core.liveness import OutageNotice
    from common.jobs.servers import Outside
    from common.kafka.port import Log
    from common.redis.port import Board
    from common.storage.port import Blobs
    from services.admin.stores import Stores

# Seconds that a result is reused.
FRESH_S = 3.0
PATIENCE_S = 3.0
# Seconds between checks that no request triggers.
LOOK_S = 5.0
_SERVERS = ("kafka", "redis", "storage", "schema_registry")
# Time after which the key that a check has written to Redis expires.
PROBE_S = 10.0
# Name of a blob that does not exist. No job can have this name.
_ABSENT = "Readyz"

_log = event_logger(__name__)


class Check(Answer):
    """Health of a server that DOLL depends on, such as Kafka."""

    ok: bool = Field(description="True if all processes of DOLL can use the server.")
    reason: str = Field(
        default="",
        description="Reason why DOLL cannot use the server. If DOLL can use it: a remark, or"
        " empty.",
    )
    since_s: float | None = Field(
        default=None,
        description="Time at which the server's outage started, in seconds since 1970; null if"
        " unknown, or if there is no outage.",
    )


class Checks:
    """Checks each server in a thread of its own; a check that still hangs is not started again.

    Args:
        ask: Check of each server, by name. It raises DollError if the server is unavailable;
            otherwise it returns a remark or "".
        clock: Monotonic clock in seconds.
        patience_s: Time limit of one check.
        reported: Returns the outages that other processes report, by server.
    """

    def __init__(
        self,
        ask: Mapping[str, Callable[[], str]],
        clock: Callable[[], float] = monotonic,
        patience_s: float = PATIENCE_S,
        reported: Callable[[], Mapping[str, OutageNotice]] = dict,
    ) -> None:
        self._reported = reported
        self._ask = ask
        self._outages = {name: Outage(_log, name) for name in ask}
        self._patience_s = patience_s
        self._clock = clock
        self._threads: ThreadPoolExecutor | None = None
        self._asked = dict[str, asyncio.Future[Check]]()
        self._found = dict[str, Check]()
        self._found_at = -FRESH_S
        self._looking: asyncio.Task[dict[str, Check]] | None = None

    async def look(self) -> dict[str, Check]:
        """Return the health of each server, at most a few seconds old."""
        if self._found and self._clock() - self._found_at < FRESH_S:
            return self._found
        # All waiting requests share one round of checks.
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return await asyncio.shield(self._looking)

    async def keep_looking(self) -> None:
        """Check forever, so that outages are noticed without requests."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        """Stop all checks."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _look(self) -> dict[str, Check]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._ask), "checks")
        loop = asyncio.get_running_loop()
        for name, ask in self._ask.items():
            if name not in self._asked or self._asked[name].done():
                self._asked[name] = loop.run_in_executor(self._threads, _checked, ask)
        await asyncio.wait(self._asked.values(), timeout=self._patience_s)
        slow = Check(ok=False, reason=f"did not answer within {self._patience_s:g} s")
        self._found = {"schema_registry": Check(ok=True)} | {
            name: asked.result() if asked.done() else slow for name, asked in self._asked.items()
        }
        self._found_at = self._clock()
        for name, outage in self._outages.items():
            check = self._found[name]
            if check.ok:
                outage.over()
            # A failed check of Kafka may only mean that jobs are unread, or that a change was
            # refused. Other parts of this process report outages of Kafka.
            elif name != "kafka" or check is slow:
                outage.met(UnavailableError(check.reason))
        for name, (since_s, reason) in {**self._reported(), **ongoing()}.items():
            if name in _SERVERS:
                self._found[name] = Check(ok=False, reason=reason, since_s=since_s)
        return self._found


def _checked(ask: Callable[[], str]) -> Check:
    try:
        return Check(ok=True, reason=ask())
    except DollError as error:
        return Check(ok=False, reason=" ".join(str(error).split()))
    except Exception as error:  # noqa: BLE001 -- an exception here would end all checks
        _log.exception("check_failed")
        return Check(ok=False, reason=f"{type(error).__name__}: {error}")


class Servers:
    """Checks of the individual servers; connects to each one at its first check."""

    def __init__(self, outside: Outside, log: Callable[[], Log], stores: Stores) -> None:
        self._outside = outside
        self._log = log
        self._stores = stores

    def asked(self) -> dict[str, Callable[[], str]]:
        """Return the checks for `Checks`, by server."""
        return {"kafka": self._kafka, "redis": self._redis, "storage": self._storage}

    def close(self) -> None:
        """Close the connections that were opened here."""
        if "_board" in vars(self):
            self._board.close()

    @cached_property
    def _board(self) -> Board:
        return self._outside.open_board(_ABSENT)

    @cached_property
    def _blobs(self) -> Blobs:
        return self._outside.open_blobs()

    def _kafka(self) -> str:
        self._log().bounds(Partition(topics.JOBS, 0))
        if reason := self._stores.unread or self._stores.unwritten:
            raise UnavailableError(reason)
        return ""

    def _redis(self) -> str:
        # A Redis that is full or has become a replica answers reads and refuses writes.
        self._board.put_unable("admin", "readiness check", PROBE_S)
        return ""

    def _storage(self) -> str:
        if not self._outside.settings.blobs:
            return "DOLL_BLOBS is not set, so jobs run without checkpoints"
        self._blobs.get(_ABSENT)
        return ""
