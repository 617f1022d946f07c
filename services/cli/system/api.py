"""A system reached over its REST API: `doll --api URL`."""

from __future__ import annotations

import time
from secrets import token_hex
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

import httpx2
import msgspec
from pydantic import BaseModel, ValidationError

from common.api.answers import (
    JobAnswer,
    JobList,
    JobSummary,
    PricesAnswer,
    ProvisioningAnswer,
    QuarantineAnswer,
    RequeueAnswer,
    ToldPlan,
    UnreadableRecord,
    UpdatesPage,
    WorkersAnswer,
)
from common.api.jobs import record_of
from common.config.validation import complaint
from common.config.yaml_file import as_json, load_text
from common.core.spans import Span
from common.errors import (
    ConflictError,
    GivenError,
    NotFoundError,
    OutsideError,
    UnavailableError,
    UserError,
    WireError,
)
from common.jobs.notes import notes_on
from common.jobs.progress import State
from common.jobs.quarantine import QuarantinedBatch, RequeuedBatch
from common.jobs.spec import job_from_json
from services.cli.system.system import SHOWN_UPDATES, Picture, PulledModel, Submitted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from common.checkpoints.find import Wish
    from common.config.settings import Settings
    from common.core.events import Wanted
    from common.core.losses import ReadFrom
    from common.jobs.edit import Value
    from common.jobs.store import JobRecord
    from common.planning.compare import Result
    from common.planning.request import PlanRequest
    from common.planning.simulation import SimulateRequest

T = TypeVar("T", bound=BaseModel)

_PAGE = 500
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


