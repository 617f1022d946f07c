"""Groups of `torch.distributed` behind `common.collectives.port`, without the global group.

A process has several groups at the same time, so `init_process_group` is not used. This module
makes up for the following limits of gloo, as measured with torch 2.13:

- After a death, only the neighbours of the dead member raise. The other members raise when these
  neighbours free their group and everything that refers to it. An exception's traceback is enough
  to keep the group alive, so none of our errors is raised from one of gloo's.
- gloo's own `abort` does nothing. A receive with a timeout of a millisecond closes the connections,
  one after the other, and each waits 10 ms for its event loop. So a separate thread closes them,
  while the member reports that it left, forms the next group, and computes.
- Forming a group cannot be interrupted and takes up to five timeouts. It runs in a separate thread,
  which is abandoned when nothing waits for it any more. The process ends only after that thread,
  because torch aborts a process that ends before.
- Lazy connections hang if a member died before the first use. So all connections are made at once.
- An error does not say which member died, since errors spread from neighbour to neighbour. So every
  process listens on a port for this purpose alone, and a member that raises tries the ports of the
  others.

NCCL sums in the memory of GPUs, one per member. This module makes up for these limits of NCCL:

- It may never notice a death, and its timeouts are not reliable. So each call runs in a separate
  thread, which is abandoned when nothing waits for it any more. If a call takes long, the ports of
  the other members are tried.
- It connects in its first call, and waits there until its own time limit
  (`TORCH_NCCL_NONBLOCKING_TIMEOUT`, s) even after an abort. So members first announce themselves
  through the rendezvous, and then sum one number.
- torch's watchdog ends the process if a call of NCCL takes too long. It is turned off.

In torch's wheels, neither has TLS or authentication: see docs/howto/security.md.
"""

from __future__ import annotations

import errno
import fcntl
import os
import selectors
import socket
import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError, ProcessGroupGloo, Work, is_nccl_available

from common.collectives.port import TIMEOUT_S, Peer
from common.errors import GroupError, OutsideError, UnavailableError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from common.collectives.port import Group
    from common.config.settings import Settings
    from common.redis.port import Rendezvous

_REDIS_PORT = 6379
# Threads of gloo in a group: one sends while the other receives.
_THREADS = 2
# Time between checks for an abort while a group forms.
_LOOK_S = 0.02
# Time that forming a group may take before the other members' ports are tried. It takes 0.2 s for
# 20 members.
_PATIENCE_S = 0.25
# Time within which a member's port must accept a connection. It is longer than the kernel's first
# retransmission, so that one lost packet accuses no member.
_REACH_S = 1.5
# Time between attempts to find the dead members after a failed call.
_AGAIN_S = 0.005
_NO_WAY = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}
# Time between checks for the end of a call of NCCL.
_POLL_S = 0.0002
# Least rate in bytes per second. NCCL does not report progress, so the time limit of a call grows
# with its size.
_SLOWEST = 50e6
# Lowest descriptor for the listener: above those of connections, below the limit of open files.
_HIGH = 512
_POISON_TAG = 77
_PORTS = 65535
_GPU = "cuda"
# Environment variables of torch, as explained above.
_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "5",
}
_ABORTED = "the group was aborted"
_LATE = "members did not announce themselves in time"


class _ProcessGroup(Protocol):
    """Methods of torch's process groups that are used here; torch's stubs lack most of them."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def allreduce(self, tensors: list[torch.Tensor]) -> Work: ...

    def alltoall_base(
        self, incoming: torch.Tensor, outgoing: torch.Tensor, received: list[int], sent: list[int]
    ) -> Work: ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


def advertised(settings: Settings) -> str:
    """Return the numeric address at which other machines reach this one.

    Raises:
        UserError: If it is a loopback address and Redis is on another machine.
        UnavailableError: If a name cannot be resolved now.
    """
    redis = urlsplit(settings.redis)
    # Without a host, the URL names a Unix socket, so Redis is on this machine.
    own = "127.0.0.1"
    if redis.hostname:
        family, target = _resolved("DOLL_REDIS", redis.hostname)
        with socket.socket(family, socket.SOCK_DGRAM) as towards:
            try:
                # This selects the own address without sending a packet.
                towards.connect((target, redis.port or _REDIS_PORT))
            except OSError as error:
                raise UnavailableError(
                    f"DOLL_REDIS: no network route to {target}: {error}"
                ) from error
            own = towards.getsockname()[0]
    if not settings.advertise:
        return own
    _, named = _resolved("DOLL_ADVERTISE", settings.advertise)
    if ip_address(named).is_loopback and not ip_address(own).is_loopback:
        raise UserError(
            f"DOLL_ADVERTISE: must be an address that other machines reach, such as {own}, got"
            f" {settings.advertise} ({named}, a loopback address)"
        )
    return named


def _resolved(variable: str, host: str) -> tuple[socket.AddressFamily, str]:
    """Return an address of a host, preferably IPv4, since all members need the same family."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise UnavailableError(f"{variable}: {host} cannot be resolved: {error}") from error
    family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, str(address[0])


