"""A fast `doll`: each command is forked from a process that has loaded torch and all commands.

With `python -m services.cli` each command would need a second of a processor for its imports, and
the guides have a hundred commands. For a shell the fork is a normal program, with its own
directory, environment, input and output. Signals reach it, and its exit status is passed on.

A test module requests it with `pytest_plugins = ["tests.forked_doll"]`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from common.config.program import SERVICES
from common.embedded.process import short_folder
from common.runtime.fork_server import become, load

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
LONGEST = 1 << 17  # bytes of a request
# Modules that the server does not load: their library starts a thread at its import, and a forked
# process would lack the thread.
WITH_THREADS = (".parquet",)
# Program that a shell starts. It requests a fork, passes signals on, and exits as the fork does.
PROGRAM = """\
#!{python} -ISE
import os, signal, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({path!r})
words = [os.getcwd(), str(len(sys.argv) - 1), *sys.argv[1:]]
words += [f"{{name}}={{value}}" for name, value in os.environ.items()]
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
socket.send_fds(server, [os.fsencode("\\0".join(words))], [0, 1, 2])
status = int(server.recv(100) or -signal.SIGKILL)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@pytest.fixture(scope="session")
def doll_program() -> Iterator[Path]:
    """Yield the path of a `doll` program whose commands are forks."""
    with (
        tempfile.TemporaryDirectory(dir=short_folder()) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked,
    ):
        path = Path(folder) / "socket"
        asked.bind(str(path))
        asked.listen(64)
        program = Path(folder) / "doll"
        program.write_text(PROGRAM.format(python=sys.executable, path=str(path)))
        program.chmod(0o755)
        own = os.pathsep.join([str(ROOT), str(ROOT / "common" / "public")])
        with subprocess.Popen(  # noqa: S603 -- our own command line
            [sys.executable, "-P", "-m", __name__, str(asked.fileno())],
            # The pipe closes when this process ends. The server ends then, too.
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": own, "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[asked.fileno()],
        ) as server:
            # Once the server has ended, requests fail at once instead of waiting.
            asked.close()
            yield program
            assert server.stdin is not None
            server.stdin.close()


# --- the server -----------------------------------------------------------------------------------


class Running(NamedTuple):
    """A forked command, and the connection that requested it."""

    pid: int
    pidfd: int
    asked: socket.socket


class Server:
    """Forks for each request. In a fork, `serve` returns the arguments of the command."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._selector = selectors.DefaultSelector()
        self._selector.register(door, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)

    def serve(self) -> list[str] | None:
        """Serve until the parent process ends. Returns arguments in a fork, None in the server."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == 0:
                    return None
                if key.fileobj is self._door:
                    asked, _ = self._door.accept()
                    with suppress(BrokenPipeError):
                        if words := self._fork(asked):
                            return words
                    # A selected connection may be closed by now.
                    break
                self._on_ready(key.data, ended=key.fd == key.data.pidfd)
                break

    def _fork(self, asked: socket.socket) -> list[str]:
        """Fork. Returns the request's arguments in the new process, and nothing in the server."""
        said, fds, _, _ = socket.recv_fds(asked, LONGEST, 3)
        if len(fds) < 3:
            asked.close()
            return []
        server = os.getpid()
        pid = os.fork()
        if pid:
            running = Running(pid, os.pidfd_open(pid), asked)
            self._selector.register(running.pidfd, selectors.EVENT_READ, running)
            self._selector.register(asked, selectors.EVENT_READ, running)
        else:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != server:
                os._exit(1)
            os.setsid()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            for key in list(self._selector.get_map().values()):
                if key.fd > 2:
                    os.close(key.fd)
            self._selector.close()
            os.close(asked.detach())
        for fd in fds:
            os.close(fd)
        return [] if pid else os.fsdecode(said).split("\0")

    def _on_ready(self, running: Running, *, ended: bool) -> None:
        """Handle the exit of a fork, or a signal or disconnect of its requester."""
        if not ended:
            said = running.asked.recv(1)
            signal.pidfd_send_signal(running.pidfd, said[0] if said else signal.SIGKILL)
            if not said:
                self._selector.unregister(running.asked)
            return
        _, status = os.waitpid(running.pid, 0)
        self._selector.unregister(running.pidfd)
        with suppress(KeyError):
            self._selector.unregister(running.asked)
        with suppress(BrokenPipeError):
            running.asked.send(b"%d" % os.waitstatus_to_exitcode(status))
        running.asked.close()
        os.close(running.pidfd)


def main() -> None:
    """Load everything and serve. A fork runs its command."""
    import services.cli  # noqa: PLC0415 -- the tests need none of it

    for found in pkgutil.walk_packages(services.cli.__path__, "services.cli."):
        if not found.name.endswith(("__main__", *WITH_THREADS)):
            importlib.import_module(found.name)
    load(*SERVICES)
    words = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if words is None:
        os._exit(0)
    folder, count, *others = words
    arguments, variables = others[: int(count)], others[int(count) :]
    environment = dict(each.split("=", 1) for each in variables)
    become("services.cli", arguments, environment, folder)


if __name__ == "__main__":
    main()
