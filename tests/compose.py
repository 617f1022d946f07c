"""Reads docker-compose.yml as Compose does: merges anchors, and expands `${NAME:-default}`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docker-compose.yml"
EXAMPLE = ROOT / ".env.example"
# Path at which a container finds its secrets.
SECRETS = "/run/secrets/"
OURS = ("admin", "coordinator", "evaluator", "provisioner", "serve", "worker", "worker-gpu")

_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+):-([^}]*)\})")

# A part of the file. Compose's own schema validates it.
Part = dict[str, Any]


class Bind(NamedTuple):
    """A file or folder of the repository in a container."""

    source: Path
    target: str
    read_only: bool


def composed(environment: Mapping[str, str] | None = None) -> Part:
    """Return the complete file with these variables."""
    filled: Part = _filled(yaml.safe_load(FILE.read_text()), environment or {})
    return filled


def services(environment: Mapping[str, str] | None = None) -> dict[str, Part]:
    """Return the services by name."""
    found: dict[str, Part] = composed(environment)["services"]
    return found


def defaults() -> dict[str, str]:
    """Return all variables of the file with their defaults.

    Raises:
        ValueError: If a variable has two defaults or none.
    """
    text = "\n".join(line.partition("#")[0] for line in FILE.read_text().splitlines())
    found = dict[str, str]()
    for name, default in re.findall(r"\$\{(\w+)(?::-([^}]*))?\}", text):
        if found.setdefault(name, default) != default:
            raise ValueError(f"{name} is {found[name]!r} here and {default!r} there")
    if re.search(r"\$\{\w+[^:\w]|(?<!\$)\$\w", text):
        raise ValueError("a variable has no default")
    return found


def example() -> dict[str, str]:
    """Return the variables of .env.example."""
    lines = EXAMPLE.read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def environment_of(service: Part) -> dict[str, str]:
    """Return the variables of a container."""
    return {name: str(value) for name, value in service.get("environment", {}).items()}


def binds(service: Part) -> list[Bind]:
    """Return the mounts of files of the repository."""
    found = [each.split(":") for each in service.get("volumes", ()) if each.startswith(".")]
    return [Bind(ROOT / source, target, options == ["ro"]) for source, target, *options in found]


def volumes(service: Part) -> list[str]:
    """Return the named volumes that are mounted."""
    return [each.split(":")[0] for each in service.get("volumes", ()) if not each.startswith(".")]


def dependencies(service: Part) -> dict[str, str]:
    """Return the services that this one depends on, with their conditions."""
    return {name: each["condition"] for name, each in service.get("depends_on", {}).items()}


def keys(part: object) -> Iterator[tuple[str, str]]:
    """Yield every key of a part at any depth, with the key above it."""
    yield from _paths(part, "")


def _paths(part: object, above: str) -> Iterator[tuple[str, str]]:
    if isinstance(part, dict):
        for name, value in part.items():
            yield above, name
            yield from _paths(value, name)
    elif isinstance(part, list):
        for value in part:
            yield from _paths(value, above)


def _filled(value: Any, environment: Mapping[str, str]) -> Any:  # noqa: ANN401 -- any YAML
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: found[1] or environment.get(found[2]) or found[3], value)
    if isinstance(value, dict):
        return {key: _filled(each, environment) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, environment) for each in value]
    return value
