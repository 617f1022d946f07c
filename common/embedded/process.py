"""A server as our own child: it is up before we use it, and never outlives us."""

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
from typing import TYPE_CHECKING, BinaryIO, Protocol

from common.embedded.fork_server import fork_module
from common.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LOG_TAIL = 2000  # characters of the child's output that an error quotes


def _die_with_parent() -> Callable[[], None] | None:
    """What the child runs before it becomes the server, so that the kernel kills it after us."""
    if sys.platform != "linux":
        return None
    parent = os.getpid()
    libc = ctypes.CDLL(None)  # loaded here: after the fork, another thread's locks may be held

    def ask_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was too late already
            os._exit(1)

    return ask_kernel


class Process(Protocol):
    """A started process, as `subprocess.Popen` and the fork server represent it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit code, minus the number of a signal, or None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit code.

        Raises:
            subprocess.TimeoutExpired: If the process still runs after `timeout` seconds.
        """

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


class Start(Protocol):
    """A way to start a process."""

    def __call__(
        self,
        command: Sequence[str],
        output: BinaryIO,
        environment: Mapping[str, str] | None,
        *,
        stays: bool,
        forks: bool,
    ) -> Process:
        """Start a process; see `Child` for the arguments."""


def start_process(
    command: Sequence[str],
    output: BinaryIO,
    environment: Mapping[str, str] | None,
    *,
    stays: bool,
    forks: bool,
) -> Process:
    """Start a process of the operating system; see `Child` for the arguments.

    Raises:
        OSError: If the process cannot be started.
    """
    if forks and sys.platform == "linux":
        module, *arguments = command[command.index("-m") + 1 :]
        return fork_module(module, arguments, output, environment)
    return subprocess.Popen(  # noqa: S603 -- our own command line, no shell
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # Ctrl-C is for us; we stop it in our order
        preexec_fn=None if stays else _die_with_parent(),  # noqa: PLW1509 -- it takes no lock
    )


class Child:
    """A started program and where it writes its log.

    The kernel ties its life to the *thread* that made it, so make it in one that stays, such as the
    main thread. Elsewhere than on Linux it may survive a parent that was killed.

    Args:
        command: The program and its arguments.
        log: Where what it says is added.
        environment: All of its variables; None: ours.
        stays: It may survive us after all; then it does not matter which thread makes it.
        forks: The command is `python -m` and a module of ours: where that can be, it is forked by
            the fork server, which saves it 1.6 s of a processor; no matter in which thread.
        start: Function that starts the process. A test may pass a scripted one.

    Raises:
        OSError: If there cannot be such a process.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        stays: bool = False,
        forks: bool = False,
        start: Start = start_process,
    ) -> None:
        self._name = command[0]
        self._log = log
        self._asked_to_end = False
        with log.open("ab") as output:
            self._process = start(command, output, environment, stays=stays, forks=forks)

    @property
    def pid(self) -> int:
        """The process id, to freeze or kill it in a test."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, minus the signal that ended it; None while it runs."""
        return self._process.poll()

    def running(self) -> bool:
        """Whether it has not ended yet."""
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
            # Both are read before `ready` is called: the process may become ready and end, or this
            # process may be stopped for longer than the timeout, right after a call that is false.
            exit_code, is_late = self.exit_code, time.monotonic() > deadline
            if ready():
                return
            if exit_code is not None:
                raise UnavailableError(
                    f"{self._name} ended with exit code {exit_code} "
                    f"before it was ready: {self.last_words()}"
                )
            if is_late:
                raise UnavailableError(
                    f"{self._name} was not ready after {timeout_s} s: {self.last_words()}"
                )
            time.sleep(0.002)

    def await_end(self, timeout_s: float | None = None) -> int:
        """Wait until the process ends by itself.

        Args:
            timeout_s: Optional. If unset, wait as long as the process runs.

        Returns:
            The exit code, minus the number of a signal that ended the process.

        Raises:
            UnavailableError: If the process still runs after `timeout_s`. The message quotes its
                last output.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"{self._name} did not end within {timeout_s} s: {self.last_words()}"
            ) from error

    def ask_to_end(self) -> None:
        """Ask it to end, once, without waiting: of a second signal as it ends, Python dies."""
        if not self._asked_to_end:
            self._asked_to_end = True
            self._process.terminate()

    def stop(self, grace_s: float = 5.0) -> None:
        """Ask it to end, and insist after `grace_s`."""
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self.kill()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()  # does nothing to one that has been waited for
        self._process.wait()

    def let_go(self) -> None:
        """Leave one that stays to itself: nobody asks for its exit code any more."""
        if self.running():
            self._process.returncode = 0  # else Popen complains that it still runs

    def last_words(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-_LOG_TAIL:].strip() or "it said nothing"


def short_folder() -> str | None:
    """Where temporary files go, or /tmp where that path is too long for a socket's."""
    return "/tmp" if len(tempfile.gettempdir()) > 60 else None  # noqa: S108 -- a private folder in it


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
