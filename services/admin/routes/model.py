"""`/v1/jobs/{job}/model`: a model's weights as safetensors, without torch."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from common.checkpoints.find import find_model, wish_of
from common.errors import ConflictError, FutureFormatError, OutsideError
from common.learning.checkpoint import save_weights
from common.telemetry.logging import event_logger
from services.admin.middleware.problems import Responses, documented
from services.admin.routes.requests import JobName  # noqa: TC001 -- FastAPI reads it when run
from services.admin.service import Answering  # noqa: TC001 -- likewise

if TYPE_CHECKING:
    from common.checkpoints.find import Wish
    from services.admin.service import Service

router = APIRouter(prefix="/v1/jobs/{job}/model", tags=["jobs"])

_KIND = "application/octet-stream"
_HEADERS = {
    name: {"schema": {"type": kind}, "description": told}
    for name, kind, told in (
        ("ETag", "string", "Of these very weights."),
        ("Doll-Epoch", "integer", "The leader that made the update."),
        ("Doll-Version", "integer", "J, the updates in it."),
    )
}
_ANSWERS: Responses = {
    200: {
        "description": "Safetensors: `module.load_state_dict(safetensors.torch.load(...))`.",
        "content": {_KIND: {"schema": {"type": "string", "format": "binary"}}},
        "headers": _HEADERS,
    },
    304: {"description": "It is the one of `If-None-Match`.", "headers": _HEADERS},
    **documented(404, 409, 502),
}

_log = event_logger(__name__)


@router.get("", response_class=Response, responses=_ANSWERS)
async def show(
    service: Answering,
    job: JobName,
    version: Annotated[
        str,
        Query(
            pattern="^(newest|best|[0-9]{1,15})$",
            description="J, or `newest`, or `best`: of lowest mean loss over its last updates.",
            examples=["best"],
        ),
    ] = "newest",
    if_none_match: Annotated[
        str | None,
        Header(
            max_length=1000,
            description="Tags of models that are there already.",
            examples=['"12-400-0123456789abcdef"'],
        ),
    ] = None,
) -> Response:
    """Give a model's weights, of what counts by the audit."""
    service.job(job)
    take = partial(_take, service, job, wish_of(version))
    tag, epoch, made, data = await service.models.run(take)
    headers = {"ETag": tag, "Doll-Epoch": str(epoch), "Doll-Version": str(made)}
    if if_none_match is not None and _holds(if_none_match, tag):
        return Response(status_code=304, headers=headers)
    headers["Content-Disposition"] = f'attachment; filename="{job}-{made}.safetensors"'
    return Response(data, headers=headers, media_type=_KIND)


def _take(service: Service, job: str, wish: Wish) -> tuple[str, int, int, bytes]:
    """Find a model; its tag, epoch, version and bytes.

    Raises:
        NotFoundError: If it is not kept.
        ConflictError: If an older program kept it, without the names of its tensors.
        OutsideError: If it cannot be read.
    """
    log = _log.bind(job=job)
    try:
        found = find_model(
            job,
            wish,
            service.outside,
            service.log(),
            lambda told: log.warning("model_passed_over", reason=told),
        )
    except FutureFormatError as error:
        raise OutsideError(str(error)) from error
    if not found.layout:
        raise ConflictError(
            f"{found.title} was kept by an older program, without the names of its tensors: take"
            f" it out with `doll model pull {job}`, or wait for the next checkpoint"
        )
    data = save_weights(found.layout, found.weights)
    made = found.made
    tag = f'"{made.epoch}-{made.version}-{hashlib.sha256(data).hexdigest()[:16]}"'
    return tag, made.epoch, made.version, data


def _holds(header: str, tag: str) -> bool:
    """Whether `If-None-Match` names a tag; weak ones are as good."""
    named = {each.strip().removeprefix("W/") for each in header.split(",")}
    return bool(named & {tag, "*"})
