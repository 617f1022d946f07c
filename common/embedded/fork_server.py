"""Starts our services in milliseconds: forked from a process that has loaded torch and their code.

`python -m services.worker` takes 1.6 s of a processor before its first line of ours runs. Here that
is paid once: `python -m common.embedded.fork_server`, our own child, imports what a service needs
when it is asked for the first of its kind, or told to `prepare` for it, begins no thread, and forks
for each request. The fork is like a process of its own in all but `/proc`: its
own session, output, environment and working directory; `/proc/PID/environ` and `cmdline` are the
server's, and `/proc/PID/comm` its name. It ends with the server, and the server with us.

Linux only: elsewhere nobody can be relied upon to end such a process, and torch may not be forked.
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

_ROOT = Path(__file__).parents[2]  # where our packages lie, in a checkout or installed
# What they import only when they need it.
_LATER = ("common.kafka.stream", "common.redis.exchange", "common.storage.disk")
_LATER_OF = {
    "worker": ("services.worker.loop",),
    # It has scikit-learn and much of SciPy with it: more than half of what torch takes.
    "evaluator": ("river.drift",),
    "admin": ("uvicorn",),
}
_LONGEST = 1 << 17  # bytes of a request: Linux allows as much for an environment's variable
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # <linux/prctl.h>


_starting = threading.Lock()


class _Request(msgspec.Struct, frozen=True):
    """Which process to make; with its output and the socket on which to tell of its end.

    Without these two: what to load, since some will be asked for.
    """

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str


_REQUEST = msgspec.json.Decoder(_Request)


# --- who asks -------------------------------------------------------------------------------------


class Forked:
    """A process that was forked for us, as `subprocess.Popen` would have it."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        pid, fds, _, _ = socket.recv_fds(channel, _LONGEST, 1)
        if not fds:
            raise OSError("the process that forks services has ended; its errors stand above")
        [self._pidfd] = fds
        self.pid = int(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """How it ended, minus the signal that ended it; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended.

        Raises:
            TimeoutExpired: If it has not within `timeout` seconds.
        """
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                # Where nothing is told the server has ended, and the kernel all its forks.
                self.returncode = int(self._channel.recv(_LONGEST) or -signal.SIGKILL)
            except (BlockingIOError, TimeoutError) as error:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from error
            self._channel.close()
            os.close(self._pidfd)
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now
                signal.pidfd_send_signal(self._pidfd, number)


def fork_module(
    module: str,
    arguments: Sequence[str],
    output: BinaryIO,
    environment: Mapping[str, str] | None = None,
) -> Forked:
    """Do what `python -P -m module arguments` does, in a process that is there at once.

    The first call starts the server of this process, and so does one that finds it ended.

    Args:
        module: One that `__main__` of a package of ours stands for, such as `services.worker`.
        arguments: Of its command line.
        output: What it says goes there.
        environment: All of its variables; None: ours.

    Raises:
        OSError: If there cannot be such a process.
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
    """Have what services need loaded while we do something else; does not wait for it.

    Args:
        services: Which of them, in the order in which they will be asked for.
    """
    if sys.platform != "linux":
        return
    with _starting, suppress(OSError):  # who asks for one will hear of that
        server = _started()
        for service in services:
            request = _Request(f"services.{service}", (), {}, "")
            server.send(msgspec.json.encode(request))


def _fork(request: bytes, output: BinaryIO) -> Forked:
    """Ask the server.

    Raises:
        OSError: If it has ended.
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
            stdout=subprocess.DEVNULL,  # but its errors are told where ours are
            # A BLAS with threads has them from its import on.
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for us
        )

    def end() -> None:
        ours.close()
        process.kill()  # it may be loading something; the kernel ends its forks
        process.wait()

    atexit.register(end)  # and the kernel closes it for one who is killed
    return ours


# --- the server -----------------------------------------------------------------------------------


class _Server:
    """Forks for each request; a fork comes back from `serve` with what it is to be."""

    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self._selector = selectors.DefaultSelector()
        self._selector.register(asked, selectors.EVENT_READ)
        self._libc = ctypes.CDLL(None)

    def serve(self) -> _Request | None:
        """Serve until nobody can ask any more, which gives None."""
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
        """One has ended: wait for it, and say how it did."""
        pidfd: int = key.fd
        pid, channel = key.data
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with channel, suppress(BrokenPipeError):  # where nobody wants to know
            channel.send(b"%d" % os.waitstatus_to_exitcode(status))

    def _forks(self, fds: Sequence[int]) -> bool:
        """Fork; whether this is the new process."""
        output, channel = fds[0], socket.socket(fileno=fds[1])
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:  # it was too late already
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
    """Import what services need, unless it was done before.

    Args:
        services: Which of `SERVICES`.

    Raises:
        RuntimeError: If something began a thread on its import, which no fork would have.
    """
    gc.disable()  # there is no garbage in imports, and to look for it takes a quarter of their time
    for service in services:
        module = f"services.{service}.__main__"
        for each in (*_LATER, *_LATER_OF.get(service, ()), module):
            importlib.import_module(each)
        del sys.modules[module]  # each is run anew, as `__main__`
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError("something has begun a thread on its import: it cannot be forked")
    gc.freeze()  # else the first collection of each fork would copy all that they share
    gc.enable()


def main() -> None:
    """Serve; in a fork, be what was asked for."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    request = _Server(asked).serve()
    if request is None:
        os._exit(0)  # at once: there is nothing to tidy up
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _name(request).encode())
    become(request.module, request.arguments, request.environment, request.folder)


def become(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: str
) -> None:
    """Do in a fork what a process of its own would from its beginning on.

    Args:
        module: See `fork_module`.
        arguments: Likewise.
        environment: All of its variables.
        folder: Its working directory.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [each for each in path if each and each not in sys.path]
    sys.argv[1:] = arguments
    import numpy as np  # noqa: PLC0415 -- it is here by now, and who asks needs none

    np.random.seed()  # noqa: NPY002 -- the only generator that does not see to this itself
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _name(request: _Request) -> str:
    """What `ps` shows: what it is called, or which module it is."""
    words = request.arguments
    if "--name" in words[:-1]:
        return words[words.index("--name") + 1]
    return request.module


if __name__ == "__main__":
    main()