class Api:
    """See `system.System`.

    Args:
        settings: They name the service and the key.
        transport: None: the network.
    """

    def __init__(self, settings: Settings, transport: httpx2.BaseTransport | None = None) -> None:
        self._client = Client(settings.api, settings.api_key, transport)

    # --- jobs ------------------------------------------------------------------------------------

    def submit(self, text: str, source: str) -> Submitted:
        """See the protocol; the service's allow list of tasks counts, not ours."""
        if source:
            raise UserError(
                f"--from {source}: checkpoints are copied by whoever reaches Kafka and storage"
                " itself: leave out --api"
            )
        body = as_json(load_text(text))
        spec = job_from_json(body)  # what is wrong is told in the same words as without a service
        headers = {"Idempotency-Key": token_hex(16)}
        answer = self._client.ask("POST", "/v1/jobs", body.encode(), headers=headers)
        return Submitted(self._record(answer), notes=notes_on(spec))

    def jobs(self) -> JobList:
        """See the protocol."""
        jobs, unreadable, after = list[JobSummary](), list[UnreadableRecord](), ""
        while True:
            page = self._client.get("/v1/jobs", JobList, limit=_PAGE, after=after)
            jobs += page.jobs
            unreadable += page.unreadable
            if page.next is None or page.next <= after:
                return JobList(jobs=tuple(jobs), unreadable=tuple(unreadable))
            after = page.next

    def job(self, name: str) -> JobRecord:
        """See the protocol."""
        return record_of(self._client.get(_path(name), JobAnswer))

    def want(self, name: str, wanted: Wanted, reason: str) -> None:
        """See the protocol."""
        self._patch(name, {"wanted": wanted, "reason": reason})

    def resume_after_loss(
        self, name: str, reason: str, *, from_start: bool, read_from: ReadFrom
    ) -> None:
        """See the protocol."""
        wish: dict[str, object] = {"after_loss": True, "from_start": from_start}
        if read_from:
            wish["read_from"] = read_from
        self._patch(name, {"wanted": "running", **wish, "reason": reason})

    def change(self, name: str, changed: Mapping[str, Value], reason: str) -> JobRecord:
        """See the protocol."""
        return self._patch(name, {**changed, "reason": reason})

    def delete(self, name: str) -> None:
        """See the protocol."""
        self._client.ask("DELETE", _path(name))

    def quarantine(self, name: str) -> list[QuarantinedBatch]:
        """See the protocol."""
        found, path, after = list[QuarantinedBatch](), _path(name, "quarantine"), -1
        while True:
            page = self._client.get(path, QuarantineAnswer, limit=_PAGE, after=after)
            for each in page.batches:
                address = tuple(Span(*span) for span in each.spans)
                found.append(
                    QuarantinedBatch(each.batch, each.records, address, each.reason, each.final)
                )
            if page.next is None or page.next <= after:
                return found
            after = page.next

    def requeue(self, name: str, batches: Sequence[int] | None) -> list[RequeuedBatch]:
        """See the protocol."""
        body = msgspec.json.encode({"batches": "all" if batches is None else batches})
        answer = self._client.ask("POST", _path(name, "requeue"), body)
        told = self._client.read(answer, RequeueAnswer)
        return [RequeuedBatch(each.batch, each.outcome) for each in told.batches]

    def watch(self, name: str) -> ApiWatched:
        """See the protocol."""
        return ApiWatched(self._client, name)

    def model(self, name: str, wish: Wish, tell: Callable[[str], object]) -> PulledModel:  # noqa: ARG002 -- the service's log has what was left out
        """See the protocol."""
        answer = self._client.ask("GET", _path(name, "model"), parameters={"version": wish})
        try:
            epoch, version = (int(answer.headers[f"doll-{what}"]) for what in ("epoch", "version"))
        except (KeyError, ValueError) as error:
            raise self._client.strange(error) from error
        return PulledModel(epoch, version, answer.content)

    # --- provisioning ----------------------------------------------------------------------------

    def plan(self, request: PlanRequest) -> ToldPlan:
        """See the protocol."""
        body = request.model_dump_json(exclude_defaults=True).encode()
        return self._client.read(self._client.ask("POST", "/v1/provisioning/plan", body), ToldPlan)

    def simulate(
        self,
        request: SimulateRequest,
        folder: Path,  # noqa: ARG002 -- the service sees no file of ours
        advance: Callable[[str, float], None],
    ) -> dict[str, Result]:
        """See the protocol."""
        from common.planning.compare import results_of

        body = request.model_dump_json(exclude_defaults=True).encode()
        answer = self._client.ask("POST", "/v1/provisioning/simulate", body)
        try:
            results = results_of(answer.content)
        except WireError as error:
            raise self._client.strange(error) from error
        for name in results:
            advance(name, 1.0)
        return results

    def provisioning(self, name: str, limit: int) -> ProvisioningAnswer:
        """See the protocol."""
        return self._client.get(_path(name, "provisioning"), ProvisioningAnswer, limit=limit)

    def replan(self, name: str, reason: str) -> None:
        """See the protocol."""
        body = msgspec.json.encode({"reason": reason})
        self._client.ask("POST", _path(name, "provisioning/replan"), body)

    def prices(self) -> PricesAnswer:
        """See the protocol."""
        return self._client.get("/v1/provisioning/prices", PricesAnswer)

    def _patch(self, name: str, patch: Mapping[str, object]) -> JobRecord:
        return self._record(self._client.ask("PATCH", _path(name), msgspec.json.encode(patch)))

    def _record(self, answer: httpx2.Response) -> JobRecord:
        return record_of(self._client.read(answer, JobAnswer))


class ApiWatched:
    """One job, asked about again and again; see `system.Watched`."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name
        self._looked = False

    def look(self, timeout_s: float) -> Picture:
        """Wait `timeout_s`, unless this is the first look, and say how the job is."""
        if self._looked:
            time.sleep(timeout_s)
        self._looked = True
        job = self._client.get(_path(self._name), JobAnswer)
        workers = self._client.get(_path(self._name, "workers"), WorkersAnswer)
        after = max(job.progress.version - SHOWN_UPDATES, 0)
        updates = self._client.get(
            _path(self._name, "updates"), UpdatesPage, after=after, limit=SHOWN_UPDATES
        )
        statuses = [worker.status for worker in workers.workers]
        return Picture(
            State(job.state, job.why),
            job.progress,
            None if workers.board_away else statuses.count("alive"),
            statuses.count("leaving"),
            updates.updates,
        )

    def close(self) -> None:
        """Look no more."""


def _path(job: str, part: str = "") -> str:
    return f"/v1/jobs/{quote(job, safe='')}" + (f"/{part}" if part else "")
