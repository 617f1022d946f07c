"""Messages between a worker and its processes for jobs, one JSON object a line.

The worker believes nothing that reaches it: a process for a job runs code of the job's task, which
could write anything to the socket. Lines that are too long or do not parse are dropped.
"""

from __future__ import annotations

import select
import threading
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import UserError
from common.runtime.faults import kind_of, passes, reason_of
from common.telemetry.metrics.registry import Family  # noqa: TC001 -- msgspec reads it

if TYPE_CHECKING:
    import socket

# Longest line: a job's record with a large schema, or the metrics of a job with many streams.
LONGEST_BYTES = 8 << 20
_READ_BYTES = 1 << 16
Text: TypeAlias = Annotated[str, Meta(max_length=20_000)]


# --- to the process -------------------------------------------------------------------------------


class BeginJob(msgspec.Struct, frozen=True, tag="begin"):
    """The first message: the job to work for."""

    # Name of the job.
    job: str
    # The job's entry in the jobs topic.
    record: str
    # Name of the worker at the job.
    member: str
    # UUID of the GPU to use; empty for the processor.
    gpu: str = ""


class JobChanged(msgspec.Struct, frozen=True, tag="changed"):
    """The job was changed."""

    record: str


class LeaveJob(msgspec.Struct, frozen=True, tag="leave"):
    """The process has to leave the job in order and then end."""


class Scrape(msgspec.Struct, frozen=True, tag="scrape"):
    """Request for the process's metrics."""


ToProcess: TypeAlias = BeginJob | JobChanged | LeaveJob | Scrape


# --- to the worker --------------------------------------------------------------------------------


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Describes an error that ends a worker's work for a job.

    Attributes:
        reason: Text for people.
        kind: Key; failures with equal keys are logged once.
        passes: True if the error goes away by itself, such as a server that is unavailable.
        reported: True if the job's state shows the reason.
        traceback: Traceback for the log; may be empty.
        died: True if the job is tried again after the shorter pauses of a death: the process ended
            without a word, the task called `sys.exit`, or the GPU was lost.
        lost: Control offsets of the batches during which the process lost its GPU.
    """

    reason: Text
    kind: tuple[Text, ...] = ()
    passes: bool = False
    reported: bool = False
    traceback: Text = ""
    died: bool = False
    lost: tuple[int, ...] = ()


class LeftJob(msgspec.Struct, frozen=True, tag="left"):
    """The process has left the job in order."""


class Pinned(msgspec.Struct, frozen=True, tag="pinned"):
    """Says if the process holds state that keeps the worker at its job."""

    pinned: bool


class ProcessBeat(msgspec.Struct, frozen=True, tag="beat"):
    """Says every second why the process is unhealthy; empty if it is healthy."""

    complaint: Text


class Scraped(msgspec.Struct, frozen=True, tag="scraped"):
    """The process's metrics."""

    families: tuple[Family, ...]


ToWorker: TypeAlias = Failure | LeftJob | Pinned | ProcessBeat | Scraped

_ENCODER = msgspec.json.Encoder()
_TO_PROCESS: msgspec.json.Decoder[ToProcess] = msgspec.json.Decoder(ToProcess)
_TO_WORKER: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)


def failure_of(error: BaseException, lost: tuple[int, ...] = ()) -> Failure:
    """Describe an exception that ended the work for a job.

    Args:
        error: The exception.
        lost: Batches during which the process lost its GPU, if that is the error.
    """
    text = _encodable("".join(traceback.format_exception(error)).rstrip())
    exits = isinstance(error, SystemExit)
    reason = ("the task has ended its process: " if exits else "") + reason_of(error)
    return Failure(
        _encodable(reason)[:20_000],
        tuple(_encodable(each)[:20_000] for each in kind_of(error)),
        passes(error),
        exits or bool(lost) or isinstance(error, UserError),
        text[-20_000:],
        died=exits or bool(lost),
        lost=lost,
    )


def _encodable(text: str) -> str:
    """Escape characters that UTF-8 lacks, such as those of a file's name in another encoding."""
    return text.encode(errors="backslashreplace").decode()


class _Lines:
    """Reads lines from a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._rest = bytearray()
        # True while the rest of a line that is too long is skipped.
        self._skips = False

    def read(self) -> list[bytes]:
        """Receive once, and return the lines that are now complete.

        Raises:
            EOFError: If the other end is closed.
            BlockingIOError: If the socket does not wait, and nothing has arrived.
        """
        data = self._end.recv(_READ_BYTES)
        if not data:
            raise EOFError
        *lines, rest = bytes(self._rest + data).split(b"\n")
        if lines and self._skips:
            self._skips = False
            lines = lines[1:]
        if self._skips or len(rest) > LONGEST_BYTES:
            self._skips, rest = True, b""
        self._rest = bytearray(rest)
        return lines


class ProcessEnd:
    """The process's end of the channel. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lines = _Lines(end)
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        self._sending = threading.Lock()

    def send(self, message: ToWorker) -> None:
        """Send a message. If the worker has ended, this process ends too, so nothing is raised."""
        with self._sending, suppress(OSError):
            self._end.sendall(_ENCODER.encode(message) + b"\n")

    def receive(self, timeout_s: float | None = None) -> list[ToProcess]:
        """Return the next messages; an empty list if none is complete in time.

        Raises:
            EOFError: If the worker has ended.
        """
        # A timeout of the socket would also limit the sending threads.
        wait_ms = None if timeout_s is None else 1e3 * timeout_s
        if not self._readable.poll(wait_ms):
            return []
        try:
            lines = self._lines.read()
        except OSError as error:
            raise EOFError from error
        return [_TO_PROCESS.decode(line) for line in lines]


class WorkerEnd:
    """The worker's end of the channel. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setblocking(False)  # noqa: FBT003 -- the standard library's
        self._lines = _Lines(end)
        self._sending = threading.Lock()
        # Encoded messages that the socket has not accepted yet.
        self._waiting = b""

    def fileno(self) -> int:
        """Return the descriptor, which is readable when messages have arrived."""
        return self._end.fileno()

    def send(self, message: ToProcess | None = None) -> None:
        """Send a message, or what waits of earlier ones, without waiting for the process."""
        with self._sending:
            if message is not None:
                self._waiting += _ENCODER.encode(message) + b"\n"
            # BlockingIOError means that the process is slow or frozen.
            with suppress(OSError):
                while self._waiting:
                    self._waiting = self._waiting[self._end.send(self._waiting) :]

    def receive(self) -> list[ToWorker]:
        """Return the messages that have arrived and that parse.

        Raises:
            EOFError: If the process has closed its end.
        """
        try:
            lines = self._lines.read()
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        found = list[ToWorker]()
        for line in lines:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                found.append(_TO_WORKER.decode(line))
        return found

    def close(self) -> None:
        """Close the socket, which ends a process that still runs."""
        self._end.close()
