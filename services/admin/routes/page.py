"""The live page for people: one HTML file and what it loads, all of it from installed packages.

Everything but the HTML file lies in a folder named after its own content, so that browsers keep it
for ever and never mix the files of two releases. See docs/reference/page.md.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, NamedTuple

from fastapi import APIRouter, Header, Response

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

router = APIRouter(include_in_schema=False)

_FOREVER = "private, max-age=31536000, immutable"  # behind a key, so for this browser alone
_EACH_TIME = "private, no-cache"
_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing from elsewhere, no inline script or style, and no text that is read as HTML: with no
# trusted types at all the browser refuses every such attempt, the page's own and Plotly's.
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
    "Cache-Control": _EACH_TIME,
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "X-Frame-Options": "DENY",
}


class Asset(NamedTuple):
    """A file as it is sent."""

    kind: str
    plain: bytes
    zipped: bytes


@cache
def _own() -> tuple[str, dict[str, Asset]]:
    found = {
        name: Asset(_TYPES[name.rpartition(".")[2]], body, gzip.compress(body, mtime=0))
        for name, body in _walk(files("services.admin.page"))
    }
    digest = hashlib.sha256()
    for name, asset in sorted(found.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(asset.plain).digest())
    return digest.hexdigest()[:16], found


def _walk(folder: Traversable, prefix: str = "") -> list[tuple[str, bytes]]:
    found = list[tuple[str, bytes]]()
    for each in folder.iterdir():
        if each.is_dir():
            found += _walk(each, f"{prefix}{each.name}/")
        elif each.name.rpartition(".")[2] in _TYPES:
            found.append((prefix + each.name, each.read_bytes()))
    return found


@cache
def _plotly() -> Asset:
    # 4.8 MB, and 1.5 MB compressed, which takes a sixth of a second: once for each process.
    body = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return Asset(_TYPES["js"], body, gzip.compress(body, 6, mtime=0))


def _plotly_folder() -> str:
    return f"plotly-{version('plotly')}"


@cache
def _document(name: str) -> Asset:
    """One of the HTML files, with the folders of what it loads."""
    folder, found = _own()
    body = (
        found[name]
        .plain.replace(b"{{page}}", f"/page/{folder}".encode())
        .replace(b"{{plotly}}", f"/page/{_plotly_folder()}/plotly.min.js".encode())
    )
    return Asset(_TYPES["html"], body, gzip.compress(body, mtime=0))


def _answer(asset: Asset, encodings: str, headers: dict[str, str], status: int = 200) -> Response:
    zipped = "gzip" in encodings
    encoding = {"Content-Encoding": "gzip"} if zipped else {}
    return Response(
        asset.zipped if zipped else asset.plain,
        status_code=status,
        media_type=asset.kind,
        headers=headers | encoding,
    )


@router.get("/")
def page(accept_encoding: Annotated[str, Header()] = "") -> Response:
    """Answer with the page; it asks the API for everything that it shows."""
    return _answer(_document("index.html"), accept_encoding, _DOCUMENT_HEADERS)


@router.get("/page/{folder}/{name:path}")
def page_asset(folder: str, name: str, accept_encoding: Annotated[str, Header()] = "") -> Response:
    """Answer with a file that the page loads."""
    own, found = _own()
    if (folder, name) == (_plotly_folder(), "plotly.min.js"):
        return _answer(_plotly(), accept_encoding, _HEADERS | {"Cache-Control": _FOREVER})
    if name not in found or name.endswith(".html"):
        return Response("There is no such file.", status_code=404, media_type="text/plain")
    # A folder of another release: while replicas are replaced, this file is better than none.
    kept = _FOREVER if folder == own else "no-store"
    return _answer(found[name], accept_encoding, _HEADERS | {"Cache-Control": kept})


def refused_page(accept_encoding: str, headers: dict[str, str]) -> Response:
    """Answer a browser that came without a valid key: how to get one, in a sentence.

    Args:
        accept_encoding: The request's header of that name.
        headers: Further headers: `WWW-Authenticate`, at which the browser asks for a key.
    """
    own = _DOCUMENT_HEADERS | {"Cache-Control": "no-store"}
    return _answer(_document("refused.html"), accept_encoding, own | headers, status=401)
