"""`doll join` becomes the joiner that its options describe, or says which makes no sense."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import pytest

from common.joining.machine import Times
from common.joining.records import JoinSpec
from services.cli import exits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.unit.cli.conftest import World

OPTIONS = {
    "--left": "impressions",
    "--right": "clicks",
    "--key": "id",
    "--within": "10m",
    "--default": "label=0",
    "--to": "samples",
}


def command(**changes: str) -> list[str]:
    given = OPTIONS | {f"--{name}": value for name, value in changes.items()}
    return ["join", *(part for option in given.items() for part in option)]


def test_options_are_what_the_joiner_gets(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Sequence[str]]()

    def become(_path: str, command: Sequence[str], _environ: Mapping[str, str]) -> None:
        started.append(command)

    monkeypatch.setattr(os, "execve", become)
    world.run(*command(name="j1"))
    world.run(
        *command(key="payload.id=of", within="7d", before="500ms", grace="1h", idle="30s"),
        *("--time", "at=payload.at", "--default", "payload.after.how=none", "--joined", "label=1"),
    )

    *_, spec, name = started[0]
    assert name == "j1"
    assert msgspec.json.decode(spec, type=JoinSpec) == JoinSpec(
        *("impressions", "clicks", "samples", "id", "id"),
        Times(600_000, 0, 60_000, 60.0),
        {"label": "0"},
        {},
    )
    assert msgspec.json.decode(started[1][-2], type=JoinSpec) == JoinSpec(
        *("impressions", "clicks", "samples", "payload.id", "of"),
        Times(7 * 86_400_000, 500, 3_600_000, 30.0),
        {"label": "0", "payload.after.how": '"none"'},
        {"label": "1"},
        *("at", "payload.at"),
    )


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"within": "10"}, "--within: must be a time such as 500ms, 30s, 10m, 2h or 7d, got '10'"),
        ({"left": "doll.x"}, "--left: 'doll.x': names with doll. are reserved"),
        ({"to": "clicks"}, "--left, --right, --to: must be three topics"),
        ({"to": "s" * 239}, "has more than 238 characters"),
        ({"key": "a..b"}, "--key: must be keys with dots between them"),
        ({"default": "label"}, "--default: must be PATH=VALUE, such as label=0, got 'label'"),
        ({"joined": "labl=1"}, "--joined: labl has no --default"),
    ],
)
def test_what_makes_no_sense_is_refused(
    world: World, changes: dict[str, str], refusal: str
) -> None:
    assert refusal in world.run(*command(**changes), code=exits.REFUSED).stderr


def test_two_defaults_of_one_name_and_the_built_in_kafka_are_refused(world: World) -> None:
    twice = world.run(*command(), "--default", "payload.label=1", code=exits.REFUSED)
    assert "--default: two paths have the same last key" in twice.stderr
    built_in = world.run("--kafka", "embedded:/nowhere", *command(), code=exits.REFUSED)
    assert "the built-in Kafka forgets what a join goes on from" in built_in.stderr
