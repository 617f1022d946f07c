"""OpenAPI document, and Swagger UI to read it with, both behind a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse, Response

from common.api.answers import EVENT_DATA
from services.admin.middleware.problems import Problem
from services.admin.routes.page import document

if TYPE_CHECKING:
    from pydantic import BaseModel

router = APIRouter(include_in_schema=False)

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data:; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class DocumentedApi(FastAPI):
    """Application whose OpenAPI document includes the schemas of problems and events."""

    def openapi(self) -> dict[str, Any]:
        """Return the document, which is built once."""
        if self.openapi_schema is None:
            document = super().openapi()
            models: tuple[type[BaseModel], ...] = (Problem, *EVENT_DATA.values())
            _, more = models_json_schema(
                [(model, "serialization") for model in models],
                ref_template="#/components/schemas/{model}",
            )
            document["components"]["schemas"] |= more["$defs"]
            self.openapi_schema = document
        return self.openapi_schema


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Return the OpenAPI document."""
    return JSONResponse(request.app.openapi(), headers={"Cache-Control": "private, no-cache"})


@router.get("/docs")
async def docs() -> Response:
    """Return Swagger UI."""
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
    return Response(document("docs.html"), media_type="text/html", headers=headers)