class TorchGroups:
    """Makes groups that include this process. May be shared between threads.

    Args:
        host: Numeric address at which the other members reach this machine.
        rendezvous: Rendezvous at which members find each other.
        transport: `gloo`, or `nccl` between GPUs.

    Raises:
        UserError: If this machine does not have the address, or lacks the GPU that NCCL needs.
    """

    def __init__(self, host: str, rendezvous: Rendezvous, transport: str = "gloo") -> None:
        self._host = host
        self._rendezvous = rendezvous
        self._kind: type[_TorchGroup] = GlooGroup
        if transport == "nccl":
            self._kind = NcclGroup
            _check_gpu()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        except OSError as error:
            raise UserError(
                f"DOLL_ADVERTISE: must be an address of this machine, got {host}: {error.strerror}"
            ) from error
        self._listener = _closed_first(self._listener)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._answer, name="group-probes", daemon=True).start()

    def group(
        self, name: str, members: Sequence[Peer], rank: int, timeout_s: float = TIMEOUT_S
    ) -> Group:
        """See `Groups`."""
        return self._kind(self._host, self._rendezvous, name, members, rank, timeout_s)

    def close(self) -> None:
        """See `Groups`."""
        # The shutdown wakes the thread that waits in `accept`.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _answer(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                self._listener.accept()[0].close()
            # The listener is closed, or this process has no free descriptor. Without a free
            # descriptor, the kernel still accepts connections.
            except OSError:
                sleep(_LOOK_S)


