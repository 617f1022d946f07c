"""Groups of `torch.distributed` (`common.collectives.port`), made one by one, never global.

Several live in a process side by side, so nothing of `init_process_group` is used. What gloo does
not do itself, as measured with torch 2.13:

- After a death only the neighbours of the dead raise. The others do when those let go of their
  group, with everything that refers to it: an exception's traceback is enough to keep it. So no
  error of ours is raised from one of gloo's.
- gloo's own `abort` does nothing. A receive that may take a millisecond closes all connections, one
  after the other: each waits for its loop, 10 ms. So a thread of its own does that, and whoever
  left can say so, form the next group, compute.
- Forming cannot be ended, and takes up to five timeouts: it is done in a thread of its own, which
  is left behind where nobody waits for it any more. The process ends no sooner than that thread:
  torch aborts one that does.
- Connections made when they are first used hang where a member died before that: all are made at
  once.
- No error says who is gone, as they pass from neighbour to neighbour. So every process listens on
  a port that does nothing else, and who raises tries those of the others.

NCCL adds up in the memory of GPUs, one for each member; numbers are copied there and back, as
weights are held and stepped in the machine's memory. What it does not do itself:

- It may not notice a death at all, and no timeout of its calls can be relied on. So each is made in
  a thread of its own, which is left behind where nobody waits for it any more, and where a call
  takes long the others' ports are tried.
- It connects in its first calls, and waits there, whatever is aborted, until its own time limit
  (`TORCH_NCCL_NONBLOCKING_TIMEOUT`, s). So members first tell each other by the rendezvous that
  they are there, and then add up one number.
- torch watches over NCCL, and ends the process where a call takes too long; that is turned off.

Neither has TLS or authentication in torch's wheels: see docs/howto/security.md.
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

import numpy as np
import torch
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError, ProcessGroupGloo, Work, is_nccl_available

from common.collectives.port import TIMEOUT_S, Peer
from common.errors import GroupError, OutsideError, UnavailableError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from common.collectives.port import Group
    from common.config.settings import Settings
    from common.core.messages import Vector
    from common.redis.port import Rendezvous

_REDIS_PORT = 6379
_THREADS = 2  # of gloo, in a group: one sends while one receives
_LOOK_S = 0.02  # between looks whether a group that is being formed was aborted
_PATIENCE_S = 0.25  # with a group that is being formed, until others are tried; 20 take 0.2 s
# Longer than the kernel waits until it asks again, so that one lost packet accuses nobody.
_REACH_S = 1.5
_AGAIN_S = 0.005  # between looks for who is gone, after a call that failed
_NO_WAY = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}
_POLL_S = 0.0002  # between looks whether NCCL is done
_SLOWEST = 50e6  # bytes/s: NCCL does not say whether a call goes on, so a long one may take longer
_HIGH = 512  # above the descriptors of connections, and below what a process may have open
_POISON_TAG = 77
_PORTS = 65535
_GPU = "cuda"
_NCCL = {  # of torch; see above
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "5",
}
_ABORTED = "it was aborted"
_LATE = "entries did not come"


class _ProcessGroup(Protocol):
    """What is used of torch's, whose stubs lack most of it."""

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


