"""Live page for people: one HTML file and the files that it loads, all from installed packages.

All files except the HTML file have a folder in their path that is named after their content, so
that browsers cache them for ever and never mix two releases. See docs/reference/page.md.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Response

router = APIRouter(include_in_schema=False)

# Private, because the file is behind a key.
_FOREVER = "private, max-age=31536000, immutable"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from other sites, no inline script or style, and no text parsed as HTML. Without any
# trusted types, the browser refuses every such attempt of the page and of Plotly.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        *("script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        *("require-trusted-types-for 'script'", "trusted-types 'none'"),
    )
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Vary": "Accept-Encoding",
}
_DOCUMENT_HEADERS = {
    **_HEADERS,
    "Cache-Control": "private, no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "X-Frame-Options": "DENY",
}


_FOLDER = Path(__file__).parent.parent / "page"
# Files of Swagger UI.
_SWAGGER = files("fastapi_offline") / "static"
_SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
_PLOTLY = f"plotly-{version('plotly')}/plotly.min.js"


@cache
def _own() -> tuple[str, dict[str, bytes]]:
    """Return the name of the release's folder, and the files that a browser loads from it."""
    found = {
        path.relative_to(_FOLDER).as_posix(): path.read_bytes()
        for path in sorted(_FOLDER.rglob("*"))
        if path.suffix in _TYPES
    }
    found |= {name: (_SWAGGER / name).read_bytes() for name in _SWAGGER_FILES}
    digest = hashlib.sha256()
    for name, body in found.items():
        digest.update(name.encode() + b"\0" + hashlib.sha256(body).digest())
    return digest.hexdigest()[:16], found


@cache
def _plotly() -> bytes:
    return (files("plotly") / "package_data" / "plotly.min.js").read_bytes()


@cache
def document(name: str) -> bytes:
    """Return an HTML file with the folders of the files that it loads filled in."""
    folder, found = _own()
    return (
        found[name]
        .replace(b"{{page}}", f"/page/{folder}".encode())
        .replace(b"{{plotly}}", f"/page/{_PLOTLY}".encode())
    )


@cache
def _zipped(body: bytes) -> bytes:
    # Compresses Plotly's 4.8 MB to 1.5 MB, once per process.
    return gzip.compress(body, 6, mtime=0)


def _answer(
    name: str, body: bytes, encodings: str, headers: dict[str, str], status: int = 200
) -> Response:
    if "gzip" in encodings:
        body, headers = _zipped(body), {**headers, "Content-Encoding": "gzip"}
    return Response(body, status, headers, media_type=_TYPES[Path(name).suffix])


@router.get("/")
async def page(accept_encoding: Annotated[str, Header()] = "") -> Response:
    """Return the page, which reads all its data from the API."""
    name = "index.html"
    return _answer(name, document(name), accept_encoding, _DOCUMENT_HEADERS)


# Not a coroutine, because reading and compressing the file takes a sixth of a second.
@router.get(f"/page/{_PLOTLY}")
def plotly_asset(accept_encoding: Annotated[str, Header()] = "") -> Response:
    """Return the library that draws the charts."""
    return _answer(_PLOTLY, _plotly(), accept_encoding, _HEADERS | {"Cache-Control": _FOREVER})


@router.get("/page/{folder}/{name:path}")
async def page_asset(
    folder: str, name: str, accept_encoding: Annotated[str, Header()] = ""
) -> Response:
    """Return a file that the page loads."""
    own, found = _own()
    if name not in found or name.endswith(".html"):
        return Response("There is no such file.", status_code=404, media_type="text/plain")
    # A page of another release gets this release's file while replicas are being replaced.
    kept = _FOREVER if folder == own else "no-store"
    return _answer(name, found[name], accept_encoding, _HEADERS | {"Cache-Control": kept})


def refused_page(name: str, accept_encoding: str, headers: dict[str, str]) -> Response:
    """Return an HTML file that tells a browser without a valid key how to get one.

    Args:
        name: Name of the HTML file.
        accept_encoding: The request's header of that name.
        headers: Additional headers. `WWW-Authenticate` makes the browser prompt for a key.
    """
    own = _DOCUMENT_HEADERS | {"Cache-Control": "no-store"} | headers
    return _answer(name, document(name), accept_encoding, own, 401)
