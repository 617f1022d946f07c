"""Starts services in milliseconds, as forks of a process that has loaded torch and their code.

`python -m services.worker` needs 1.6 s of processor time for imports. The fork server, a child
process, needs that time once. It runs `python -m common.runtime.fork_server`, or is a fork of its
parent, see `begin`. It imports a service's modules at the first request for the service, or at
`prepare`, starts no thread, and forks for each request.

A fork is like a separate process, with its own session, output, environment and working directory.
Only `/proc` differs: `/proc/PID/environ` and `cmdline` are the server's, and `/proc/PID/comm` is
the name of the process. The server ends with its parent.

    fork_module    the fork is a child of the server and ends with it
    fork_child     the fork becomes a child of this process and ends with it, whatever the server
                   does; this process reads its exit status from the kernel

Nothing that a fork imports or changes reaches the server or the next fork.

This works on Linux only. Elsewhere the kernel does not end such processes, and forking torch is not
safe.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import importlib
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from common.config.program import SERVICES, command_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import BinaryIO

# Folder of our packages, in a checkout or installed.
_ROOT = Path(__file__).parents[2]
# Modules that all services import on first use.
_LATER = ("common.kafka.stream", "common.redis.exchange", "common.storage.disk")
_LATER_OF = {
    "worker": ("services.worker.loop",),
    # It imports scikit-learn and much of SciPy, which takes more than half as long as torch.
    "evaluator": ("river.drift",),
    "admin": ("uvicorn",),
}
# Prefixes of the environment variables that are for one process.
_SETTINGS = ("DOLL_", "FLEET_")
# Pause between checks whether a fork has its new parent, which takes less than a millisecond.
_ADOPTED_S = 0.0002
# Longest time until orphans have ended, because one could start others for ever.
_ORPHANS_S = 1.0
# Bytes of a request. Linux has the same limit for one environment variable.
_LONGEST = 1 << 17
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # <linux/prctl.h>


# Guards the start of the server and of its forks.
_starting = threading.Lock()
# Children of this process that are no strangers.
_spared = set[int]()
# The socket of a server that `begin` has forked.
_inherited = list[socket.socket]()
P = TypeVar("P")


class ForkRequest(msgspec.Struct, frozen=True):
    """Request for a new process, sent with descriptors.

    The first descriptor is the output, the second a socket that reports the process id and the exit
    code. With a `parent`, the new process inherits a third one, whose number becomes the last
    argument. A request without descriptors only loads the modules, see `prepare`.
    """

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    # Id of the process that becomes the parent of the new one; 0 for the server.
    parent: int = 0

    def run(self) -> NoReturn:
        """Run the module in a fork, which then ends.

        Raises:
            SystemExit: Always, with the exit status of the module.
        """
        ctypes.CDLL(None).prctl(_PR_SET_NAME, _name(self).encode())
        become(self.module, self.arguments, self.environment, self.folder)
        sys.exit(0)


_REQUEST = msgspec.json.Decoder(ForkRequest)


# --- the client -----------------------------------------------------------------------------------


class Forked:
    """A process that the fork server started, with the interface of `subprocess.Popen`."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        pid, fds, _, _ = socket.recv_fds(channel, _LONGEST, 1)
        if not fds:
            raise OSError("the process that forks services has ended; its errors stand above")
        [self._pidfd] = fds
        self.pid = int(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends, and return its exit code as `poll` does.

        Raises:
            TimeoutExpired: If the process still runs after `timeout` seconds.
        """
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                # An empty message means that the server has ended, so the kernel kills its forks.
                self.returncode = int(self._channel.recv(_LONGEST) or -signal.SIGKILL)
            except (BlockingIOError, TimeoutError) as error:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from error
            self._channel.close()
            os.close(self._pidfd)
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            # The process may have ended since the poll.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


class Adopted:
    """A child of this process that the fork server started, with the interface of `Popen`."""

    def __init__(self, channel: socket.socket) -> None:
        with channel:
            pid = channel.recv(_LONGEST)
        if not pid:
            raise OSError("the process that forks services has ended; its errors stand above")
        self.pid = int(pid)
        _spared.add(self.pid)
        self.returncode: int | None = None
        # This process alone waits for the child, so no other process can have its id.
        self._pidfd = os.pidfd_open(self.pid)
        self._ended = select.poll()
        self._ended.register(self._pidfd, select.POLLIN)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends, and return its exit code as `poll` does.

        Processes that it started and that are still in its process group are killed then.

        Raises:
            TimeoutExpired: If the process still runs after `timeout` seconds.
        """
        if self.returncode is None:
            if not self._ended.poll(None if timeout is None else 1e3 * timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            # The id of the group is in use until the exit status was read.
            os.killpg(self.pid, signal.SIGKILL)
            # Another child may get the id as soon as this one was waited for.
            with _starting:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                _spared.discard(self.pid)
            os.close(self._pidfd)
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process and its process group."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)


def fork_child(
    module: str, arguments: Sequence[str], output: int, inherited: socket.socket
) -> Adopted:
    """Run `python -P -m module arguments` in a child that starts within milliseconds.

    The kernel kills the child when this process ends. The main thread of this process has to live
    as long as the child.

    Args:
        module: Module of ours, in the package of a service such as `services.worker`.
        arguments: Arguments of the command line, without the last one.
        output: Descriptor for standard output and standard error.
        inherited: Socket that the child inherits. Its descriptor is the last argument.

    Raises:
        OSError: If the process cannot be started.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1):
        raise OSError(ctypes.get_errno(), "this process cannot become the parent of forks")
    variables = dict(os.environ)
    here = str(Path.cwd())
    request = ForkRequest(module, tuple(arguments), variables, here, parent=os.getpid())
    return _request(Adopted, msgspec.json.encode(request), output, inherited.fileno())


def end_strangers() -> None:
    """Kill orphans that became children of this process, and wait a moment for their end.

    They are processes that a child of this process started and left behind. In a process that
    calls `fork_child`, only the fork server may start children.
    """
    until = time.monotonic() + _ORPHANS_S
    while time.monotonic() < until:
        with _starting:
            strangers = [pid for pid in _children() if pid not in _spared]
            for pid in strangers:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        # The children of an orphan become children of this process once the orphan is dead.
        if not strangers:
            return
        time.sleep(_ADOPTED_S)


def _children() -> list[int]:
    """Return the ids of this process's children, or none if the kernel does not list them."""
    found = list[int]()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found += map(int, (thread / "children").read_text().split())
    return found


def fork_module(
    module: str,
    arguments: Sequence[str],
    output: BinaryIO,
    environment: Mapping[str, str] | None = None,
) -> Forked:
    """Run `python -P -m module arguments` in a process that starts within milliseconds.

    The first call starts the fork server of this process. A call starts it again if it has ended.

    Args:
        module: Package of ours with a `__main__`, such as `services.worker`.
        arguments: Arguments of the command line.
        output: File for standard output and standard error.
        environment: Optional. All environment variables. If unset, those of this process.

    Raises:
        OSError: If the process cannot be started.
    """
    variables = dict(os.environ if environment is None else environment)
    request = msgspec.json.encode(ForkRequest(module, tuple(arguments), variables, str(Path.cwd())))
    return _request(Forked, request, output.fileno())


def prepare(*services: str) -> None:
    """Load the modules of services in the fork server, without waiting for it.

    Args:
        services: Names of services, in the order in which they will start.
    """
    if sys.platform != "linux":
        return
    # `fork_module` reports the error.
    with _starting, suppress(OSError):
        server = _server()
        for service in services:
            request = ForkRequest(f"services.{service}", (), {}, "")
            server.send(msgspec.json.encode(request))


def _request(make: Callable[[socket.socket], P], request: bytes, *fds: int) -> P:
    """Send a request to the server, which is started again if it has ended.

    Args:
        make: Gets the socket on which the server answers, and returns the new process.
        request: The encoded request.
        fds: Descriptors for it, without the second one.

    Raises:
        OSError: If the request is too large, or the server cannot be started.
    """
    if len(request) > _LONGEST:
        raise OSError(errno.E2BIG, f"the environment is larger than {_LONGEST} bytes")
    with _starting:
        try:
            return make(_send_request(request, *fds))
        except OSError:
            _server.cache_clear()
        return make(_send_request(request, *fds))


def _send_request(request: bytes, output: int, *others: int) -> socket.socket:
    """Send a request to the server.

    Raises:
        OSError: If the server has ended.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            socket.send_fds(_server(), [request], [output, theirs.fileno(), *others])
        except OSError:
            ours.close()
            raise
    return ours


def begin(service: str) -> ForkRequest | None:
    """Start the fork server of this process, without waiting for it.

    While this process has one thread, the server becomes a fork of it, so that nothing is loaded
    twice.

    Args:
        service: The service whose modules the server loads.

    Returns:
        None in this process. In every fork, the request that the fork has to run.

    Raises:
        OSError: If the server cannot be started.
    """
    if sys.platform != "linux":
        return None
    if _threads() > 1:
        prepare(service)
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    this = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        _spared.add(pid)
        _inherited.append(ours)
        prepare(service)
        return None
    ours.close()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, b"fork-server")
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != this:
        os._exit(1)
    os.setsid()
    request = _Server(theirs).serve()
    if request is None:
        os._exit(0)
    return request


@cache
def _server() -> socket.socket:
    if _inherited:
        return _inherited.pop()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Settings come with each request. With a machine's variables, a fleet would count the server as
    # another machine.
    kept = {name: it for name, it in os.environ.items() if not name.startswith(_SETTINGS)}
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    with theirs:
        process = subprocess.Popen(  # noqa: S603 -- our own command line, no shell
            command_of(__name__, str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            # The server's errors go to this process's standard error.
            stdout=subprocess.DEVNULL,
            # OpenBLAS would start threads on import.
            env={**kept, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            # Ctrl-C is for this process alone.
            start_new_session=True,
        )
    _spared.add(process.pid)

    def end() -> None:
        ours.close()
        # The server may be busy with imports. The kernel kills its forks with it.
        process.kill()
        process.wait()

    # If this process is killed, the kernel closes the socket and the server ends.
    atexit.register(end)
    return ours


# --- the server -----------------------------------------------------------------------------------


class _Server:
    """Forks for each request. In a fork, `serve` returns the request to run."""

    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self._selector = selectors.DefaultSelector()
        self._selector.register(asked, selectors.EVENT_READ)
        self._libc = ctypes.CDLL(None)

    def serve(self) -> ForkRequest | None:
        """Serve until the parent closes the socket, and return None; in a fork, the request."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._asked:
                    self._send_exit_code(key)
                    continue
                request, fds, _, _ = socket.recv_fds(self._asked, _LONGEST, 3)
                if not request:
                    return None
                wanted = _REQUEST.decode(request)
                root, _, service = wanted.module.partition(".")
                if root == "services" and (service := service.partition(".")[0]) in SERVICES:
                    load(service)
                if not fds:
                    continue
                if not wanted.parent and self._forks(fds):
                    return wanted
                if wanted.parent and self._forks_for(wanted.parent, fds):
                    arguments = (*wanted.arguments, str(fds[2]))
                    return msgspec.structs.replace(wanted, arguments=arguments)

    def _send_exit_code(self, key: selectors.SelectorKey) -> None:
        """Wait for a fork that has ended, and send its exit code."""
        pidfd: int = key.fd
        pid, channel = key.data
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        # BrokenPipeError means that the client has closed its end.
        with channel, suppress(BrokenPipeError):
            channel.send(b"%d" % os.waitstatus_to_exitcode(status))

    def _forks(self, fds: Sequence[int]) -> bool:
        """Fork; True in the new process."""
        output, channel = fds[0], socket.socket(fileno=fds[1])
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_child_of(server, output)
            channel.close()
            return True
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, (pid, channel))
        with suppress(BrokenPipeError):
            socket.send_fds(channel, [b"%d" % pid], [pidfd])
        os.close(output)
        return False

    def _forks_for(self, parent: int, fds: Sequence[int]) -> bool:
        """Fork twice, so that the new process becomes a child of `parent`; True in the new process.

        As the process between them ends, the kernel gives its child to the nearest ancestor that
        adopts orphans.
        """
        output, channel, _ = fds
        between = os.fork()
        if between:
            for fd in fds:
                os.close(fd)
            os.waitpid(between, 0)
            return False
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(_ADOPTED_S)
        # The parent-death signal is about the parent at the time of the call.
        self._become_child_of(parent, output)
        with socket.socket(fileno=channel) as answers, suppress(BrokenPipeError):
            answers.send(b"%d" % os.getpid())
        return True

    def _become_child_of(self, parent: int, output: int) -> None:
        """Prepare a new process, which ends if its parent has ended."""
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have ended before the call of `prctl`.
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        self._asked.close()
        for key in self._selector.get_map().values():
            if key.data:
                os.close(key.fd)
                key.data[1].close()
        self._selector.close()


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@cache
def load(*services: str) -> None:
    """Import the modules of services, once.

    Args:
        services: Names from `SERVICES`.

    Raises:
        RuntimeError: If an import started a thread, which a fork would lack.
    """
    # Imports make no garbage, and collections would take a quarter of their time.
    gc.disable()
    for service in services:
        module = f"services.{service}.__main__"
        for each in (*_LATER, *_LATER_OF.get(service, ()), module):
            importlib.import_module(each)
        # Each fork runs this module again, as `__main__`.
        del sys.modules[module]
    if _threads() > 1:
        raise RuntimeError("something has begun a thread on its import: it cannot be forked")
    # Otherwise the first collection of each fork would copy all shared memory.
    gc.freeze()
    gc.enable()


def main() -> None:
    """Run the server and, in a fork, the requested module."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    request = _Server(asked).serve()
    # Nothing needs to be cleaned up.
    if request is None:
        os._exit(0)
    request.run()


def become(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: str
) -> None:
    """Run a module in a fork as a new process would.

    Args:
        module: See `fork_module`.
        arguments: See `fork_module`.
        environment: All environment variables.
        folder: Working directory.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [each for each in path if each and each not in sys.path]
    sys.argv[1:] = arguments
    import numpy as np  # noqa: PLC0415 -- loaded in the server, and clients do not need it

    np.random.seed()  # noqa: NPY002 -- the only generator that forks would share
    # Another module that was loaded may have imported it.
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _name(request: ForkRequest) -> str:
    """Return the name that `ps` shows: the process's `--name`, or its module."""
    words = request.arguments
    if "--name" in words[:-1]:
        return words[words.index("--name") + 1]
    return request.module


if __name__ == "__main__":
    main()