class _TorchGroup(ABC):
    """One member's part in a group. All methods but `abort` are for one thread."""

    # Type of the device that sends and receives.
    _device: str

    def __init__(
        self,
        host: str,
        rendezvous: Rendezvous,
        name: str,
        members: Sequence[Peer],
        rank: int,
        timeout_s: float,
    ) -> None:
        self._host = host
        self._name = name
        self._members = tuple(members)
        self._rank = rank
        self._timeout_s = timeout_s
        self._over = threading.Event()
        self._store = _Store(rendezvous, name, timeout_s, self._over)
        self._group: _ProcessGroup | None = None

    @abstractmethod
    def _connected(self) -> _ProcessGroup:
        """Return torch's group with all members connected. Runs in a separate thread."""

    @staticmethod
    @abstractmethod
    def _close(group: _ProcessGroup) -> None:
        """Close all connections of a group, even if another thread uses them."""

    @abstractmethod
    def _done(
        self, begin: Callable[[_ProcessGroup], list[Work]], group: _ProcessGroup, size: int
    ) -> str:
        """Complete a collective operation; return the reason if that fails, otherwise "".

        Args:
            begin: Starts the operation.
            group: Torch's group.
            size: Number of bytes that the operation sends.
        """

    def form(self) -> None:
        """Connect to all other members; see `Group`.

        Raises:
            GroupError: If the group cannot be formed.
        """
        self._refuse_addresses()
        formed = SimpleQueue[tuple[_ProcessGroup | None, str]]()
        threading.Thread(target=self._connect, args=(formed,)).start()
        deadline, patient_until = monotonic() + self._timeout_s, monotonic() + _PATIENCE_S
        why, unreachable = "", frozenset[str]()
        while self._group is None:
            with suppress(Empty):
                self._group, why = formed.get(timeout=_LOOK_S)
            if self._over.is_set():
                why = _ABORTED
            elif self._group is None and (why or monotonic() > patient_until):
                unreachable = self._unreachable(self._over.is_set)
                patient_until = monotonic() + _PATIENCE_S
                if why == _LATE or (not why and (unreachable or monotonic() > deadline)):
                    why = self._what_lacks()
            if why:
                self.abort()
                # A group that is formed even later is closed by its own thread.
                with suppress(Empty):
                    self._group, _ = formed.get_nowait()
                    self.abort()
                raise self._error("connect", why, unreachable)

    def all_reduce(self, vector: Tensor) -> None:
        """See `Group`."""
        tensor = self._here(vector)
        self._call("sum gradients", vector.nbytes, lambda group: [group.allreduce([tensor])])
        _bring(tensor, vector)

    def exchange(
        self, outgoing: Tensor, sent: Sequence[int], incoming: Tensor, received: Sequence[int]
    ) -> None:
        """See `Group`."""
        into, of, lengths = self._here(incoming), self._here(outgoing), list(received)
        size = outgoing.nbytes + incoming.nbytes
        self._call(
            "exchange", size, lambda group: [group.alltoall_base(into, of, lengths, list(sent))]
        )
        _bring(into, incoming)

    def gather(self, vector: Tensor, lengths: Sequence[int]) -> None:
        """See `Group`."""
        tensor = self._here(vector)
        parts = torch.split(tensor, list(lengths))
        ranks = [rank for rank, length in enumerate(lengths) if length]
        self._call(
            *("gather", vector.nbytes),
            lambda group: [group.broadcast(parts[rank], rank) for rank in ranks],
        )
        _bring(tensor, vector)

    def copy(self, vectors: Sequence[Tensor]) -> None:
        """See `Group`."""
        full = [vector for vector in vectors if len(vector)]
        tensors = [self._here(vector) for vector in full]
        size = sum(vector.nbytes for vector in full)
        self._call("copy", size, lambda group: [group.broadcast(each, 0) for each in tensors])
        for tensor, vector in zip(tensors, full, strict=True) if self._rank else ():
            _bring(tensor, vector)
        # Keeps rank 0 in the group until all members have read everything.
        self.all_reduce(torch.zeros(1, device=self._device))

    def abort(self) -> None:
        """See `Group`."""
        self._leave()

    def _here(self, vector: Tensor) -> Tensor:
        """Return a vector, or its copy on the device that sends it."""
        return vector if vector.device.type == self._device else vector.to(self._device)

    def _leave(self) -> threading.Thread | None:
        """Leave the group; return the thread that closes the connections, if there are any."""
        self._over.set()
        group, self._group = self._group, None
        if group is None:
            return None
        closing = threading.Thread(target=self._close, args=(group,), name="group-close")
        closing.start()
        return closing

    def _call(self, what: str, size: int, begin: Callable[[_ProcessGroup], list[Work]]) -> None:
        """Run a collective operation.

        Raises:
            GroupError: If the operation fails. Nothing refers to the group then.
        """
        group = self._group
        if group is None:
            raise self._error(
                what,
                _ABORTED if self._over.is_set() else "the group was never connected",
                frozenset(),
            )
        why = self._done(begin, group, size)
        # References would keep the other members from raising, see the module's first point.
        del begin, group
        if why:
            aborted = self._over.is_set()
            closing = self._leave()
            unreachable = frozenset[str]() if aborted else self._gone(closing)
            raise self._error(what, _ABORTED if aborted else why, unreachable)

    def _gone(self, closing: threading.Thread | None) -> frozenset[str]:
        """Return the unreachable members; try again until our connections are closed.

        The port of a dying process may close a moment later than its connections.
        """
        while True:
            waited = closing is None or not closing.is_alive()
            unreachable = self._unreachable()
            if unreachable or waited or closing is None:
                return unreachable
            closing.join(_AGAIN_S)

    def _connect(self, formed: SimpleQueue[tuple[_ProcessGroup | None, str]]) -> None:
        """Form the group, and close it if this member has left meanwhile."""
        try:
            group = self._connected()
        except (RuntimeError, OutsideError) as error:
            formed.put((None, _in_short(error)))
            return
        formed.put((group, ""))
        if self._over.is_set():
            self._close(group)

    def _what_lacks(self) -> str:
        late = [each.name for n, each in enumerate(self._members) if n not in self._store.came]
        return f"{', '.join(late)} did not connect" if late else "connecting took too long"

    def _refuse_addresses(self) -> None:
        """Refuse invalid addresses, and loopback addresses unless all members have one.

        Raises:
            GroupError: If a member has such an address.
        """
        hosts = {each: _host(each.address) for each in self._members}
        bad = [each for each, host in hosts.items() if host is None] or [
            each for each, host in hosts.items() if host is not None and host.is_loopback
        ]
        if bad and (len(bad) < len(hosts) or None in hosts.values()):
            members = ", ".join(f"{each.name} ({each.address})" for each in bad)
            why = (
                f"no address that others can reach is advertised by {members}; set DOLL_ADVERTISE"
                " there"
            )
            own = self._members[self._rank] in bad
            names = frozenset[str]() if own else frozenset(each.name for each in bad)
            raise self._error("connect", why, names)

    def _unreachable(self, given_up: Callable[[], bool] = lambda: False) -> frozenset[str]:
        """Return the names of other members whose ports accept no connection."""
        others = [each for n, each in enumerate(self._members) if n != self._rank]
        return frozenset(each.name for each in _not_connected(others, given_up))

    def _error(self, what: str, why: str, unreachable: frozenset[str]) -> GroupError:
        whom = "".join(
            f"; cannot reach {each.name} at {each.address}"
            for each in self._members
            if each.name in unreachable
        )
        return GroupError(f"group {self._name} cannot {what}: {why}{whom}", unreachable)


