"""The command as a whole: help with examples, settings from options, one-line errors."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib.metadata import version
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from common.jobs.servers import Outside
from common.redis.memory import MemoryBoard
from services.cli import exits
from services.cli.app import app
from services.cli.commands import produce
from services.cli.system.outside import Ways

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.config.settings import Settings
    from tests.unit.cli.conftest import World

COMMANDS = [
    ("plan",),
    ("simulate",),
    ("produce",),
    ("audit",),
    ("model", "pull"),
    ("key", "list"),
    *(
        ("job", command)
        for command in ("submit", "list", "show", "watch", "pause", "resume", "stop")
    ),
]


# Modules that are slow to import, and others that `--help` does not need.
HEAVY = (
    *("torch", "numpy", "scipy", "matplotlib", "confluent_kafka", "redis", "boto3", "fastapi"),
    *("httpx2", "msgspec", "structlog", "rich.live", "common.jobs", "common.core"),
)
PEEK = f"""
import sys
from typer.testing import CliRunner
from services.cli.app import app
from services.cli.system.outside import Ways
for command in sys.argv[1:]:
    result = CliRunner().invoke(app, [*command.split(), "--help"], obj=Ways(None))
    assert "sage: " in result.stdout and not result.exit_code, (command, result.output)
    print(command, [name for name in {HEAVY!r} if name in sys.modules])
"""


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_each_command_has_an_example(world: World, command: tuple[str, ...]) -> None:
    text = world.run(*command, "--help").stdout
    assert f"Example: doll {' '.join(command)}" in text


def paths(command: Any, *before: str) -> Iterator[str]:  # noqa: ANN401 -- typer's classes have no public names
    yield " ".join(before)
    for name, inner in getattr(command, "commands", {}).items():
        yield from paths(inner, *before, name)


def test_help_paragraphs_are_as_wide_as_the_terminal(world: World) -> None:
    shown = {line.strip() for line in world.run("produce", "--help").stdout.splitlines()}
    first, second, *_ = cleandoc(produce.produce.__doc__ or "").split("\n\n")
    # The source's line breaks are kept.
    assert "\n" in second
    assert {first, second.replace("\n", " ")} < shown


def test_help_does_not_import_what_only_commands_need() -> None:
    commands = [*paths(get_command(app))]
    assert {"", "job submit", "demo", "worker"} < set(commands)

    answered = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", PEEK, *commands],
        env=os.environ | {"DOLL_KAFKA_": "help is there with settings that make no sense"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert answered.stdout.splitlines() == [f"{command} []" for command in commands]


def test_running_command_enables_garbage_collection(world: World) -> None:
    # `doll` disables garbage collection while it imports modules.
    gc.disable()
    try:
        world.run("job", "list")
        assert gc.isenabled()
    finally:
        gc.enable()


def test_version_option_prints_the_version(world: World) -> None:
    assert world.run("--version").stdout == f"doll {version('doll')}\n"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("doll job su", "submit"), ("doll ke", "key"), ("doll --vers", "--version")],
)
def test_shell_completion_finds_commands_and_options(typed: str, completed: str) -> None:
    asked = {"_DOLL_COMPLETE": "complete_bash", "COMP_WORDS": typed}
    asked |= {"COMP_CWORD": str(typed.count(" "))}
    answered = CliRunner().invoke(app, [], prog_name="doll", obj=Ways(_connect_none), env=asked)
    assert answered.stdout.split() == [completed]


def _connect_none(_: Settings) -> Outside:
    raise AssertionError("nothing is opened for a completion")


def test_options_take_precedence_over_the_environment(world: World) -> None:
    seen = list["Settings"]()

    def connect(settings: Settings) -> Outside:
        seen.append(settings)
        return Outside(
            settings,
            lambda: world.log,
            lambda job: MemoryBoard(world.redis, job),
            lambda: world.blobs,
        )

    environment = {"DOLL_KAFKA": "from-environment:1", "DOLL_REDIS": "redis://environment"}
    environment["DOLL_API_KEY_FILE"] = "/run/secrets/key"
    options = ["--kafka", "from-option:2", "--api-key", "mine"]
    CliRunner().invoke(app, [*options, "key", "list"], obj=Ways(connect), env=environment)
    assert (seen[0].kafka, seen[0].redis, seen[0].api_key) == (
        "from-option:2",
        "redis://environment",
        "mine",
    )


def test_invalid_option_value_is_reported_with_its_setting(world: World) -> None:
    result = world.run("--api", "models", "job", "list", code=exits.REFUSED)
    assert result.stderr.startswith("error: DOLL_API: must be ")


def test_wrong_command_line_returns_the_usage_status(world: World) -> None:
    world.run("job", "sumbit", code=exits.USAGE)
    world.run("produce", "digits", code=exits.USAGE)


def test_unavailable_server_is_reported_in_one_line_with_a_remedy(world: World) -> None:
    world.log.go_away()
    for option, *command in (
        ("--api", "job", "list"),
        ("--kafka", "audit", "digits"),
        ("--api", "job", "watch", "digits"),
    ):
        result = world.run(*command, code=exits.UNAVAILABLE)
        assert result.stderr.startswith("error: ")
        assert f"use {option} to name another server)" in result.stderr
        assert result.stderr.count("\n") == 1
