"""HTTP servers on the loopback with odd answers: large, endless, nested, or not JSON."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
from collections.abc import Callable
from typing import Self

Send = Callable[[bytes], object]
# Arguments: path, function that sends, event set at the end.
Answer = Callable[[str, Send, threading.Event], object]


class OddServer:
    """Answers by `answer`, which a test may replace at any time."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.paths = list[str]()
        self.ending = threading.Event()
        own = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    path = self.rfile.readline().split()[1].decode()
                    length = 0
                    while (line := self.rfile.readline().strip()) != b"":
                        name, _, value = line.partition(b":")
                        length = int(value) if name.lower() == b"content-length" else length
                    self.rfile.read(length)
                    own.paths.append(path)
                    own.answer(path, self.connection.sendall, own.ending)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        """Stop the server and its answers."""
        self.ending.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def said(body: bytes | object, status: int = 200, more: bytes = b"") -> Answer:
    """Answer with a body, or with an object as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = b"HTTP/1.1 %d Said\r\nConnection: close\r\n%sContent-Length: %d\r\n\r\n"
    whole = head % (status, more, len(content)) + content
    return lambda _path, send, _ending: send(whole)


def hangs(_path: str, _send: Send, ending: threading.Event) -> None:
    """Accept the request, and never answer."""
    ending.wait()


def drips_headers(_path: str, send: Send, ending: threading.Event) -> None:
    """Send the headers byte by byte, slowly."""
    send(b"HTTP/1.1 200 OK\r\n")
    while not ending.wait(0.05):
        send(b"a: b\r\n")


def drips_body(_path: str, send: Send, ending: threading.Event) -> None:
    """Send the body byte by byte, slowly."""
    send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not ending.wait(0.05):
        send(b" ")


def hangs_up(_path: str, _send: Send, _ending: threading.Event) -> None:
    """Close the connection without an answer."""


def endless(_path: str, send: Send, ending: threading.Event) -> None:
    """Send a body without an end."""
    send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not ending.is_set():
        send(b"10000\r\n" + b" " * 65536 + b"\r\n")


def half(_path: str, send: Send, _ending: threading.Event) -> None:
    """Send less than what the headers announce, and close the connection."""
    send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")


def no_http(_path: str, send: Send, _ending: threading.Event) -> None:
    """Speak another protocol."""
    send(b"SSH-2.0\r\n" * 9)


ODD: dict[str, Answer] = {
    "null": said(None),
    "a string": said("hello"),
    "a number": said(5),
    "a list": said([]),
    "an empty object": said({}),
    "empty": said(b""),
    "no content": said(b"", 204),
    "a number of 10^5 digits": said(b'{"schema": ' + b"9" * 100_000 + b"}"),
    "deep nesting": said(b'{"schema": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep nesting elsewhere": said(b'{"x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001),
    "10 MB": said(b'{"schema": "' + b"x" * 10_000_000 + b'"}'),
    "no UTF-8": said(b'{"schema": "\xff\xfe"}'),
    "a page": said(b"<!doctype html>", 500),
    "a page with status 200": said(b"<!doctype html>"),
    "an odd refusal": said(b'{"error_code": "40403"}', 404),
    "a nested refusal": said(b"[" * 100_000, 500),
    "elsewhere": said(b"", 302, b"Location: /schemas/ids/7\r\n"),
    "compressed": said(b"\x1f\x8b\x08", 200, b"Content-Encoding: gzip\r\n"),
    "no HTTP": no_http,
    "half an answer": half,
    "hanging up": hangs_up,
    "no answer": hangs,
    "dripping headers": drips_headers,
    "a dripping body": drips_body,
    "an endless body": endless,
}
