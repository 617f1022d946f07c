"""A worker reads valid messages from a hostile process, drops all else, and never waits for it."""

from __future__ import annotations

import os
import socket
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker import channel
from services.worker.channel import (
    LONGEST_BYTES,
    BeginJob,
    Failure,
    JobChanged,
    LeaveJob,
    LeftJob,
    Pinned,
    ProcessBeat,
    ProcessEnd,
    ToWorker,
    WorkerEnd,
    failure_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MESSAGES: tuple[ToWorker, ...] = (
    ProcessBeat(""),
    ProcessBeat("the main loop has made no progress for 61 s"),
    Pinned(pinned=True),
    LeftJob(),
    Failure("KeyError: 'läble'", ("KeyError", "task.py:7"), reported=True, traceback="a\nb\n"),
)
# Bytes of a line that the worker must read past.
DROPPED = {
    "text": b"Segmentation fault",
    "not UTF-8": b'{"type":"beat","complaint":"\xff\xfe"}',
    "zeros": bytes(1000),
    "deep arrays": b"[" * 100_000,
    "deep objects": b'{"type":"scraped","families":' * 100_000,
    "unknown type": b'{"type":"begin","job":"clicks","record":"","member":"w1"}',
    "no type": b"{}",
    "wrong field": b'{"type":"pinned","pinned":"yes"}',
    "long text": msgspec.json.encode(ProcessBeat("x" * 20_001)),
    "half a message": b'{"type":"failure","reason":"out of',
    "two messages on one line": b'{"type":"left"}{"type":"left"}',
}


def encoded(message: ToWorker) -> bytes:
    return msgspec.json.encode(message)


def received(worker: WorkerEnd) -> list[ToWorker]:
    """Return all messages until the process closes its end."""
    found = list[ToWorker]()
    with suppress(EOFError):
        while True:
            found += worker.receive()
    return found


def read_all(data: bytes, piece: int) -> list[ToWorker]:
    """Return the messages in bytes that arrive in pieces."""
    ours, theirs = socket.socketpair()
    found = list[ToWorker]()
    with closing(WorkerEnd(ours)) as worker:
        with theirs:
            for start in range(0, len(data), piece):
                theirs.sendall(data[start : start + piece])
                found += worker.receive()
        return found + received(worker)


@pytest.fixture
def ends() -> Iterator[tuple[WorkerEnd, socket.socket]]:
    """Return the worker's end, and the socket of a process that sends what it likes."""
    ours, theirs = socket.socketpair()
    with theirs, closing(WorkerEnd(ours)) as worker:
        yield worker, theirs


@pytest.mark.parametrize("line", DROPPED.values(), ids=DROPPED)
@pytest.mark.parametrize("piece", [37, 1 << 16])
def test_line_that_is_no_message_is_dropped_alone(line: bytes, piece: int) -> None:
    if len(line) > 100_000 and piece < 100:
        piece = 4096
    data = encoded(MESSAGES[0]) + b"\n" + line + b"\n" + encoded(MESSAGES[1]) + b"\n"
    assert read_all(data, piece) == [MESSAGES[0], MESSAGES[1]]


@pytest.mark.parametrize("over", [1 << 16, LONGEST_BYTES])
def test_line_longer_than_the_limit_is_dropped_alone(over: int) -> None:
    data = (
        encoded(LeftJob())
        + b"\n"
        + b" " * (LONGEST_BYTES + over)
        + b"\n"
        + encoded(LeftJob())
        + b"\n"
    )
    assert read_all(data, 1 << 16) == [LeftJob(), LeftJob()]


def test_endless_line_takes_no_more_memory_than_the_limit(
    ends: tuple[WorkerEnd, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "LONGEST_BYTES", 1 << 16)
    worker, process = ends
    for _ in range(100):
        process.sendall(b"x" * (1 << 15))
        assert worker.receive() == []
        assert len(worker._lines._rest) <= (1 << 16) + (1 << 16)  # noqa: SLF001 -- its memory
    process.sendall(b"\n" + encoded(LeftJob()) + b"\n")
    assert worker.receive() == [LeftJob()]


def test_half_line_at_the_end_is_dropped() -> None:
    assert read_all(encoded(LeftJob()) + b"\n" + encoded(LeftJob()), 1 << 16) == [LeftJob()]


def test_process_without_messages_does_not_delay_the_worker(
    ends: tuple[WorkerEnd, socket.socket],
) -> None:
    worker, _ = ends
    assert worker.receive() == []


def test_send_returns_if_the_process_reads_nothing_and_sends_it_all_once_the_process_reads(
    ends: tuple[WorkerEnd, socket.socket],
) -> None:
    worker, theirs = ends
    begin = BeginJob("clicks", "x" * 1_000_000, "w1")
    worker.send(begin)
    for number in range(100):
        worker.send(JobChanged(str(number) * 10_000))
    worker.send(LeaveJob())

    process = ProcessEnd(theirs)
    found = list[object]()
    while LeaveJob() not in found:
        worker.send()
        found += process.receive(0.0)

    assert found == [
        begin,
        *(JobChanged(str(number) * 10_000) for number in range(100)),
        LeaveJob(),
    ]


def test_send_to_an_ended_process_raises_nothing(ends: tuple[WorkerEnd, socket.socket]) -> None:
    worker, process = ends
    process.close()
    worker.send(BeginJob("clicks", "", "w1"))
    worker.send(LeaveJob())
    with pytest.raises(EOFError):
        worker.receive()


def test_process_that_resets_its_socket_counts_as_ended(
    ends: tuple[WorkerEnd, socket.socket],
) -> None:
    # A socket that is closed before it was read to the end reports a reset to the other end.
    worker, process = ends
    worker.send(BeginJob("clicks", "", "w1"))
    process.close()
    with pytest.raises(EOFError):
        worker.receive()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 100_000),
        ValueError(os.fsdecode(b"/data/caf\xe9")),
        ValueError("\x00\x1b[2J\u202e"),
        SystemExit(0),
        MemoryError(),
    ],
    ids=["long", "no UTF-8", "control characters", "exit", "memory"],
)
def test_failure_with_any_text_arrives(
    ends: tuple[WorkerEnd, socket.socket], error: BaseException
) -> None:
    worker, theirs = ends
    ProcessEnd(theirs).send(failure_of(error))
    theirs.close()
    [failure] = received(worker)
    assert isinstance(failure, Failure)
    assert type(error).__name__ in failure.reason
    assert failure.reported == failure.died == isinstance(error, SystemExit)


@given(
    st.lists(st.sampled_from(MESSAGES) | st.binary(max_size=200), max_size=20),
    st.integers(min_value=1, max_value=300),
)
def test_messages_on_lines_of_their_own_arrive_between_any_bytes(
    parts: list[ToWorker | bytes], piece: int
) -> None:
    lines = [part if isinstance(part, bytes) else encoded(part) for part in parts]
    data = b"".join(b"\n" + line + b"\n" for line in lines)
    sent = [part for part in parts if not isinstance(part, bytes)]
    # Random bytes are hardly ever a message of ours.
    assert read_all(data, piece) == sent
