"""Opens the outside that the settings name: the one place that knows the adapter behind a URL.

An adapter is imported when it is first wanted: each client library takes a good part of a second to
load, no process needs all of them, and a command line that is wrong needs none.
"""

from __future__ import annotations

import socket
from functools import cache, partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from common.errors import UnavailableError, UserError
from common.jobs.servers import Outside
from common.kafka.opening import open_log
from common.telemetry.logging import event_logger
from common.telemetry.tracing import NoTracer

if TYPE_CHECKING:
    from common.collectives.port import Groups, Rendezvous
    from common.config.settings import Settings
    from common.notices.port import PreemptionNotices
    from common.redis.access import RedisAccess
    from common.redis.port import Board, Boards
    from common.storage.port import Blobs
    from common.telemetry.tracing import Tracer

_REDIS_PORT = 6379
# Of all batches, the same ones in all processes. A trace is some 2 KB: at 100 batches a second, one
# in a hundred is 2 KB/s.
TRACED_SHARE = 0.01


def connect(settings: Settings) -> Outside:
    """Say how to open what the settings name; all who open Kafka or Redis so share its clients."""
    boards = cache(partial(open_boards, settings))
    return Outside(
        settings,
        open_log=cache(partial(open_log, settings)),
        open_board=lambda job: boards().board(job),
        open_blobs=partial(open_blobs, settings),
        live_statuses=lambda on: boards().live_statuses(on),
    )


def open_board(settings: Settings, job: str) -> Board:
    """Open a job's notice board in Redis; the server is not asked before the first call.

    Raises:
        UserError: If the settings name a file that cannot be used.
    """
    from common.redis.board import RedisBoard  # noqa: PLC0415 -- see above

    return RedisBoard(settings.redis, job, access=_redis_access(settings))


def open_boards(settings: Settings) -> Boards:
    """Open the notice boards of all jobs in Redis, over connections that they share.

    Raises:
        UserError: If the settings name a file that cannot be used.
    """
    from common.redis.exchange import RedisBoards  # noqa: PLC0415 -- see above

    return RedisBoards(settings.redis, access=_redis_access(settings))


def open_groups(settings: Settings, rendezvous: Rendezvous, transport: str = "gloo") -> Groups:
    """Open this process's way into groups of a job's members, who find each other there.

    Raises:
        UserError: If the settings name a file that cannot be used, or an address by which nobody
            else reaches this machine; if NCCL is to carry the numbers, and there is no GPU.
        UnavailableError: If a name cannot be resolved now.
    """
    from common.collectives.torch_group import TorchGroups  # noqa: PLC0415 -- see above

    return TorchGroups(advertised(settings), rendezvous, transport)


def advertised(settings: Settings) -> str:
    """The numeric address of this machine for others.

    Raises:
        UserError: If it is a loopback one, and Redis on another machine.
        UnavailableError: If a name cannot be resolved now.
    """
    redis = urlsplit(settings.redis)
    own = "127.0.0.1"  # by a socket of its own, Redis is here
    if redis.hostname:
        family, target = _resolved("DOLL_REDIS", redis.hostname)
        with socket.socket(family, socket.SOCK_DGRAM) as towards:
            try:
                towards.connect((target, redis.port or _REDIS_PORT))  # which sends nothing
            except OSError as error:
                raise UnavailableError(f"DOLL_REDIS: no way to {target}: {error}") from error
            own = towards.getsockname()[0]
    if not settings.advertise:
        return own
    _, named = _resolved("DOLL_ADVERTISE", settings.advertise)
    if ip_address(named).is_loopback and not ip_address(own).is_loopback:
        raise UserError(
            f"DOLL_ADVERTISE: {settings.advertise} is {named} here, a loopback address, but Redis"
            f" is on another machine: name an address that others reach, such as {own}"
        )
    return named


def _resolved(variable: str, host: str) -> tuple[socket.AddressFamily, str]:
    """An address of a host, IPv4 where it has one: all members need the same kind."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise UnavailableError(f"{variable}: {host} cannot be resolved: {error}") from error
    family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, str(address[0])


def _redis_access(settings: Settings) -> RedisAccess:
    from common.redis.access import RedisAccess  # noqa: PLC0415 -- see above

    return RedisAccess(
        password=settings.redis_password,
        ca=settings.redis_ca,
        cert=settings.redis_cert,
        key=settings.redis_key,
    )


def open_blobs(settings: Settings) -> Blobs:
    """Open object storage.

    Raises:
        UserError: If the settings name none.
        UnavailableError: If it is a directory that cannot be used.
    """
    url = urlsplit(settings.blobs)
    if url.scheme == "file":
        from common.storage.disk import DiskBlobs  # noqa: PLC0415 -- see above

        return DiskBlobs(Path(unquote(url.path)))
    if url.scheme == "s3":
        from common.storage.s3 import S3Blobs  # noqa: PLC0415 -- see above

        prefix = unquote(url.path).strip("/")
        return S3Blobs(url.netloc, f"{prefix}/" if prefix else "")
    raise UserError(
        "no object storage is named: set DOLL_BLOBS to file:///directory or s3://bucket/prefix"
    )


def open_notices(settings: Settings) -> PreemptionNotices | None:
    """Open where this machine hears of its end, or None; it is not asked before the first look."""
    if settings.notices == "none":
        return None
    from common.notices.ec2 import Ec2Notices  # noqa: PLC0415 -- see above
    from common.notices.metadata import InstanceMetadata  # noqa: PLC0415 -- see above

    return Ec2Notices(InstanceMetadata(settings.metadata_endpoint))


def open_tracer(settings: Settings, service: str, name: str) -> Tracer:
    """Open where spans are told; the collector is not asked before there are some.

    Raises:
        UserError: If a collector is named and what speaks to it is not installed.
    """
    if not settings.traces:
        return NoTracer()
    try:
        from common.telemetry.otlp import OtlpTracer  # noqa: PLC0415 -- see above
    except ModuleNotFoundError as error:
        raise UserError(
            "DOLL_TRACES: OpenTelemetry is not installed here: pip install 'doll[tracing]', or"
            " leave DOLL_TRACES empty"
        ) from error
    logger = event_logger(service)

    def changed(reason: str) -> None:
        if reason:
            logger.warning("traces_lost", reason=reason)
        else:
            logger.info("traces_sent_again")

    return OtlpTracer(settings.traces, TRACED_SHARE, service, name, changed)
