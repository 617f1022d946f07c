"""Speaks HTTP with an admin service, and tells what it refuses as our own errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import httpx2
import msgspec
from pydantic import BaseModel, ValidationError

from common.config.validation import complaint
from common.errors import (
    ConflictError,
    GivenError,
    NotFoundError,
    OutsideError,
    UnavailableError,
    UserError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T", bound=BaseModel)

_CONNECT_S = 5.0
_ANSWER_S = 120.0  # a simulation takes as long as the service's settings let it

_REFUSED: dict[int, type[UserError]] = {404: NotFoundError, 409: ConflictError}
_AWAY = (429, 503, 504)  # the same request may be answered later


class _Field(msgspec.Struct):
    field: str = ""
    detail: str = ""


class _Problem(msgspec.Struct):
    """What of RFC 9457 a person is told."""

    detail: str = ""
    errors: list[_Field] = []


class Client:
    """One service.

    Args:
        url: Where it is, without a slash at its end.
        key: The API key; empty: there is none.
        transport: None: the network.
    """

    def __init__(self, url: str, key: str, transport: httpx2.BaseTransport | None = None) -> None:
        self.url = url
        self._key = key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S)
        self._http = httpx2.Client(
            base_url=url, headers=headers, timeout=timeout, transport=transport
        )

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        parameters: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        """Ask, and get the answer if it is a success.

        Raises:
            UserError: If it is refused: by field where the service names fields.
            OutsideError: If the service cannot be reached or has a fault.
        """
        sent = dict(headers or {}) | ({} if body is None else {"Content-Type": "application/json"})
        try:
            answer = self._http.request(method, path, content=body, params=parameters, headers=sent)
        except httpx2.TransportError as error:
            told = str(error) or type(error).__name__
            raise UnavailableError(f"{self.url} cannot be reached: {told}") from error
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise UserError(f"{self.url}{path}: is no URL: {error}") from error
        if not answer.is_success:
            raise self._refusal(answer)
        return answer

    def get(self, path: str, kind: type[T], **parameters: str | int) -> T:
        """Ask for something, and read it.

        Raises:
            UserError: If it is refused.
            OutsideError: If the service cannot be reached, has a fault, or is none of ours.
        """
        return self.read(self.ask("GET", path, parameters=parameters), kind)

    def read(self, answer: httpx2.Response, kind: type[T]) -> T:
        """Read an answer.

        Raises:
            OutsideError: If it is something else.
        """
        try:
            return kind.model_validate_json(answer.content)
        except ValidationError as error:
            raise self.strange(complaint(error)) from error

    def strange(self, why: Exception | str) -> OutsideError:
        """What is to be raised where an answer makes no sense."""
        return OutsideError(f"{self.url} does not answer as an admin service does: {why}")

    def _refusal(self, answer: httpx2.Response) -> Exception:
        status = answer.status_code
        try:
            problem = msgspec.json.decode(answer.content, type=_Problem)
        except (msgspec.DecodeError, UnicodeDecodeError):
            problem = _Problem()
        detail = problem.detail or f"HTTP {status} {answer.reason_phrase}"
        if status == 401:
            what = "this key is not valid" if self._key else "an API key is needed"
            return UserError(
                f"{self.url}: {what}: give one as --api-key, DOLL_API_KEY or"
                " DOLL_API_KEY_FILE; `doll key create NAME --role viewer` makes one"
            )
        if status == 403:
            return UserError(f"{self.url}: {detail}: `doll key create NAME --role operator`")
        if status == 422 and len({each.detail for each in problem.errors}) == 1:
            fields = tuple(_own(each.field) for each in problem.errors)
            return GivenError(fields, problem.errors[0].detail)
        if 400 <= status < 500 and status not in _AWAY:
            return _REFUSED.get(status, UserError)(detail)
        kind = UnavailableError if status in _AWAY else OutsideError
        return kind(f"{self.url}: {detail}")


def _own(field: str) -> str:
    """The name of a field without where the service found it."""
    return field.removeprefix("body.").removeprefix("query.")