class GlooGroup(_TorchGroup):
    """Group of gloo, over TCP and in main memory."""

    _device = "cpu"

    def _connected(self) -> _ProcessGroup:
        # Torch's stubs lack the options.
        kind: Any = ProcessGroupGloo
        options = kind._Options()  # noqa: SLF001 -- there is no other way to set the address
        options._devices = [kind.create_device(hostname=self._host, lazy_init=False)]  # noqa: SLF001
        options._timeout = timedelta(seconds=self._timeout_s)  # noqa: SLF001
        options._threads = _THREADS  # noqa: SLF001
        group: _ProcessGroup = kind(self._store, self._rank, len(self._members), options)
        return group

    @staticmethod
    def _close(group: _ProcessGroup) -> None:
        # A timeout of a receive closes the connections. A receive from a dead member fails at once
        # and closes no others, so every member is tried.
        for other in range(group.size()):
            if other != group.rank():
                with suppress(RuntimeError):
                    receiving = group.recv([torch.empty(1)], other, _POISON_TAG)
                    receiving.wait(timedelta(milliseconds=1))

    def _done(
        self, begin: Callable[[_ProcessGroup], list[Work]], group: _ProcessGroup, size: int
    ) -> str:
        # The timeout of gloo is for pieces, so the size does not matter.
        del size
        try:
            for work in begin(group):
                work.wait()
        except RuntimeError as error:
            return _in_short(error)
        return ""


class NcclGroup(_TorchGroup):
    """Group of NCCL, between GPUs, one per member."""

    _device = _GPU

    def _connected(self) -> _ProcessGroup:
        from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 -- some wheels lack it

        self._store.set(_here(self._rank), b"")
        self._store.wait([_here(rank) for rank in range(len(self._members))])
        for name, value in _NCCL.items():
            os.environ.setdefault(name, value)
        kind: Any = ProcessGroupNCCL
        options = kind.Options()
        # Without blocking, connecting ends even if a member has died.
        options.config.blocking = 0
        group: _ProcessGroup = kind(self._store, self._rank, len(self._members), options)
        one = torch.zeros(1, device=_GPU)
        why = self._done(lambda group: [group.allreduce([one])], group, one.nbytes)
        if why:
            self._close(group)
            raise RuntimeError(why)
        return group

    @staticmethod
    def _close(group: _ProcessGroup) -> None:
        # `abort` may wait for a call that is beginning, and `_gone` waits for this function.
        threading.Thread(target=group.abort, name="group-abort").start()

    def _done(
        self, begin: Callable[[_ProcessGroup], list[Work]], group: _ProcessGroup, size: int
    ) -> str:
        ended = SimpleQueue[str]()
        threading.Thread(target=self._run, args=(begin, group, ended)).start()
        deadline = monotonic() + self._timeout_s + size / _SLOWEST
        patient_until = monotonic() + _PATIENCE_S
        while True:
            with suppress(Empty):
                return ended.get(timeout=_LOOK_S)
            if self._over.is_set():
                return _ABORTED
            if monotonic() > deadline:
                return "others did not take part in time"
            if monotonic() > patient_until:
                if self._unreachable(self._over.is_set):
                    return "other members have ended"
                patient_until = monotonic() + _PATIENCE_S

    def _run(
        self,
        begin: Callable[[_ProcessGroup], list[Work]],
        group: _ProcessGroup,
        ended: SimpleQueue[str],
    ) -> None:
        """Run a collective operation in a thread that may be abandoned."""
        why = ""
        try:
            for work in begin(group):
                while not (work.is_completed() or self._over.is_set()):
                    sleep(_POLL_S)
                if self._over.is_set():
                    break
                # This makes later work on the GPU run after the operation, and raises its error.
                work.wait()
        except RuntimeError as error:
            why = _in_short(error)
        ended.put(_ABORTED if self._over.is_set() else why)


