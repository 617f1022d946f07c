"""The OpenAPI document, and Swagger UI to read it with, both behind a key."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse, Response

from common.api.answers import EVENT_DATA
from common.errors import NotFoundError
from services.admin.middleware.problems import Problem
from services.admin.routes.page import document

if TYPE_CHECKING:
    from pydantic import BaseModel

router = APIRouter(include_in_schema=False)

_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data:; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_BEGIN = """SwaggerUIBundle({
  url: "/openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis], layout: "BaseLayout", tryItOutEnabled: true,
});
"""


class Api(FastAPI):
    """An application whose OpenAPI document has problems and events, too."""

    def openapi(self) -> dict[str, Any]:
        """The document; made once."""
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
    """Answer with the document."""
    return JSONResponse(request.app.openapi(), headers={"Cache-Control": "private, no-cache"})


@router.get("/docs")
async def docs() -> Response:
    """Answer with a page that shows the document and lets people try it."""
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
    return Response(document("docs.html"), media_type="text/html", headers=headers)


@router.get("/docs/{name}")
async def asset(name: str) -> Response:
    """Answer with a file that the page loads.

    Raises:
        NotFoundError: If there is none of this name.
    """
    if name == "begin.js":
        return Response(_BEGIN, media_type="text/javascript")
    if name not in _ASSETS:
        raise NotFoundError(f'there is no file "{name}"')
    kept = {"Cache-Control": "private, max-age=86400", "X-Content-Type-Options": "nosniff"}
    return Response(_file(name), media_type=_ASSETS[name], headers=kept)


@cache
def _file(name: str) -> bytes:
    return (files("fastapi_offline") / "static" / name).read_bytes()
