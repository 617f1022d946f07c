"""`doll key`: a key is shown once to its creator and never again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from common.api.keys import Keys, KeyStore
from common.jobs.changes import local_user
from services.cli import exits

if TYPE_CHECKING:
    from tests.unit.cli.conftest import World


def role_of(world: World, key: str) -> str | None:
    record = Keys(KeyStore(world.log).read().values()).role_of(key)
    return None if record is None else record.role


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_create_prints_only_the_key_to_stdout_and_the_key_is_valid(world: World, role: str) -> None:
    made = world.run("key", "create", "page", "--role", role)
    key = made.stdout.removesuffix("\n")
    assert role_of(world, key) == role
    assert "Authorization: Bearer" in made.stderr
    assert key not in made.stderr


def test_list_shows_neither_keys_nor_their_hashes(world: World) -> None:
    key = world.run("key", "create", "page", "--role", "viewer", "--note", "the [red]wall").stdout
    world.run("key", "create", "ci", "--role", "operator")
    listed = world.run("key", "list").stdout
    first, second = listed.splitlines()[1:]
    assert first.split()[:2] == ["ci", "operator"]
    assert second.split()[:2] == ["page", "viewer"]
    assert "the [red]wall" in second
    assert key.strip() not in listed
    output = world.run("key", "list", "--json").stdout
    assert [(each["name"], each["role"]) for each in json.loads(output)] == [
        *(("ci", "operator"), ("page", "viewer")),
    ]
    listed += output
    assert not any(record.sha256[:8] in listed for record in KeyStore(world.log).read().values())


def test_list_shows_who_created_and_revoked_a_key(world: World) -> None:
    world.run("key", "create", "page", "--role", "viewer")
    world.run("key", "create", "ci", "--role", "viewer")
    world.run("key", "revoke", "page")
    me = local_user().name
    ci, page = world.run("key", "list").stdout.splitlines()[1:]
    assert ci.split()[:2] == ["ci", "viewer"]
    assert ci.split()[3:] == [me]
    assert page.split()[3] == me
    assert page.split()[-2:] == ["by", me]
    keys = json.loads(world.run("key", "list", "--json").stdout)
    assert [each["valid"] for each in keys] == [True, False]
    assert [each["action"] for each in keys[1]["changes"]] == ["created", "revoked"]


def test_empty_list_explains_how_to_create_a_key(world: World) -> None:
    assert "`doll key create NAME --role viewer`" in world.run("key", "list").stdout


def test_revoked_key_is_invalid(world: World) -> None:
    key = world.run("key", "create", "page", "--role", "viewer").stdout.strip()
    assert world.run("key", "revoke", "page").stdout == 'key "page" is revoked\n'
    assert role_of(world, key) is None
    missing = world.run("key", "revoke", "page", code=exits.REFUSED)
    assert 'there is no key "page"' in missing.stderr


def test_create_with_a_used_name_is_rejected(world: World) -> None:
    key = world.run("key", "create", "page", "--role", "viewer").stdout.strip()
    again = world.run("key", "create", "page", "--role", "operator", code=exits.REFUSED)
    assert again.stdout == ""
    assert 'there is already a key "page"' in again.stderr
    assert role_of(world, key) == "viewer"


def test_create_needs_a_valid_role(world: World) -> None:
    assert "--role" in world.run("key", "create", "page", code=2).stderr
    assert "viewer" in world.run("key", "create", "page", "--role", "owner", code=2).stderr
    assert KeyStore(world.log).read() == {}


@pytest.mark.parametrize("command", ["create", "list", "revoke"])
def test_help_has_an_example(world: World, command: str) -> None:
    assert f"Example: doll key {command}" in world.run("key", command, "--help").stdout
