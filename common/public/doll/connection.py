"""HTTP connection to an admin service: key, timeouts, retries, and refusals as errors.

`doll.Client` and the command line both use it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
import msgspec

from doll.errors import (
    ConflictError,
    GivenError,
    NotFoundError,
    OutsideError,
    UnavailableError,
    UserError,
)

T = TypeVar("T")

CONNECT_S = 5.0
# Time for an answer to begin. A simulation may run as long as the service's settings permit.
ANSWER_S = 120.0
# Waits before the retries of a request. A `Retry-After` header can extend each to LONGEST_S.
AGAIN_S = (0.2, 1.0)
LONGEST_S = 5.0
# Bounds of one answer, in bytes and seconds. A model's time allows for a large file on a slow line.
OF_JSON = 1 << 26, 240.0
OF_MODEL = 1 << 36, 3600.0
# Longest silence of an event stream: the service sends a byte every 15 s.
STREAM_S = 45.0

_REFUSED: dict[int, type[UserError]] = {404: NotFoundError, 409: ConflictError}
# Statuses after which the same request may succeed later.
_AWAY = (429, 503, 504)


class _Field(msgspec.Struct):
    field: str = ""
    detail: str = ""


class _Problem(msgspec.Struct):
    """Fields of an RFC 9457 problem that errors show."""

    detail: str = ""
    errors: list[_Field] = []


_PROBLEM = msgspec.json.Decoder(_Problem)


class _Bounded(httpx2.SyncByteStream):
    """Content of an answer, bounded in bytes and seconds."""

    def __init__(self, content: Any, longest: int, within_s: float) -> None:  # noqa: ANN401 -- a stream of httpx2
        self._content, self._longest = content, longest
        self._until = time.monotonic() + within_s

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for part in self._content:
            size += len(part)
            if size > self._longest or time.monotonic() > self._until:
                raise OutsideError("the admin service's response is too large, or does not end")
            yield part

    def close(self) -> None:
        """Release the connection."""
        self._content.close()


class Connection:
    """Connection to one service. May be shared between threads.

    Args:
        url: URL of the service.
        key: API key; empty for none.
        timeout_s: Time limit for an answer to begin.
        transport: Optional. HTTP transport of `httpx2`. If unset, the network.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        timeout_s: float = ANSWER_S,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._key = key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx2.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S))
        self._http = httpx2.Client(
            base_url=self.url, headers=headers, timeout=timeout, transport=transport
        )

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        parameters: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        model: bool = False,
    ) -> httpx2.Response:
        """Send a request and return the answer if it is a success or 304.

        Retries a request that was never sent, or that the service was too busy for. A GET, or a
        request with an `Idempotency-Key`, may safely arrive twice; it is also retried if its answer
        was lost or was a server error.

        Args:
            method: `GET`, `POST`, `PATCH` or `DELETE`.
            path: Path below the service's URL.
            body: Optional. JSON.
            parameters: Optional. Query parameters.
            headers: Optional. Headers besides the key.
            model: True if the answer is a model file, which may be large.

        Raises:
            UserError: If the service refuses the request. A `GivenError` names the fields if the
                service does.
            OutsideError: If the service cannot be reached, has a fault, or its answer exceeds a
                bound.
        """
        sent = dict(headers or {}) | ({} if body is None else {"Content-Type": "application/json"})
        twice = method == "GET" or "Idempotency-Key" in sent
        for wait_s in (*AGAIN_S, None):
            try:
                with (
                    self._as_ours(path),
                    self._http.stream(
                        method, path, content=body, params=parameters, headers=sent
                    ) as answer,
                ):
                    answer.stream = _Bounded(answer.stream, *(OF_MODEL if model else OF_JSON))
                    answer.read()
            except UnavailableError as error:
                unsent = isinstance(error.__cause__, httpx2.ConnectError | httpx2.ConnectTimeout)
                if wait_s is None or not (twice or unsent):
                    raise
                time.sleep(wait_s)
                continue
            if answer.is_success or answer.status_code == 304:
                return answer
            busy = answer.status_code == 429 or (twice and answer.status_code >= 500)
            if wait_s is None or not busy:
                break
            time.sleep(max(wait_s, _retry_after_s(answer)))
        raise self._refusal(answer)

    @contextmanager
    def stream(self, path: str, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
        """Send a GET request whose answer the caller reads as it arrives.

        Raises:
            UserError: If the service refuses the request.
            OutsideError: If the service cannot be reached, has a fault, or sends nothing for
                `STREAM_S`.
        """
        timeout = httpx2.Timeout(STREAM_S, connect=CONNECT_S)
        with (
            self._as_ours(path),
            self._http.stream("GET", path, headers=headers, timeout=timeout) as answer,
        ):
            if not answer.is_success:
                answer.read()
                raise self._refusal(answer)
            yield answer

    def decoded(self, content: bytes | str, decoder: msgspec.json.Decoder[T]) -> T:
        """Decode the content of an answer or an event.

        Raises:
            OutsideError: If the content does not have the expected form.
        """
        try:
            return decoder.decode(content)
        except (ValueError, RecursionError) as error:
            raise self.strange(error) from error

    def strange(self, why: Exception | str) -> OutsideError:
        """Return the error to raise if an answer makes no sense."""
        return OutsideError(f"{self.url} is not a DOLL admin service: {why}")

    def close(self) -> None:
        """Close all connections to the service."""
        self._http.close()

    @contextmanager
    def _as_ours(self, path: str) -> Iterator[None]:
        try:
            yield
        except httpx2.RequestError as error:
            reason = str(error) or type(error).__name__
            raise UnavailableError(f"{self.url} cannot be reached: {reason}") from error
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise UserError(f"url: must be a URL, got {self.url}{path}: {error}") from error

    def _refusal(self, answer: httpx2.Response) -> Exception:
        status = answer.status_code
        try:
            problem = _PROBLEM.decode(answer.content)
        except (ValueError, RecursionError):
            problem = _Problem()
        detail = problem.detail or f"HTTP {status} {answer.reason_phrase}"
        if status == 401:
            what = "the API key is not valid" if self._key else "an API key is required"
            return UserError(
                f"{self.url}: {what}; set --api-key, DOLL_API_KEY or DOLL_API_KEY_FILE;"
                " `doll key create NAME --role viewer` creates a key"
            )
        if status == 403:
            return UserError(
                f"{self.url}: {detail}; use an operator's key, from"
                " `doll key create NAME --role operator`"
            )
        if status == 422 and len({each.detail for each in problem.errors}) == 1:
            fields = tuple(_own(each.field) for each in problem.errors)
            return GivenError(fields, problem.errors[0].detail)
        if 400 <= status < 500 and status not in _AWAY:
            return _REFUSED.get(status, UserError)(detail)
        kind = UnavailableError if status in _AWAY else OutsideError
        return kind(f"{self.url}: {detail}")


def path_of(job: str, part: str = "") -> str:
    """Return the path of a job, or of a part of the job."""
    return f"/v1/jobs/{quote(job, safe='')}" + (f"/{part}" if part else "")


def _retry_after_s(answer: httpx2.Response) -> float:
    """Return the seconds that a service asks to wait, at most `LONGEST_S`."""
    header = answer.headers.get("Retry-After", "")
    return min(float(header), LONGEST_S) if header.isdecimal() else 0.0


def _own(field: str) -> str:
    """Return a field's name without the part of the request that holds the field."""
    return field.removeprefix("body.").removeprefix("query.")
