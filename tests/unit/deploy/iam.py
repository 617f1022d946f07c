"""Decides if policies allow a request, by the part of AWS's rules that our policies use."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

# Value of a condition's key. None: the request lacks the key.
Value = str | tuple[str, ...] | None


class Request(NamedTuple):
    """A request to access management. A call makes several, one for each kind of resource."""

    action: str
    resource: str
    context: Mapping[str, str | tuple[str, ...]] = {}


@dataclass(frozen=True)
class Policy:
    """A policy with only Allow statements."""

    statements: tuple[dict[str, Any], ...]
    used: set[tuple[int, str, str]] = field(default_factory=set)  # statement, action, resource

    def allows(self, request: Request) -> bool:
        """Return True if a statement allows the request. Record that statement in `used`."""
        found = False
        for number, statement in enumerate(self.statements):
            for action in listed(statement["Action"]):
                for resource in listed(statement["Resource"]):
                    if (
                        action == request.action
                        and fnmatchcase(request.resource, resource)
                        and _holds(statement.get("Condition", {}), request.context)
                    ):
                        self.used.add((number, action, resource))
                        found = True
        return found

    def grants(self) -> Iterator[tuple[int, str, str]]:
        """Return everything that the policy allows, in the form of `used`."""
        for number, statement in enumerate(self.statements):
            for action in listed(statement["Action"]):
                for resource in listed(statement["Resource"]):
                    yield number, action, resource


def read_policy(path: Path) -> Policy:
    """Read a policy, and check its form."""
    document = json.loads(path.read_text())
    assert set(document) == {"Version", "Statement"}
    assert document["Version"] == "2012-10-17"
    for statement in document["Statement"]:
        assert set(statement) <= {"Sid", "Effect", "Action", "Resource", "Condition"}
        assert statement["Sid"].isalnum()
        assert statement["Effect"] == "Allow"
        assert set(statement.get("Condition", {})) <= set(_OPERATORS), "a condition that we know"
        for action in listed(statement["Action"]):
            assert "*" not in action
    return Policy(tuple(document["Statement"]))


def listed(value: str | list[str]) -> list[str]:
    """Return one or several values as AWS writes them."""
    return [value] if isinstance(value, str) else value


def _like(value: Value, patterns: Sequence[str]) -> bool:
    return isinstance(value, str) and any(fnmatchcase(value, each) for each in patterns)


def _equal(value: Value, wanted: Sequence[str]) -> bool:
    return isinstance(value, str) and value in wanted


def _all_like(value: Value, patterns: Sequence[str]) -> bool:
    return isinstance(value, tuple) and all(_like(each, patterns) for each in value)


def _missing(value: Value, wanted: Sequence[str]) -> bool:
    return ("true" if value is None else "false") in wanted


def _like_if_there(value: Value, patterns: Sequence[str]) -> bool:
    return value is None or _like(value, patterns)


_OPERATORS: Mapping[str, Callable[[Value, Sequence[str]], bool]] = {
    "StringEquals": _equal,
    "ArnEquals": _like,  # AWS accepts patterns here, too
    "Null": _missing,
    "ForAllValues:StringLike": _all_like,
    "StringLikeIfExists": _like_if_there,
}


def _holds(
    condition: Mapping[str, Mapping[str, str | list[str]]],
    context: Mapping[str, str | tuple[str, ...]],
) -> bool:
    return all(
        _OPERATORS[operator](context.get(key), listed(wanted))
        for operator, keys in condition.items()
        for key, wanted in keys.items()
    )
