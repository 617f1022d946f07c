"""The live page's files are complete, need a key, are cached for ever, and are never mixed."""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.admin.conftest import World


def links(world: World) -> list[str]:
    """Return the files that the page's HTML loads."""
    answer = world.ask("GET", "/", key="viewer")
    assert answer.status_code == 200
    return re.findall(r'(?:href|src|content)="(/[^"]*)"', answer.text)


def modules(world: World, imports: str) -> set[str]:
    """Return the page's main module and all modules that it imports.

    Args:
        world: The service.
        imports: Pattern of an import.
    """
    (main,) = {path for path in links(world) if path.endswith("/main.js")}
    seen, left = set[str](), [main]
    while left:
        path = left.pop()
        seen.add(path)
        answer = world.ask("GET", path, key="viewer")
        assert answer.status_code == 200, path
        for found in re.findall(imports, answer.text):
            steps = f"{path.rpartition('/')[0]}/{found}".replace("/./", "/")
            steps = re.sub(r"/[^/]+/\.\./", "/", steps)
            left += [steps] if steps not in seen else []
    return seen


def test_page_files_exist_and_are_cached_forever(world: World) -> None:
    loaded = links(world)

    assert f"/page/plotly-{version('plotly')}/plotly.min.js" in loaded
    for path in loaded:
        answer = world.ask("GET", path, key="viewer")
        assert answer.status_code == 200, path
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.content


def test_page_preloads_exactly_the_modules_of_the_job_list(world: World) -> None:
    preloaded = {path for path in links(world) if path.endswith(".js") and "plotly" not in path}

    assert modules(world, r'from "(\.[^"]+)"') == preloaded


def test_client_without_gzip_gets_the_plain_file(world: World) -> None:
    (path,) = {path for path in links(world) if path.endswith("/main.js")}

    answer = world.ask("GET", path, key="viewer", headers={"Accept-Encoding": "identity"})

    assert "content-encoding" not in answer.headers
    assert answer.content == (files("services.admin.page") / "main.js").read_bytes()


def test_page_modules_import_only_existing_files(world: World) -> None:
    (main,) = {path for path in links(world) if path.endswith("/main.js")}
    seen = modules(world, r'(?:from |import\()"(\.[^"]+)"')

    found = {each.name for each in files("services.admin.page").iterdir()}
    assert all(path.startswith(main.removesuffix("/main.js")) for path in seen)
    assert {"api.js", "live.js", "store.js"} <= found & {path.rpartition("/")[2] for path in seen}


def test_page_has_a_strict_content_security_policy_and_is_not_cached(world: World) -> None:
    headers = world.ask("GET", "/", key="viewer").headers
    policy = dict(each.split(" ", 1) for each in headers["content-security-policy"].split("; "))

    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert headers["cache-control"] == "private, no-cache"
    assert headers["referrer-policy"] == "no-referrer"


def test_file_of_another_release_is_served_but_not_cached(world: World) -> None:
    answer = world.ask("GET", "/page/0123456789abcdef/api.js", key="viewer")

    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "name", ["", "no.js", "index.html", "__init__.py", "%2e%2e/gate.py", "views"]
)
def test_unknown_page_file_is_not_served(world: World, name: str) -> None:
    (main,) = {path for path in links(world) if path.endswith("/main.js")}

    assert world.ask("GET", main.replace("main.js", name), key="viewer").status_code in (404, 405)


@pytest.mark.parametrize("path", ["/", "/page/x/main.js"])
def test_page_files_need_a_key(world: World, path: str) -> None:
    assert world.ask("GET", path, key=None).status_code == 401


def test_browser_without_a_key_gets_an_explanation(world: World) -> None:
    answer = world.ask("GET", "/", key="wrong", headers={"Accept": "text/html,*/*"})

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert answer.headers["content-type"].startswith("text/html")
    assert "doll key create" in answer.text
    assert answer.headers["cache-control"] == "no-store"
