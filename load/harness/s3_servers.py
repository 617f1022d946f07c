"""Moto's server of the S3 protocol, and one that answers wrongly."""

from __future__ import annotations

import logging
import re
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import StartResponse, WSGIEnvironment

Lie: TypeAlias = Literal[
    "empty",  # the list has no names
    # Lists and `latest` are older than the newest checkpoint.
    "stale",
    # The list is of another bucket.
    "other",
    # The list ends after its first page.
    "cut",
    # Every answer is a web page.
    "page",
    # Some objects of a checkpoint are missing.
    "half",
    # The same, and the objects of the newest checkpoint cannot be read, either.
    "late",
    "latest",  # `latest` does not parse
]
LIES: tuple[Lie, ...] = get_args(Lie)
PAGE = b"<html><body>Please sign in</body></html>"
_ENTRY = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_KEY = re.compile(rb"<Key>(.*?)</Key>")
_COUNT = re.compile(rb"<KeyCount>\d+</KeyCount>")
_MISSING = b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code><Message>none</Message></Error>"


class S3Server:
    """Moto's server with serialized writes.

    By itself Moto answers 500 if a put of a key overtakes an earlier put that is still unanswered.

    Args:
        port: Optional. Port to listen on. If unset, a free one.
    """

    def __init__(self, port: int = 0) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._writing = threading.Lock()
        # Without this, werkzeug logs every request.
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", port, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        answer: Iterable[bytes]
        with nullcontext() if environ["REQUEST_METHOD"] in ("GET", "HEAD") else self._writing:
            answer = self._moto(environ, start)
        return answer


class LyingServer(S3Server):
    """A server that answers wrongly about the objects of some jobs, like a faulty proxy."""

    def __init__(self) -> None:
        # Lies, keyed by a text in the path or prefix of a request, such as a job's id.
        self.lies: dict[str, Lie] = {}
        # Folders of the checkpoints that are the newest when the lie begins, by the same text.
        self.newest: dict[str, str] = {}
        self.deleted = list[str]()
        super().__init__()

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        prefix = parse_qs(environ["QUERY_STRING"]).get("prefix", [""])[0]
        if environ["REQUEST_METHOD"] == "DELETE":
            self.deleted.append(path)
        about = next((text for text in self.lies if f"{text}/" in path + prefix), None)
        if environ["REQUEST_METHOD"] != "GET" or about is None:
            return super()._answer(environ, start)
        lie, newest = self.lies[about], self.newest[about]
        if lie == "page" or (lie == "latest" and path.endswith("/latest")):
            start("200 OK", [("Content-Type", "text/html")])
            return [PAGE]
        if not prefix:
            if (lie in {"half", "late"} and _is_hidden(lie, newest, path)) or (
                lie in {"empty", "cut", "stale", "late"} and path.endswith(("/latest", "/best"))
            ):
                start("404 Not Found", [("Content-Type", "application/xml")])
                return [_MISSING]
            return super()._answer(environ, start)
        return self._list(environ, start, lie, newest)

    def _list(
        self, environ: WSGIEnvironment, start: StartResponse, lie: Lie, newest: str
    ) -> Iterable[bytes]:
        answers = list[tuple[str, list[tuple[str, str]]]]()

        def keep(status: str, headers: list[tuple[str, str]], *_: object) -> None:
            answers.append((status, headers))

        body = b"".join(super()._answer(environ, keep))  # type: ignore[arg-type]
        entries = _ENTRY.findall(body)
        keys = [found[1].decode() for each in entries if (found := _KEY.search(each))]
        kept = [e for e, k in zip(entries, keys, strict=True) if not _is_hidden(lie, newest, k)]
        for entry in set(_ENTRY.findall(body)) - set(kept):
            body = body.replace(entry, b"")
        if lie == "other":
            body = re.sub(rb"<Name>.*?</Name>", b"<Name>another</Name>", body)
        body = _COUNT.sub(b"<KeyCount>%d</KeyCount>" % len(kept), body)
        status, headers = answers[0]
        start(status, [each for each in headers if each[0].lower() != "content-length"])
        return [body]


def _is_hidden(lie: Lie, newest: str, key: str) -> bool:
    """True if this lie hides the object."""
    if lie == "half":
        return key.endswith("trainer.safetensors")
    if lie == "cut":
        # The list ends before the newest checkpoint.
        return key.rpartition("/checkpoints/")[2] >= newest
    return lie == "empty" or (lie in {"stale", "late"} and f"/{newest}/" in key)
