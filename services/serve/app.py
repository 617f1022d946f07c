"""Open Inference Protocol over HTTP: metadata, readiness and predictions of a served model."""

from __future__ import annotations

from importlib.metadata import version as version_of
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import UnavailableError, UserError
from common.learning.errors import TaskError
from common.learning.named_outputs import OUTPUT
from services.serve import protocol

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.telemetry.metrics.serve import ServeMetrics
    from services.serve.batching import Batches
    from services.serve.protocol import Inputs
    from services.serve.served_model import ServedModel, Version

_JSON = "application/json"
# Maximum length of an error message, which may quote the request.
_MOST_CHARACTERS = 1000


class ModelServer:
    """Routes of one served model."""

    def __init__(
        self,
        job: str,
        model: ServedModel,
        inputs: Inputs,
        batches: Batches,
        metrics: ServeMetrics,
        settings: Settings,
    ) -> None:
        self._job = job
        self._model = model
        self._inputs = inputs
        self._batches = batches
        self._metrics = metrics
        self._body_bytes = settings.api_body_bytes

    def app(self) -> Starlette:
        """Return the ASGI application."""
        model = "/v2/models/{name}"
        versioned = model + "/versions/{version}"
        routes = [
            Route("/v2", self._server),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
        ]
        for path in (model, versioned):
            routes += [
                Route(path, self._metadata),
                Route(f"{path}/ready", self._ready),
                Route(f"{path}/infer", self._infer, methods=["POST"]),
            ]
        return Starlette(
            routes=routes, exception_handlers={HTTPException: _refused, Exception: _failed}
        )

    async def _server(self, _: Request) -> Response:
        body = {"name": "doll", "version": version_of("doll"), "extensions": list[str]()}
        return _answer(body)

    async def _live(self, _: Request) -> Response:
        return _answer({"live": True})

    async def _ready(self, request: Request) -> Response:
        """Report if a version answers, and how old it is."""
        version = self._model.version
        if "name" in request.path_params and version is not None:
            self._check(request, str(version.made.version))
        body: dict[str, Any] = {"ready": version is not None}
        if version is not None:
            body |= self._parameters(version)
        return _answer(body, 200 if version is not None else 503)

    async def _metadata(self, request: Request) -> Response:
        version = self._model.version
        made = "" if version is None else str(version.made.version)
        self._check(request, made)
        outputs = [
            protocol.Described(name, "FP32", (-1, *shape))
            for name, shape in (self._model.forward.outputs or {OUTPUT: (-1,)}).items()
        ]
        return _answer(
            protocol.Metadata(
                self._job,
                [made] if made else [],
                "pytorch",
                self._inputs.described(),
                outputs,
            )
        )

    async def _infer(self, request: Request) -> Response:
        began = perf_counter()
        try:
            answer = await self._predicted(request)
        except HTTPException as error:
            self._metrics.answered(error.status_code, perf_counter() - began)
            raise
        except Exception:
            self._metrics.answered(500, perf_counter() - began)
            raise
        self._metrics.answered(200, perf_counter() - began)
        return answer

    async def _predicted(self, request: Request) -> Response:
        self._check(request)
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > self._body_bytes:
                    most = f"{self._body_bytes} bytes (DOLL_API_BODY_BYTES)"
                    raise HTTPException(413, f"the body is larger than {most}")
            columns, name = self._inputs.read(body)
            found = await self._batches.predict(columns, name)
        except (UserError, TaskError) as error:
            raise HTTPException(400, str(error)) from error
        except ClientDisconnect as error:
            raise HTTPException(400, "the client has disconnected") from error
        except UnavailableError as error:
            raise HTTPException(503, str(error)) from error
        made = str(found.version.made.version)
        self._check(request, made)
        outputs = [
            protocol.Output(output, "FP32", values.shape, values.ravel().tolist())
            for output, values in found.outputs.items()
        ]
        return _answer(
            protocol.Response(self._job, made, outputs, self._parameters(found.version), name)
        )

    def _check(self, request: Request, made: str | None = None) -> None:
        """Refuse a request for another model, or for another version than the one that answers."""
        name, version = request.path_params["name"], request.path_params.get("version")
        if name != self._job:
            raise HTTPException(404, f"model: must be {self._job!r}, got {name!r}")
        if made is not None and version not in (None, made):
            raise HTTPException(
                404,
                f"version: must be {made or 'left out, because none is served yet'}, got {version}",
            )

    def _parameters(self, version: Version) -> dict[str, Any]:
        """Return additional data about the version that answers."""
        epoch, number = version.made
        return {
            # KServe's client drops `model_version`.
            "version": number,
            "epoch": epoch,
            "age_s": round(max(0.0, time() - version.made_at_s), 3),
            "behind_s": round(self._model.behind_s(), 3),
        }


def _answer(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type=_JSON)


def refusal(status: int, detail: str) -> Response:
    """Return an error response."""
    return _answer({"error": detail[:_MOST_CHARACTERS]}, status)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 -- it is registered for these
    return refusal(error.status_code, error.detail)


async def _failed(_: Request, _error: Exception) -> Response:
    """Answer in JSON; Starlette raises the error again, so that uvicorn logs it."""
    return refusal(500, "internal error; see the log of the model server")
