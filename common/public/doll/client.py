"""`doll.Client`: an admin service, and its jobs."""

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
    """A job as an object: `doll.JobSpec`."""

    def model_dump_json(self) -> str:
        """The job as JSON."""


class _Id(msgspec.Struct):
    id: str


class _Page(msgspec.Struct):
    jobs: list[_Id]
    next: str | None = None


_ID, _JOBS = msgspec.json.Decoder(_Id), msgspec.json.Decoder(_Page)


class Client:
    """One admin service.

    What may be asked twice is, where a connection breaks or the service is busy; errors are those
    of `doll.DollError`, and say what to do.

    Args:
        url: Where it is; empty: as DOLL_API says.
        key: The API key; None: as DOLL_API_KEY says, or the file that DOLL_API_KEY_FILE names.
        timeout_s: For an answer to begin.
        transport: None: the network.

    Raises:
        UserError: If nothing says where it is.
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
            raise UserError('where is the service? give its URL: doll.Client("http://host:8080")')
        key = values.get("DOLL_API_KEY", "") if key is None else key
        self._connection = Connection(url, key, timeout_s=timeout_s, transport=transport)

    def submit(
        self, job: str | Path | Mapping[str, Any] | Specification, *, unchecked: bool = False
    ) -> Job:
        """Submit a job; a coordinator takes it up from there.

        Waits until the service has checked the job: a task of your own is built for that, for up to
        60 s.

        Args:
            job: A job file's path; or what such a file says; or a `doll.JobSpec`.
            unchecked: Submit the job without building its task at the service.

        Raises:
            UserError: Naming the field that makes no sense; `ConflictError` if the name is taken.
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
        """A job by its name; whether there is one is seen when it is asked for something."""
        return Job(self._connection, name)

    def jobs(self) -> list[Job]:
        """All jobs, by name.

        Raises:
            UserError: If the key does not count.
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
        """Let go of the service; what follows its jobs ends."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
