"""Starts services in milliseconds, as forks of a process that has loaded torch and their code.

`python -m services.worker` needs 1.6 s of processor time for imports. The fork server, a child
process that runs `python -m common.embedded.fork_server`, needs that time once. It imports a
service's modules at the first request for the service, or at `prepare`, starts no thread, and forks
for each request.

A fork is like a separate process, with its own session, output, environment and working directory.
Only `/proc` differs: `/proc/PID/environ` and `cmdline` are the server's, and `/proc/PID/comm` is
the name of the process. A fork ends with the server, and the server ends with its parent.

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
import selectors
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from common.config.program import SERVICES, command_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
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
# Bytes of a request. Linux has the same limit for one environment variable.
_LONGEST = 1 << 17
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # <linux/prctl.h>


_starting = threading.Lock()


class _Request(msgspec.Struct, frozen=True):
    """Request for a process, sent with two descriptors: its output, and a socket for its exit code.

    A request without descriptors only loads the modules, see `prepare`.
    """

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str


_REQUEST = msgspec.json.Decoder(_Request)


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
    request = msgspec.json.encode(_Request(module, tuple(arguments), variables, str(Path.cwd())))
    if len(request) > _LONGEST:
        raise OSError(errno.E2BIG, f"the environment is larger than {_LONGEST} bytes")
    try:
        return _fork(request, output)
    except OSError:
        with _starting:
            _started.cache_clear()
    return _fork(request, output)


def prepare(*services: str) -> None:
    """Load the modules of services in the fork server, without waiting for it.

    Args:
        services: Names of services, in the order in which they will start.
    """
    if sys.platform != "linux":
        return
    # `fork_module` reports the error.
    with _starting, suppress(OSError):
        server = _started()
        for service in services:
            request = _Request(f"services.{service}", (), {}, "")
            server.send(msgspec.json.encode(request))


def _fork(request: bytes, output: BinaryIO) -> Forked:
    """Send a request to the server.

    Raises:
        OSError: If the server has ended.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        with _starting:
            server = _started()
        socket.send_fds(server, [request], [output.fileno(), theirs.fileno()])
    return Forked(ours)


@cache
def _started() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    with theirs:
        process = subprocess.Popen(  # noqa: S603 -- our own command line, no shell
            command_of(__name__, str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            # The server's errors go to this process's standard error.
            stdout=subprocess.DEVNULL,
            # OpenBLAS would start threads on import.
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            # Ctrl-C is for this process alone.
            start_new_session=True,
        )

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
    """Forks for each request. In a fork, `serve` returns the request."""

    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self._selector = selectors.DefaultSelector()
        self._selector.register(asked, selectors.EVENT_READ)
        self._libc = ctypes.CDLL(None)

    def serve(self) -> _Request | None:
        """Serve until the parent closes the socket, and return None; in a fork, the request."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._asked:
                    self._send_exit_code(key)
                    continue
                request, fds, _, _ = socket.recv_fds(self._asked, _LONGEST, 2)
                if not request:
                    return None
                wanted = _REQUEST.decode(request)
                if (service := wanted.module.removeprefix("services.")) in SERVICES:
                    load(service)
                if fds and self._forks(fds):
                    return wanted

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
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # The server may have ended before the call of `prctl`.
            if os.getppid() != server:
                os._exit(1)
            os.setsid()
            for number in (1, 2):
                os.dup2(output, number)
            self._asked.close()
            for key in self._selector.get_map().values():
                if key.data:
                    os.close(key.fd)
                    key.data[1].close()
            self._selector.close()
        else:
            pidfd = os.pidfd_open(pid)
            self._selector.register(pidfd, selectors.EVENT_READ, (pid, channel))
            with suppress(BrokenPipeError):
                socket.send_fds(channel, [b"%d" % pid], [pidfd])
        os.close(output)
        if pid == 0:
            channel.close()
        return pid == 0


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
    if len(list(Path("/proc/self/task").iterdir())) > 1:
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
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _name(request).encode())
    become(request.module, request.arguments, request.environment, request.folder)


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
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _name(request: _Request) -> str:
    """Return the name that `ps` shows: the process's `--name`, or its module."""
    words = request.arguments
    if "--name" in words[:-1]:
        return words[words.index("--name") + 1]
    return request.module


if __name__ == "__main__":
    main()
