"""Tasks that damage or end the process that runs them, each in its own way.

A coordinator builds the task's model, too, so a task does harm only in a worker's process for a
job.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from common.testing.counting import CountingTask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

# Output of a task that hangs.
HANGING = "the task hangs"
HANGS = "tests.integration.hostile_tasks:Hangs"
HANGS_ALONE = "tests.integration.hostile_tasks:HangsAlone"
ENTRYPOINT = "tests.integration.hostile_tasks:HostileTask"
FILES = 300
FLOOD_BYTES = 8 << 20


def defaults(_folder: Path) -> None:
    """Change what torch and the operating system assume."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(16)
    torch.manual_seed(0)
    os.chdir("/")
    os.umask(0o777)
    os.environ.clear()
    os.nice(1)


def handlers(_folder: Path) -> None:
    """Handle SIGTERM and ignore SIGINT. Python allows it in the main thread only."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def files(folder: Path) -> None:
    """Keep files open, and forbid the process more of them."""
    for number in range(FILES):
        os.open(folder / f"file-{number}", os.O_CREAT | os.O_RDWR)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


def patches(_folder: Path) -> None:
    """Replace functions of the libraries that a worker uses."""

    def broken(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("a task has replaced this function")

    torch.Tensor.backward = broken  # type: ignore[method-assign]
    torch.autograd.grad = broken
    json.dumps = broken
    socket.socket = broken  # type: ignore[assignment, misc]


def thread(_folder: Path) -> None:
    """Leave a thread that never ends and that Python would wait for."""
    threading.Thread(target=threading.Event().wait, name="left behind", daemon=False).start()


def daemon(folder: Path) -> None:
    """Leave two processes in sessions of their own: a child and a grandchild of no child."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
    (folder / f"pid-{os.getpid()}").touch()
    while True:
        signal.pause()


def flood(_folder: Path) -> None:
    """Write megabytes without a line break."""
    for _ in range(FLOOD_BYTES >> 16):
        os.write(2, b"\xff" * (1 << 16))


def garbage(_folder: Path) -> None:
    """Write to all files and connections, one of which leads to the worker."""
    for fd in range(3, 256):
        with suppress(OSError):
            os.set_blocking(fd, False)
            os.write(fd, b'\x00\xff{"type":"left"\n[[[[\n{"type":"beat"}\n')


def closed(_folder: Path) -> None:
    """Close all files and connections."""
    os.closerange(3, 1024)


def exits(status: int) -> Callable[[Path], None]:
    """Return a hostility that ends the process without a word."""
    return lambda _folder: os._exit(status)


def exit_in_order(_folder: Path) -> None:
    """Raise SystemExit."""
    sys.exit(0)


def segfault(_folder: Path) -> None:
    """Read address 0."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def memory(_folder: Path) -> None:
    """Raise MemoryError.

    Raises:
        MemoryError: Always.
    """
    raise MemoryError


def accelerator(_folder: Path) -> None:
    """Raise the error of a GPU that is lost to its process.

    Raises:
        RuntimeError: Always.
    """
    kind: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
    raise kind("CUDA error: device-side assert triggered")


def runtime(_folder: Path) -> None:
    """Raise the error that older versions of torch raise for a lost GPU.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError("CUDA error: device-side assert triggered")


HOSTILITIES: dict[str, Callable[[Path], None]] = {
    "defaults": defaults,
    "handlers": handlers,
    "files": files,
    "patches": patches,
    "thread": thread,
    "daemon": daemon,
    "flood": flood,
    "garbage": garbage,
    "closed": closed,
    "exit-0": exits(0),
    "exit-3": exits(3),
    "exit-in-order": exit_in_order,
    "segfault": segfault,
    "memory": memory,
    "accelerator": accelerator,
    "runtime": runtime,
}


class HostileTask(CountingTask):
    """The counting task, with hostilities in a worker's process.

    Args:
        records: See `CountingTask`.
        folder: Folder for files of the task. `began` says that a worker's process has begun to do
            harm. Its name is `done` once the harm is done, which happens only once then.
        build: Names of hostilities when the model is built, separated by spaces.
        forward: The same for each pass.
        only: Record id without which a pass does no harm.
    """

    def __init__(
        self, records: int, folder: str, build: str = "", forward: str = "", only: str = ""
    ) -> None:
        super().__init__(records)
        self._folder = Path(folder)
        self._build, self._forward = build.split(), forward.split()
        self._only = only

    def build(self) -> nn.Module:
        """Return the counting model."""
        module = super().build()
        self._harm(self._build)
        return module

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return the weights of the batch's ids, (n,)."""
        if not self._only or int(self._only) in records["id"]:
            self._harm(self._forward)
        return super().forward(module, records)

    def _harm(self, names: list[str]) -> None:
        began, done = self._folder / "began", self._folder / "done"
        if not names or done.exists() or Path(sys.argv[0]).name != "job_process.py":
            return
        began.touch()
        for name in names:
            HOSTILITIES[name](self._folder)
        # The process may be unable to open files now.
        began.rename(done)


class Hangs(CountingTask):
    """Never returns from its first pass in a worker's process, and lets no signal interrupt it."""

    # True if other threads of the process may run meanwhile.
    releases = True

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Sleep for ever."""
        if Path(sys.argv[0]).name == "job_process.py":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            os.write(2, f"{HANGING}\n".encode())
            while self.releases:
                time.sleep(3600.0)
            # A function that is called through `PyDLL` keeps the interpreter's lock.
            ctypes.PyDLL(None).sleep(1 << 30)
        return super().forward(module, records)


class HangsAlone(Hangs):
    """The same, and no other Python thread of the process runs any more."""

    releases = False
