"""Child processes that are ready before they are used, and that end with this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from common.errors import UnavailableError
from common.runtime.fork_server import Forked, fork_module

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# Characters of the child's output that an error quotes.
_LOG_TAIL = 2000


def _die_with_parent() -> Callable[[], None] | None:
    """Return a function for the child that makes the kernel kill it when its parent ends."""
    if sys.platform != "linux":
        return None
    parent = os.getpid()
    # Loaded before the fork, because after it another thread's locks may be held for ever.
    libc = ctypes.CDLL(None)

    def ask_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have ended before the call of `prctl`.
        if os.getppid() != parent:
            os._exit(1)

    return ask_kernel


class Child:
    """A child process with a log; base class of servers and services.

    The kernel kills the process when the *thread* that made it ends. So make it in a thread that
    stays, such as the main thread. On other systems than Linux, the process may survive a killed
    parent.

    Args:
        command: The program and its arguments.
        log: Log file. The output is appended.
        environment: Optional. All environment variables. If unset, those of this process.
        name: Optional. Name of the process for people. If unset, the program.
        stays: True if the process may survive this one. Any thread may make it then.
        forks: True if the command is `python -m` and a module of ours. On Linux, the fork server
            starts it, which saves 1.6 s of processor time. Any thread may make it then.

    Raises:
        OSError: If the process cannot be started.
        UnavailableError: If the process does not become ready. The message quotes its last output.
    """

    # Longest time until the process is ready.
    start_s = 10.0
    # Time between SIGTERM and SIGKILL.
    stop_s = 5.0

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        name: str = "",
        stays: bool = False,
        forks: bool = False,
    ) -> None:
        self.name = name or command[0]
        self.log = log
        self._command, self._environment = command, environment
        self._stays, self._forks = stays, forks
        self._begin()

    def _begin(self) -> None:
        self._asked_to_end = False
        with self.log.open("ab") as output:
            self._process = self._started(output)
        try:
            self.await_ready(self._is_ready, self.start_s)
        except BaseException:
            self.kill()
            raise

    def _started(self, output: BinaryIO) -> subprocess.Popen[bytes] | Forked:
        if self._forks and sys.platform == "linux":
            module, *arguments = self._command[self._command.index("-m") + 1 :]
            return fork_module(module, arguments, output, self._environment)
        return subprocess.Popen(  # noqa: S603 -- our own command line, no shell
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self._environment,
            # Ctrl-C is for this process, which stops its children in order.
            start_new_session=True,
            preexec_fn=None if self._stays else _die_with_parent(),  # noqa: PLW1509 -- it takes no lock
        )

    def _is_ready(self) -> bool:
        """True if the process is ready. Servers override this."""
        return True

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all its descendants, such as a worker's processes."""
        for pid in family(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    def running(self) -> bool:
        """True until the process ends."""
        return self.exit_code is None

    def await_ready(self, ready: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until `ready` is true.

        To wait until the process ends by itself, use `await_end`.

        Raises:
            UnavailableError: If the process ended or `timeout_s` passed before that. The message
                quotes its last output.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            # Both are read before the call of `ready`. After a call that returns False, the process
            # may become ready and end, or this process may be stopped for longer than the timeout.
            exit_code, is_late = self.exit_code, time.monotonic() > deadline
            if ready():
                return
            if exit_code is not None:
                raise UnavailableError(
                    f"{self.name} ended with exit code {exit_code} "
                    f"before it was ready: {self.last_words()}"
                )
            if is_late:
                raise UnavailableError(
                    f"{self.name} was not ready after {timeout_s} s: {self.last_words()}"
                )
            time.sleep(0.002)

    def await_end(self, timeout_s: float | None = None) -> int:
        """Wait until the process ends by itself.

        Args:
            timeout_s: Optional. If unset, wait as long as the process runs.

        Returns:
            The exit code. If a signal ended the process, its negative number.

        Raises:
            UnavailableError: If the process still runs after `timeout_s`. The message quotes its
                last output.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"{self.name} did not end within {timeout_s} s: {self.last_words()}"
            ) from error

    def ask_to_end(self) -> None:
        """Send SIGTERM once and return immediately.

        A second signal during the interpreter's shutdown would crash the child.
        """
        if not self._asked_to_end:
            self._asked_to_end = True
            self._process.terminate()

    def stop(self, grace_s: float | None = None) -> None:
        """Send SIGTERM, then SIGKILL after `grace_s`, or after `stop_s` if unset."""
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.stop_s if grace_s is None else grace_s)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        # `kill` does nothing if the process was already waited for.
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Stop the process and start it again with the same log.

        Raises:
            OSError: If the process cannot be started.
            UnavailableError: If the process does not become ready. The message quotes its last
                output.
        """
        self.stop()
        self._begin()

    def close(self) -> None:
        """Stop the process for good. Subclasses delete its files."""
        self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def detach(self) -> None:
        """Detach from a process that stays, whose exit code is not needed any more."""
        # Otherwise `Popen` would warn that the process still runs.
        if self.running():
            self._process.returncode = 0

    def last_words(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-_LOG_TAIL:].strip() or "it wrote no output"


def family(pid: int) -> list[int]:
    """Return the ids of a process and of its descendants, parents first."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def short_folder() -> str | None:
    """Return /tmp if the path of the temporary folder is too long for a socket, else None."""
    return "/tmp" if len(tempfile.gettempdir()) > 60 else None  # noqa: S108 -- a private folder in it


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
