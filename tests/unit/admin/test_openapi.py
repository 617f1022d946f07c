"""The OpenAPI document matches the answers to valid and invalid requests of schemathesis."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks

from services.admin.app import create_app
from services.admin.routes.requests import JOB
from services.admin.service import Limits
from tests.changes import has_changed
from tests.unit.admin.conftest import HOST, World

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx2
    from schemathesis import APIOperation
    from schemathesis import Case as AnyCase

    Case: TypeAlias = AnyCase[Any]
    Operation: TypeAlias = APIOperation[Any, Any, Any, Any]

# Examples per route and kind. A few suffice, because they test routes and not pydantic. They are
# the same in each run. Fewer run if neither routes nor their types have changed.
CHANGED = has_changed("common/api/", "common/config/", "common/jobs/", "services/admin/")
EXAMPLES = 8 if CHANGED else 3
ALWAYS = ("400", "401", "403", "413", "422", "429")
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
DOCUMENT = create_app(World().outside).openapi()


def operations() -> dict[str, Operation]:
    """Return all operations of the document by method and path."""
    found = schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
    return {each.ok().label: each.ok() for each in found if isinstance(each, Ok)}


OPERATIONS = operations()
labels = pytest.mark.parametrize("label", OPERATIONS)


@pytest.fixture(scope="module")
def served() -> Iterator[World]:
    """A service with a job and a model, which the requests of all tests change."""
    world = World(limits=Limits(requests_per_s=1e6, simulate_s=0.2))
    world.streams("clinic-a", "clinic-b")
    assert world.ask("POST", "/v1/jobs", json=JOB).status_code == 201
    yield world
    world.close()


def sent(world: World, case: Case, key: str | None = "operator") -> httpx2.Response:
    """Send the bytes that schemathesis generated."""
    asked = requests.Request(**case.as_transport_kwargs(base_url=f"http://{HOST}")).prepare()
    headers = {name: value for name, value in asked.headers.items() if value is not None}
    path = str(asked.url).removeprefix(f"http://{HOST}")
    return world.ask(str(asked.method), path, key=key, headers=headers, content=asked.body)


def compare(world: World, case: Case, *more: Any) -> None:  # noqa: ANN401 -- checks, a class of theirs
    """Send a request, and compare the answer with the document."""
    # The events of an existing job never end.
    if case.path.endswith("/events"):
        case.path_parameters["job"] = "nobody"
    answer = sent(world, case)
    assert answer.status_code < 500, answer.text
    case.validate_response(answer, checks=[*CHECKS, *more])


def bounded(examples: int = EXAMPLES) -> settings:
    """Run a few examples, the same each time."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


@labels
def test_valid_request_gets_a_documented_response(served: World, label: str) -> None:
    operation = OPERATIONS[label]

    @bounded()
    @given(operation.as_strategy(), st.booleans())
    def ask(case: Case, there: bool) -> None:  # noqa: FBT001 -- hypothesis gives it
        if there and "job" in case.path_parameters:
            case.path_parameters["job"] = "digits"
        compare(served, case)

    ask()


@labels
def test_invalid_request_gets_a_documented_response(served: World, label: str) -> None:
    operation = OPERATIONS[label]
    if not takes_anything(operation):
        return

    @bounded()
    @given(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def ask(case: Case) -> None:
        compare(served, case)

    ask()


@labels
def test_documented_examples_are_accepted(served: World, label: str) -> None:
    for strategy in OPERATIONS[label].get_strategies_from_examples():

        @bounded(1)
        @given(strategy)
        def ask(case: Case) -> None:
            compare(served, case)

        ask()


@labels
def test_unauthorized_request_gets_a_documented_response(served: World, label: str) -> None:
    operation = OPERATIONS[label]

    @bounded(1)
    @given(operation.as_strategy())
    def ask(case: Case) -> None:
        for key in (None, "viewer", "doll_x"):
            answer = sent(served, case, key)
            case.validate_response(answer, checks=CHECKS)

    if not label.endswith("/events"):
        ask()


def test_every_route_documents_its_error_responses() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            assert set(ALWAYS) <= operation["responses"].keys(), f"{method} {path}"
            for status, answer in operation["responses"].items():
                if status >= "400":
                    assert list(answer["content"]) == ["application/problem+json"], path


def test_every_operation_has_a_readable_name() -> None:
    names = [each["operationId"] for path in DOCUMENT["paths"].values() for each in path.values()]
    assert len(set(names)) == len(names)
    assert {"create_job", "list_jobs", "get_model", "stream_events"} < set(names)
    assert not [name for name in names if not re.fullmatch("[a-z]+(_[a-z]+)+", name)]


def test_every_request_field_has_its_range() -> None:
    lacking = list[str]()
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            for each in operation.get("parameters", []):
                lacking += boundless(each["schema"], f"{method} {path} {each['name']}")
            for content in operation.get("requestBody", {}).get("content", {}).values():
                lacking += boundless(content["schema"], f"{method} {path}")
    assert not lacking


def test_every_model_field_has_a_description() -> None:
    models = DOCUMENT["components"]["schemas"]
    lacking = [
        f"{name}.{field}"
        for name, model in models.items()
        for field, schema in model.get("properties", {}).items()
        if not described(schema, models)
    ]
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            parameters = operation.get("parameters", [])
            lacking += [
                f"{method} {path} {e['name']}" for e in parameters if "description" not in e
            ]
    assert not lacking


def described(schema: dict[str, Any], models: dict[str, Any]) -> bool:
    """Return True if a field has a description. The description of its model counts, too."""
    model = models.get(schema.get("$ref", "").rpartition("/")[2], {})
    return bool(schema.get("description") or model.get("description"))


def boundless(schema: dict[str, Any], path: str) -> list[str]:
    """Return the request's numbers without a minimum, and its integers without a maximum."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return boundless(DOCUMENT["components"]["schemas"][name], path)
    found = list[str]()
    parts = [*schema.get("anyOf", []), *schema.get("prefixItems", [])]
    parts += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    for part in parts:
        found += boundless(part, path) if isinstance(part, dict) else []
    for name, field in schema.get("properties", {}).items():
        found += boundless(field, f"{path}.{name}")
    kind = schema.get("type")
    if kind in ("integer", "number") and not {"minimum", "exclusiveMinimum"} & schema.keys():
        found.append(f"{path}: no least")
    if kind == "integer" and not {"maximum", "exclusiveMaximum"} & schema.keys():
        found.append(f"{path}: no greatest")
    return found


def takes_anything(operation: Operation) -> bool:
    """Return True if a request of this route has parameters or a body, which can be wrong."""
    return any(True for _ in islice(operation.iter_parameters(), 1)) or bool(operation.body)