class _Store(Store):
    """Store that torch uses to exchange addresses while a group forms. For one thread.

    Unlike torch's own stores, its waits end when the group is aborted.
    """

    def __init__(
        self, rendezvous: Rendezvous, name: str, timeout_s: float, over: threading.Event
    ) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._name = name
        self._timeout_s = timeout_s
        self._over = over
        self._position = ""
        self._values = dict[str, bytes]()
        # Ranks that have written an entry.
        self.came = set[int]()

    def set(self, key: str, value: bytes | str) -> None:
        """Write an entry."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._rendezvous.leave(self._name, key, data)

    def get(self, key: str) -> bytes:
        """Wait for an entry and return its value."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for entries.

        Raises:
            DistStoreError: If the entries do not come in time, the group was aborted, or an entry
                exists twice.
        """
        deadline = monotonic() + (timeout.total_seconds() if timeout else self._timeout_s)
        while not self._values.keys() >= set(keys):
            left_s = deadline - monotonic()
            if self._over.is_set() or left_s <= 0:
                raise DistStoreError(_LATE)
            found = self._rendezvous.entries(self._name, self._position, min(left_s, _LOOK_S))
            for self._position, key, value in found:
                if key in self._values:
                    raise DistStoreError("the group's name was used before")
                self._values[key] = value
                # Keys end with the rank: gloo's are 0/<rank>, ours for NCCL here/<rank>.
                with suppress(ValueError):
                    self.came.add(int(key.rpartition("/")[2]))


def _check_gpu() -> None:
    """Check that torch has NCCL and a GPU on this machine.

    Raises:
        UserError: If torch lacks one of them.
    """
    if not (torch.cuda.is_available() and is_nccl_available()):
        raise UserError(
            "aggregation.transport: nccl needs GPUs, but PyTorch finds none on this machine; use"
            " gloo, or run workers of this job on machines with one GPU each"
        )
    # The first use of a GPU takes a second. It is done here so that no other member waits for it.
    torch.zeros(1, device=_GPU)


def _closed_first(listener: socket.socket) -> socket.socket:
    """Return a listener with a descriptor that closes before those of connections at a death.

    Linux closes the highest descriptors first. So a member that sees a connection close also finds
    the port closed.
    """
    # If the limit of open files is too low, a member may have to try the port twice.
    with suppress(OSError):
        high = fcntl.fcntl(listener.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
        listener.close()
        return socket.socket(fileno=high)
    return listener


def _not_connected(peers: Iterable[Peer], given_up: Callable[[], bool]) -> list[Peer]:
    """Return the peers whose ports accept no connection; empty if `given_up` returns True."""
    refused, deadline = list[Peer](), monotonic() + _REACH_S
    # OSError means that this process has no free descriptor; the remaining peers are then skipped.
    with selectors.DefaultSelector() as selector, ExitStack() as sockets, suppress(OSError):
        for peer in peers:
            host, _, port = peer.address.rpartition(":")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            probe = sockets.enter_context(socket.socket(family))
            probe.settimeout(0)
            error = probe.connect_ex((host, int(port)))
            # The error may be known at once; the socket reports it only once.
            if error in _NO_WAY:
                refused.append(peer)
            elif error in (0, errno.EINPROGRESS):
                selector.register(probe, selectors.EVENT_WRITE, (probe, peer))
        while selector.get_map() and monotonic() < deadline and not given_up():
            for key, _ in selector.select(_LOOK_S):
                probe, peer = key.data
                selector.unregister(probe)
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _NO_WAY:
                    refused.append(peer)
        refused += [key.data[1] for key in selector.get_map().values()]
    return [] if given_up() else refused


def _here(rank: int) -> str:
    """Return the key of the entry that announces a member."""
    return f"here/{rank}"


def _bring(sent: Tensor, vector: Tensor) -> None:
    """Copy the result back into a vector that was sent from another device."""
    if sent is not vector:
        vector.copy_(sent)


def _host(address: str) -> IPv4Address | IPv6Address | None:
    """Return the host of `host:port`; None if the address is invalid."""
    host, _, port = address.rpartition(":")
    try:
        return ip_address(host) if 0 < int(port) <= _PORTS else None
    except ValueError:
        return None


def _in_short(error: Exception) -> str:
    """Return an error of gloo without its place in the source and without its advice."""
    return str(error).rpartition(".cc")[2].partition("] ")[2].partition(". This ")[0] or str(error)
