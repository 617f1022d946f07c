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
from typing import TYPE_CHECKING, BinaryIO, Self

from common.embedded.fork_server import Forked, fork_module
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


class Child:
    """A started program and where it writes its log: the base of servers and services.

    The kernel ties its life to the *thread* that made it, so make it in one that stays, such as the
    main thread. Elsewhere than on Linux it may survive a parent that was killed.

    Args:
        command: The program and its arguments.
        log: Where what it says is added.
        environment: All of its variables; None: ours.
        name: Optional. Name of the process for people. If unset, the program.
        stays: It may survive us after all; then it does not matter which thread makes it.
        forks: The command is `python -m` and a module of ours: where that can be, it is forked by
            the fork server, which saves it 1.6 s of a processor; no matter in which thread.

    Raises:
        OSError: If there cannot be such a process.
        UnavailableError: If the process does not become ready. The message quotes its last output.
    """

    start_s = 10.0  # within which it must be ready
    stop_s = 5.0  # between being asked to end and being killed

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
            start_new_session=True,  # Ctrl-C is for us; we stop it in our order
            preexec_fn=None if self._stays else _die_with_parent(),  # noqa: PLW1509 -- it takes no lock
        )

    def _is_ready(self) -> bool:
        """Whether it can be used; at once, unless it is a server."""
        return True

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
            The exit code, minus the number of a signal that ended the process.

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
        """Ask it to end, once, without waiting: of a second signal as it ends, Python dies."""
        if not self._asked_to_end:
            self._asked_to_end = True
            self._process.terminate()

    def stop(self, grace_s: float | None = None) -> None:
        """Ask it to end, and insist after `grace_s`, or `stop_s` by default."""
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.stop_s if grace_s is None else grace_s)
        self.kill()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()  # does nothing to one that has been waited for
        self._process.wait()

    def restart(self) -> None:
        """Stop it if it runs and start it again; its log goes on in the same file.

        Raises:
            OSError: If there cannot be such a process.
            UnavailableError: If it does not become ready; the message quotes what it said.
        """
        self.stop()
        self._begin()

    def close(self) -> None:
        """Stop it for good and leave nothing behind."""
        self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def let_go(self) -> None:
        """Leave one that stays to itself: nobody asks for its exit code any more."""
        if self.running():
            self._process.returncode = 0  # else Popen complains that it still runs

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-_LOG_TAIL:].strip() or "it said nothing"


def short_folder() -> str | None:
    """Where temporary files go, or /tmp where that path is too long for a socket's."""
    return "/tmp" if len(tempfile.gettempdir()) > 60 else None  # noqa: S108 -- a private folder in it


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
