"""Client of an admin service and entry point to its jobs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from doll.connection import ANSWER_S, Connection
from doll.errors import UserError
from doll.job import Job
from doll.secret_files import resolve_files
from doll.yaml_file import as_json, load_file

if TYPE_CHECKING:
    import httpx2

_PAGE = 500
_VARIABLES = {"DOLL_API", "DOLL_API_KEY"}


class Specification(Protocol):
    """A job specification as an object, such as `doll.JobSpec`."""

    def model_dump_json(self) -> str:
        """Return the specification as JSON."""


class _Id(msgspec.Struct):
    id: str


class _Page(msgspec.Struct):
    jobs: list[_Id]
    next: str | None = None


_ID, _JOBS = msgspec.json.Decoder(_Id), msgspec.json.Decoder(_Page)


class Client:
    """Client of one admin service.

    The client retries a request if the service is busy, or if the connection breaks and the request
    may safely arrive twice. Each error is a `doll.DollError` that says what to do.

    Args:
        url: URL of the service, such as `http://host:8080`. If empty, the value of DOLL_API.
        key: Optional. API key. If unset, the value of DOLL_API_KEY or the content of the file that
            DOLL_API_KEY_FILE names.
        timeout_s: Time limit for an answer to begin.
        transport: Optional. HTTP transport of `httpx2`. If unset, the network.

    Raises:
        UserError: If neither `url` nor DOLL_API is set.
    """

    def __init__(
        self,
        url: str = "",
        key: str | None = None,
        *,
        timeout_s: float = ANSWER_S,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        values, _ = resolve_files(os.environ, _VARIABLES.__contains__)
        url = url or values.get("DOLL_API", "")
        if not url:
            raise UserError(
                'url: is missing; pass it, such as doll.Client("http://host:8080"), or set DOLL_API'
            )
        key = values.get("DOLL_API_KEY", "") if key is None else key
        self._connection = Connection(url, key, timeout_s=timeout_s, transport=transport)

    def submit(
        self, job: str | Path | Mapping[str, Any] | Specification, *, unchecked: bool = False
    ) -> Job:
        """Submit a job and return it.

        Waits until the service has checked the job. The check builds a custom task, which may take
        up to 60 s.

        Args:
            job: Path of a job file, its content as a mapping, or a `doll.JobSpec`.
            unchecked: True to skip building the task in the service.

        Raises:
            UserError: If a field is invalid; the message names the field.
            ConflictError: If the name is taken.
            OutsideError: If the service cannot be reached or has a fault.
        """
        if isinstance(job, str | Path):
            body = as_json(load_file(job))
        elif hasattr(job, "model_dump_json"):
            body = job.model_dump_json()
        else:
            body = as_json(dict(job))
        answer = self._connection.ask(
            "POST",
            "/v1/jobs",
            body.encode(),
            headers={"Idempotency-Key": token_hex(16)},
            parameters={"unchecked": "true"} if unchecked else {},
        )
        return Job(self._connection, self._connection.decoded(answer.content, _ID).id)

    def job(self, name: str) -> Job:
        """Return a job by name without a request; its methods raise if there is no such job."""
        return Job(self._connection, name)

    def jobs(self) -> list[Job]:
        """Return all jobs, sorted by name.

        Raises:
            UserError: If the key is missing or not valid.
            OutsideError: If the service cannot be reached or has a fault.
        """
        names, after = list[str](), ""
        while True:
            asked: dict[str, str | int] = {"limit": _PAGE, "after": after}
            answer = self._connection.ask("GET", "/v1/jobs", parameters=asked)
            page = self._connection.decoded(answer.content, _JOBS)
            names += [each.id for each in page.jobs]
            if page.next is None or page.next <= after:
                return [Job(self._connection, name) for name in names]
            after = page.next

    def close(self) -> None:
        """Close the connections. Jobs of this client can send no further requests."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