class TorchGroups:
    """A process's way into groups; shared between threads.

    Args:
        host: A numeric address of this machine, by which the others reach it.
        rendezvous: Where members find each other.
        transport: What carries the numbers: `gloo`, or `nccl` between GPUs.

    Raises:
        UserError: If this machine has no such address, or no GPU that NCCL needs.
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
                f"DOLL_ADVERTISE: {host} is no address of this machine: {error.strerror}"
            ) from error
        self._listener = _closed_first(self._listener)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._answer, name="group-probes", daemon=True).start()

    def group(
        self, name: str, members: Sequence[Peer], rank: int, timeout_s: float = TIMEOUT_S
    ) -> Group:
        """Make a member of a group that is still to be formed."""
        return self._kind(self._host, self._rendezvous, name, members, rank, timeout_s)

    def close(self) -> None:
        """Be reached no more; groups that stand go on."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up whoever waits in `accept`
        self._listener.close()

    def _answer(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                self._listener.accept()[0].close()
            except OSError:  # it is closed, or this process has no file left: the kernel answers
                sleep(_LOOK_S)


class _TorchGroup(ABC):
    """One member's part in a group; all but `abort` belong to one thread."""

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
        """Torch's group, all of whose members are connected; in a thread of its own."""

    @staticmethod
    @abstractmethod
    def _close(group: _ProcessGroup) -> None:
        """Close all connections of a group, whatever thread uses them."""

    @staticmethod
    @abstractmethod
    def _tensor(vector: Vector) -> torch.Tensor:
        """The numbers of a vector where they can be sent."""

    @abstractmethod
    def _done(
        self, begin: Callable[[_ProcessGroup], list[Work]], group: _ProcessGroup, size: int
    ) -> str:
        """Do something together; returns why it cannot be ended, empty where it was.

        Args:
            begin: Begins it.
            group: Torch's.
            size: Of all that is sent, bytes.
        """

    def form(self) -> None:
        """Connect to all the others.

        Raises:
            GroupError: If that cannot be.
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
                with suppress(Empty):  # if it comes later still, its thread sees to it
                    self._group, _ = formed.get_nowait()
                    self.abort()
                raise self._error("be formed", why, unreachable)

    def all_reduce(self, vector: Vector) -> None:
        """Sum the vectors of all members, in place."""
        tensor = self._tensor(vector)
        self._call("add up", vector.nbytes, lambda group: [group.allreduce([tensor])])
        _bring(tensor, vector)

    def exchange(
        self, outgoing: Vector, sent: Sequence[int], incoming: Vector, received: Sequence[int]
    ) -> None:
        """Send a part of a vector to each member, and get one from each."""
        into, of, lengths = self._tensor(incoming), self._tensor(outgoing), list(received)
        size = outgoing.nbytes + incoming.nbytes
        self._call(
            "exchange", size, lambda group: [group.alltoall_base(into, of, lengths, list(sent))]
        )
        _bring(into, incoming)

    def gather(self, vector: Vector, lengths: Sequence[int]) -> None:
        """Let every member have the parts of all, in place."""
        tensor = self._tensor(vector)
        parts = torch.split(tensor, list(lengths))
        ranks = [rank for rank, length in enumerate(lengths) if length]
        self._call(
            *("gather", vector.nbytes),
            lambda group: [group.broadcast(parts[rank], rank) for rank in ranks],
        )
        _bring(tensor, vector)

    def copy(self, vectors: Sequence[Vector]) -> None:
        """Send rank 0's vectors to all others, and return when all have all of them."""
        full = [vector for vector in vectors if len(vector)]
        tensors = [self._tensor(vector) for vector in full]
        size = sum(vector.nbytes for vector in full)
        self._call("copy", size, lambda group: [group.broadcast(each, 0) for each in tensors])
        for tensor, vector in zip(tensors, full, strict=True) if self._rank else ():
            _bring(tensor, vector)
        self.all_reduce(np.zeros(1, np.float32))  # who has sent it all may leave before it is read

    def abort(self) -> None:
        """Leave the group, from any thread and at any time; whoever is in a call of it raises."""
        self._leave()

    def _leave(self) -> threading.Thread | None:
        """Likewise; returns what closes the connections, unless there are none."""
        self._over.set()
        group, self._group = self._group, None
        if group is None:
            return None
        closing = threading.Thread(target=self._close, args=(group,), name="group-close")
        closing.start()
        return closing

    def _call(self, what: str, size: int, begin: Callable[[_ProcessGroup], list[Work]]) -> None:
        """Do something together.

        Raises:
            GroupError: If it cannot be ended; nothing refers to the group then.
        """
        group = self._group
        if group is None:
            raise self._error(
                what, _ABORTED if self._over.is_set() else "it was never formed", frozenset()
            )
        why = self._done(begin, group, size)
        del begin, group  # see the module's first point
        if why:
            aborted = self._over.is_set()
            closing = self._leave()
            unreachable = frozenset[str]() if aborted else self._gone(closing)
            raise self._error(what, _ABORTED if aborted else why, unreachable)

    def _gone(self, closing: threading.Thread | None) -> frozenset[str]:
        """Which of the others are, once it shows or our connections are closed.

        The port of a process that dies may close a moment later than the connection that told.
        """
        while True:
            waited = closing is None or not closing.is_alive()
            unreachable = self._unreachable()
            if unreachable or waited or closing is None:
                return unreachable
            closing.join(_AGAIN_S)

    def _connect(self, formed: SimpleQueue[tuple[_ProcessGroup | None, str]]) -> None:
        """Form it; whoever began this may have left."""
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
        return f"{', '.join(late)} did not come" if late else "connecting took too long"

    def _refuse_addresses(self) -> None:
        """Refuse addresses that are none, or that mean another machine to each who reads them.

        Raises:
            GroupError: If a member has told such a one, and others a better one.
        """
        hosts = {each: _host(each.address) for each in self._members}
        bad = [each for each, host in hosts.items() if host is None] or [
            each for each, host in hosts.items() if host is not None and host.is_loopback
        ]
        if bad and (len(bad) < len(hosts) or None in hosts.values()):
            members = ", ".join(f"{each.name} ({each.address})" for each in bad)
            why = f"no address for others is told by {members}: set DOLL_ADVERTISE where they run"
            own = self._members[self._rank] in bad
            names = frozenset[str]() if own else frozenset(each.name for each in bad)
            raise self._error("be formed", why, names)

    def _unreachable(self, given_up: Callable[[], bool] = lambda: False) -> frozenset[str]:
        """Which of the others do not let us connect to their ports."""
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
    """Over TCP, from the machine's memory."""

    def _connected(self) -> _ProcessGroup:
        kind: Any = ProcessGroupGloo  # whose stubs lack its options
        options = kind._Options()  # noqa: SLF001 -- there is no other way to name the address
        options._devices = [kind.create_device(hostname=self._host, lazy_init=False)]  # noqa: SLF001
        options._timeout = timedelta(seconds=self._timeout_s)  # noqa: SLF001
        options._threads = _THREADS  # noqa: SLF001
        group: _ProcessGroup = kind(self._store, self._rank, len(self._members), options)
        return group

    @staticmethod
    def _close(group: _ProcessGroup) -> None:
        for other in range(group.size()):  # from the dead nothing is received: closes no other
            if other != group.rank():
                with suppress(RuntimeError):  # which is the point
                    receiving = group.recv([torch.empty(1)], other, _POISON_TAG)
                    receiving.wait(timedelta(milliseconds=1))

    @staticmethod
    def _tensor(vector: Vector) -> torch.Tensor:
        return torch.from_numpy(vector)

    def _done(
        self, begin: Callable[[_ProcessGroup], list[Work]], group: _ProcessGroup, size: int
    ) -> str:
        del size  # gloo's timeout is of pieces
        try:
            for work in begin(group):
                work.wait()
        except RuntimeError as error:
            return _in_short(error)
        return ""


class NcclGroup(_TorchGroup):
    """Between GPUs, each of another member."""

    def _connected(self) -> _ProcessGroup:
        from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 -- not in every wheel

        self._store.set(_here(self._rank), b"")
        self._store.wait([_here(rank) for rank in range(len(self._members))])
        for name, value in _NCCL.items():
            os.environ.setdefault(name, value)
        kind: Any = ProcessGroupNCCL
        options = kind.Options()
        options.config.blocking = 0  # connecting comes to an end, whoever is gone
        group: _ProcessGroup = kind(self._store, self._rank, len(self._members), options)
        one = torch.zeros(1, device=_GPU)
        why = self._done(lambda group: [group.allreduce([one])], group, one.nbytes)
        if why:
            self._close(group)
            raise RuntimeError(why)
        return group

    @staticmethod
    def _close(group: _ProcessGroup) -> None:
        # It waits for a call that is beginning, and whoever looks for the dead waits for us.
        threading.Thread(target=group.abort, name="group-abort").start()

    @staticmethod
    def _tensor(vector: Vector) -> torch.Tensor:
        return torch.from_numpy(vector).to(_GPU)

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
                    return "others are gone"
                patient_until = monotonic() + _PATIENCE_S

    def _run(
        self,
        begin: Callable[[_ProcessGroup], list[Work]],
        group: _ProcessGroup,
        ended: SimpleQueue[str],
    ) -> None:
        """Do something together, in a thread that is left behind where it is of no use any more."""
        why = ""
        try:
            for work in begin(group):
                while not (work.is_completed() or self._over.is_set()):
                    sleep(_POLL_S)
                if self._over.is_set():
                    break
                work.wait()  # what is done next on the GPU comes after it; an error is raised
        except RuntimeError as error:
            why = _in_short(error)
        ended.put(_ABORTED if self._over.is_set() else why)


class _Store(Store):
    """What torch keeps addresses in while a group forms; for one thread, a wait can be given up."""

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
        self.came = set[int]()  # ranks that have left an entry

    def set(self, key: str, value: bytes | str) -> None:
        """Leave an entry."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._rendezvous.leave(self._name, key, data)

    def get(self, key: str) -> bytes:
        """The value of an entry, once it is there."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for entries.

        Raises:
            DistStoreError: If they do not come, are not waited for any more, or one is there twice.
        """
        deadline = monotonic() + (timeout.total_seconds() if timeout else self._timeout_s)
        while not self._values.keys() >= set(keys):
            left_s = deadline - monotonic()
            if self._over.is_set() or left_s <= 0:
                raise DistStoreError(_LATE)
            found = self._rendezvous.entries(self._name, self._position, min(left_s, _LOOK_S))
            for self._position, key, value in found:
                if key in self._values:
                    raise DistStoreError("its name was used before")
                self._values[key] = value
                with suppress(ValueError):  # gloo's keys are 0/<rank>, and ours of NCCL as well
                    self.came.add(int(key.rpartition("/")[2]))


def _check_gpu() -> None:
    """See whether this machine has what NCCL needs.

    Raises:
        UserError: If it has not.
    """
    if not (torch.cuda.is_available() and is_nccl_available()):
        raise UserError(
            "aggregation.transport: nccl adds up in GPUs' memory, and torch finds none here:"
            " take gloo, or run workers of this job on machines with a GPU each"
        )
    torch.zeros(1, device=_GPU)  # the first use takes a second, which no member shall wait


def _closed_first(listener: socket.socket) -> socket.socket:
    """The same by a descriptor that is closed before those of connections, where its process dies.

    Linux closes the highest first. So whoever sees a connection end finds the port closed, too.
    """
    with suppress(OSError):  # few may be open: whoever looks has to look twice
        high = fcntl.fcntl(listener.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
        listener.close()
        return socket.socket(fileno=high)
    return listener


def _not_connected(peers: Iterable[Peer], given_up: Callable[[], bool]) -> list[Peer]:
    """Those whose ports take no connection now; none of them where it is given up."""
    refused, deadline = list[Peer](), monotonic() + _REACH_S
    with selectors.DefaultSelector() as selector, ExitStack() as sockets, suppress(OSError):
        for peer in peers:  # unless this process has no file left for it
            host, _, port = peer.address.rpartition(":")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            probe = sockets.enter_context(socket.socket(family))
            probe.settimeout(0)
            error = probe.connect_ex((host, int(port)))
            if error in _NO_WAY:  # it may be known at once, and is told only once
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
    """The key by which a member says that it comes."""
    return f"here/{rank}"


def _bring(tensor: torch.Tensor, vector: Vector) -> None:
    """Copy numbers that lie elsewhere, as on a GPU, to where they are wanted."""
    if tensor.device.type != "cpu":
        torch.from_numpy(vector).copy_(tensor)


def _host(address: str) -> IPv4Address | IPv6Address | None:
    """That of `host:port`; None where it is none of these."""
    host, _, port = address.rpartition(":")
    try:
        return ip_address(host) if 0 < int(port) <= _PORTS else None
    except ValueError:
        return None


def _in_short(error: Exception) -> str:
    """What gloo says, without where in its source, and without its advice."""
    return str(error).rpartition(".cc")[2].partition("] ")[2].partition(". This ")[0] or str(error)
