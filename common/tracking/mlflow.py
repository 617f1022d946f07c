"""Client of an MLflow tracking server by its REST API, version 2.0, as in MLflow 2 and 3.

docs/explain/decisions/2026-11-23-mlflow-by-its-rest-api.md says why it does not use MLflow's own
client. The server stores a point once if it is sent again with the same key, step, time and value.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from common.errors import NotFoundError, UnavailableError, UserError, WireError, decoded
from common.http.client import BoundedClient
from common.tracking.port import ModelVersion, TrackedRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import httpx2

    from common.config.settings import Settings
    from common.tracking.port import Metric, RunStatus, Tracking

T = TypeVar("T")
ANSWER_S = 10.0
PAGES = 100
# The tags of this many versions fit into `ANSWER_BYTES`.
PAGE_VERSIONS = 50
# The server accepts 1000 metrics, 100 parameters and 1000 items in one request.
METRICS, PARAMETERS = 900, 100
# Limit of older servers; newer ones accept 6000.
PARAMETER_CHARACTERS = 500


class _Tag(msgspec.Struct, frozen=True):
    key: str
    value: str = ""


class _RunInfo(msgspec.Struct, frozen=True):
    run_id: str
    status: str = "RUNNING"
    start_time: int = 0


class _RunData(msgspec.Struct, frozen=True):
    tags: list[_Tag] = []
    params: list[_Tag] = []


class _Run(msgspec.Struct, frozen=True):
    info: _RunInfo
    data: _RunData = _RunData()


class _Runs(msgspec.Struct, frozen=True):
    runs: list[_Run] = []


class _Made(msgspec.Struct, frozen=True):
    run: _Run


class _Experiment(msgspec.Struct, frozen=True):
    experiment_id: str
    lifecycle_stage: str = "active"


class _Found(msgspec.Struct, frozen=True):
    experiment: _Experiment


class _Version(msgspec.Struct, frozen=True):
    version: str
    tags: list[_Tag] = []


class _Registered(msgspec.Struct, frozen=True):
    model_version: _Version


class _Versions(msgspec.Struct, frozen=True):
    model_versions: list[_Version] = []
    next_page_token: str = ""


class _Error(msgspec.Struct, frozen=True):
    error_code: str
    message: str = ""


_ANSWER = msgspec.json.Decoder(dict[str, object])
_ERROR = msgspec.json.Decoder(_Error)
_FOUND = msgspec.json.Decoder(_Found)
_MADE = msgspec.json.Decoder(_Made)
_REGISTERED = msgspec.json.Decoder(_Registered)
_RUNS = msgspec.json.Decoder(_Runs)
_VERSIONS = msgspec.json.Decoder(_Versions)


class _RefusedError(UserError):
    """A request that MLflow refused with an error code."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class MlflowServer:
    """Client of one tracking server.

    Args:
        url: URL of the server.
        token: Optional. Bearer token.
        user: Optional. Name and password, instead of a token.
        answer_s: Seconds until an answer must be complete.
        clock: Returns the time in seconds since 1970.
        transport: Optional. If unset, the network.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        user: tuple[str, str] | None = None,
        answer_s: float = ANSWER_S,
        clock: Callable[[], float] = time.time,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._clock = clock
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._name = f"MLflow at {self._url}"
        self._http = BoundedClient(self._name, answer_s, transport, headers=headers, auth=user)

    def begin(
        self,
        experiment: str,
        name: str,
        identity: Mapping[str, str],
        parameters: Mapping[str, str],
    ) -> TrackedRun:
        """See `Tracking`. If two runs are created at once, the later one is deleted."""
        within = self._experiment(experiment)
        found = self._find(within, identity)
        if found is None:
            described = {
                "experiment_id": within,
                "run_name": name,
                "start_time": _milliseconds(self._clock()),
                "tags": _pairs(identity),
            }
            made = self._post("runs/create", _MADE, described).run
            found = self._find(within, identity) or made
            if found.info.run_id != made.info.run_id:
                self._do("runs/delete", run_id=made.info.run_id)
        run = found.info.run_id
        if parameters and not found.data.params:
            taken = {
                name: value[:PARAMETER_CHARACTERS]
                for name, value in list(parameters.items())[:PARAMETERS]
            }
            self._do("runs/log-batch", run_id=run, params=_pairs(taken))
        return TrackedRun(run, _status(found.info.status), _read(found.data.tags))

    def log(self, run: str, metrics: Sequence[Metric], tags: Mapping[str, str]) -> None:
        """See `Tracking`."""
        points = [
            {
                "key": metric.name,
                "value": metric.value,
                "timestamp": _milliseconds(metric.at_s),
                "step": metric.step,
            }
            for metric in metrics
        ]
        *others, last = [points[at : at + METRICS] for at in range(0, len(points), METRICS)] or [[]]
        for part in others:
            self._do("runs/log-batch", run_id=run, metrics=part)
        self._do("runs/log-batch", run_id=run, metrics=last, tags=_pairs(tags))

    def set_status(self, run: str, status: RunStatus) -> None:
        """See `Tracking`."""
        ended = None if status == "RUNNING" else _milliseconds(self._clock())
        self._do("runs/update", run_id=run, status=status, end_time=ended)

    def versions(self, model: str, tags: Mapping[str, str]) -> list[ModelVersion]:
        """See `Tracking`."""
        wanted = " AND ".join([f"name = {_quoted(model)}", *_filters(tags)])
        found, page = list[ModelVersion](), ""
        for _ in range(PAGES):
            asked = {"filter": wanted, "max_results": str(PAGE_VERSIONS), "page_token": page}
            answer = self._ask("GET", "model-versions/search", _VERSIONS, parameters=asked)
            found += (ModelVersion(it.version, _read(it.tags)) for it in answer.model_versions)
            page = answer.next_page_token
            if not page:
                return found
        raise UserError(
            f"{self._name} has more than {PAGES} pages of versions of {model}; register another"
            " model"
        )

    def register(self, model: str, source: str, run: str, tags: Mapping[str, str]) -> str:
        """See `Tracking`."""
        try:
            self._do("registered-models/create", name=model)
        except _RefusedError as error:
            if error.code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = {"name": model, "source": source, "run_id": run, "tags": _pairs(tags)}
        return self._post("model-versions/create", _REGISTERED, version).model_version.version

    def set_version_tag(self, model: str, number: str, name: str, value: str) -> None:
        """See `Tracking`."""
        self._do("model-versions/set-tag", name=model, version=number, key=name, value=value)

    def set_alias(self, model: str, alias: str, number: str) -> None:
        """See `Tracking`."""
        self._do("registered-models/alias", name=model, alias=alias, version=number)

    def close(self) -> None:
        """See `Tracking`."""
        self._http.close()

    # ---------------------------------------------------------------------------------------------

    def _experiment(self, name: str) -> str:
        try:
            asked = {"experiment_name": name}
            found = self._ask("GET", "experiments/get-by-name", _FOUND, parameters=asked).experiment
        except _RefusedError as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
            found = None
        if found is None or found.lifecycle_stage != "active":
            state = "no" if found is None else f"only a {found.lifecycle_stage}"
            raise NotFoundError(
                f'{self._name} has {state} experiment "{name}"; create it, or set another in'
                " tracking.experiment"
            )
        return found.experiment_id

    def _find(self, experiment: str, identity: Mapping[str, str]) -> _Run | None:
        wanted = {
            "experiment_ids": [experiment],
            "filter": " AND ".join(_filters(identity)),
            "max_results": 10,
        }
        found = self._post("runs/search", _RUNS, wanted).runs
        return min(found, key=lambda run: (run.info.start_time, run.info.run_id), default=None)

    def _do(self, path: str, **body: object) -> None:
        """Send a request whose answer has no content of interest."""
        self._post(path, _ANSWER, body)

    def _post(self, path: str, decoder: msgspec.json.Decoder[T], body: Mapping[str, object]) -> T:
        return self._ask("POST", path, decoder, body=msgspec.json.encode(body))

    def _ask(
        self,
        method: str,
        path: str,
        decoder: msgspec.json.Decoder[T],
        *,
        body: bytes | None = None,
        parameters: Mapping[str, str] | None = None,
    ) -> T:
        """Send a request and decode the answer.

        Raises:
            UnavailableError: If there is no answer, or the server has a fault.
            UserError: If the server refuses the request or is not MLflow.
        """
        status, answer = self._http.ask(
            method,
            f"{self._url}/api/2.0/mlflow/{path}",
            content=body,
            params=parameters,
            headers={} if body is None else {"Content-Type": "application/json"},
        )
        if not 200 <= status < 300:
            raise self._refused(path, status, answer)
        what = self._stranger(f"does not answer {path} as MLflow does")
        return decoded(decoder.decode, answer, what, UserError)

    def _refused(self, path: str, status: int, answer: bytes) -> UserError | UnavailableError:
        where = self._name
        if status in (401, 403):
            return UserError(
                f"{where} denies access (status {status}); set DOLL_MLFLOW_TOKEN, or"
                " DOLL_MLFLOW_USERNAME and DOLL_MLFLOW_PASSWORD"
            )
        if status == 429 or status >= 500:
            return UnavailableError(f"{where} answers {path} with status {status}")
        try:
            error = decoded(_ERROR.decode, answer, "error")
        except WireError:
            return UserError(self._stranger(f"answers {path} with status {status}"))
        message = error.message.partition("\n")[0][:300]
        return _RefusedError(
            f"{where} refuses {path}: {message} ({error.error_code})", error.error_code
        )

    def _stranger(self, what: str) -> str:
        return f"{self._url} {what}; DOLL_MLFLOW must be the complete URL of an MLflow server"


def _milliseconds(at_s: float) -> int:
    return round(at_s * 1000)


def _pairs(of: Mapping[str, str]) -> list[_Tag]:
    return [_Tag(key, value) for key, value in of.items()]


def _read(tags: Sequence[_Tag]) -> dict[str, str]:
    return {tag.key: tag.value for tag in tags}


def _status(status: str) -> RunStatus:
    return "RUNNING" if status == "RUNNING" else "FINISHED" if status == "FINISHED" else "KILLED"


def _filters(tags: Mapping[str, str]) -> list[str]:
    return [f"tags.`{name}` = {_quoted(value)}" for name, value in tags.items()]


def _quoted(value: str) -> str:
    """Return a value quoted for a filter. Values with quotes of both kinds are not supported."""
    return f'"{value}"' if "'" in value else f"'{value}'"


def open_tracking(settings: Settings) -> Tracking | None:
    """Open the MLflow server that the settings name, or return None; sends no request yet."""
    if not settings.mlflow:
        return None
    user = (
        (settings.mlflow_username, settings.mlflow_password) if settings.mlflow_username else None
    )
    return MlflowServer(settings.mlflow, token=settings.mlflow_token, user=user)
