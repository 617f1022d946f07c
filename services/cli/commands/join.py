"""`doll join`: records of two topics become samples, each once."""

from __future__ import annotations

import json
import os
import re
import socket
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from common.errors import UserError
from common.kafka.names import check_stream
from services.cli.system.outside import outside_of

if TYPE_CHECKING:
    from common.joining.machine import Times
    from common.joining.records import JoinSpec

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LONGEST_NAME = 238  # Kafka's 249, less what our own topic's name has besides


def join(  # noqa: PLR0913 -- each is an option of its own
    context: typer.Context,
    *,
    left: Annotated[str, typer.Option(help="The topic of which each record becomes a sample.")],
    right: Annotated[str, typer.Option(help="The topic that says more of them, later.")],
    key: Annotated[
        str,
        typer.Option(
            metavar="PATH[=PATH]", help="What is the same in both; by other names: LEFT=RIGHT."
        ),
    ],
    within: Annotated[
        str, typer.Option(help="The window: a right record is so much later at most, such as 10m.")
    ],
    default: Annotated[
        list[str],
        typer.Option(
            metavar="PATH=VALUE",
            help="A field that the right record adds, and what it is without one; repeatable.",
        ),
    ],
    to: Annotated[str, typer.Option(help="The topic of samples.")],
    joined: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=VALUE", help="What a right record without this field means; repeatable."
        ),
    ] = None,
    before: Annotated[
        str, typer.Option(help="A right record may be so much earlier, as clocks differ.")
    ] = "0s",
    grace: Annotated[
        str,
        typer.Option(help="Records may come so much later than newer ones of their partition."),
    ] = "1m",
    idle: Annotated[
        str, typer.Option(help="A partition that is silent for so long holds nothing up.")
    ] = "1m",
    time: Annotated[
        str,
        typer.Option(
            metavar="PATH[=PATH]",
            help="Where the time of a record is, in both or LEFT=RIGHT.",
            show_default="Kafka's timestamp",
        ),
    ] = "",
    name: Annotated[
        str, typer.Option(help="Of this process, for people.", show_default="the host")
    ] = "",
) -> NoReturn:
    """Join two topics into one of samples: a left join in a window of time, exactly once.

    Each left record becomes one sample, with the first right record of its key in the window, once
    that is over. Runs until it is told to end; started twice, both share the partitions.

    Example: [bold]doll join --left impressions --right clicks --key id --within 10m
    --default label=0 --joined label=1 --to samples[/]
    """
    from msgspec.json import encode

    from common.config.program import command_of
    from common.embedded.services import environment_of
    from common.joining.machine import Times

    settings = outside_of(context).settings
    if settings.embedded_kafka:
        raise UserError("the built-in Kafka forgets what a join goes on from: use a real one")
    options = {"--within": within, "--before": before, "--grace": grace, "--idle": idle}
    ms = {option: _milliseconds(option, text) for option, text in options.items()}
    times = Times(ms["--within"], ms["--before"], ms["--grace"], ms["--idle"] / 1000)
    spec = spec_of((left, right, to), key, time, times, default, joined or [])
    own = name or f"{socket.gethostname()}-{os.getpid()}"
    command = command_of("services.joiner", encode(spec).decode(), own)
    os.execve(command[0], command, environment_of(settings))  # noqa: S606 -- our own program, no shell


def spec_of(
    topics: tuple[str, str, str],
    key: str,
    time: str,
    times: Times,
    defaults: list[str],
    joined: list[str],
) -> JoinSpec:
    """What the options say.

    Raises:
        UserError: If they make no sense.
    """
    from common.data.fields import keys_of
    from common.joining.records import JoinSpec

    for option, topic in zip(("--left", "--right", "--to"), topics, strict=True):
        try:
            check_stream(topic)
        except ValueError as error:
            raise UserError(f"{option}: {error}") from error
    left, right, to = topics
    if len(set(topics)) != len(topics):
        raise UserError("--left, --right, --to: must be three topics")
    if len(to) > _LONGEST_NAME:
        raise UserError(f"--to: {to!r} has more than {_LONGEST_NAME} characters")
    added, meanings = _values("--default", defaults), _values("--joined", joined)
    if len({keys_of(path)[-1] for path in added}) != len(added):
        raise UserError("--default: two paths have the same last key, which names it in a sample")
    if strange := sorted(meanings.keys() - added.keys()):
        raise UserError(f"--joined: {strange[0]} has no --default")
    left_key, right_key = _two("--key", key)
    left_time, right_time = _two("--time", time) if time else ("", "")
    return JoinSpec(
        left, right, to, left_key, right_key, times, added, meanings, left_time, right_time
    )


def _two(option: str, given: str) -> tuple[str, str]:
    """A path for each side."""
    left, separator, right = given.partition("=")
    paths = left, right if separator else left
    for path in paths:
        _checked(option, path)
    return paths


def _values(option: str, given: list[str]) -> dict[str, str]:
    """JSON by path; what is no JSON is a text."""
    found = dict[str, str]()
    for each in given:
        path, separator, value = each.partition("=")
        if not separator:
            raise UserError(f"{option}: must be PATH=VALUE, such as label=0, got {each!r}")
        _checked(option, path)
        try:
            json.loads(value, parse_constant=_refused)
        except ValueError:
            value = json.dumps(value)
        found[path] = value
    return found


def _refused(constant: str) -> NoReturn:
    raise ValueError(constant)


def _checked(option: str, path: str) -> None:
    from common.data.fields import keys_of

    try:
        keys_of(path)
    except ValueError as error:
        raise UserError(f"{option}: {error}, got {path!r}") from error


def _milliseconds(option: str, text: str) -> int:
    found = re.fullmatch(r"(\d{1,12})(ms|s|m|h|d)", text)
    if not found:
        raise UserError(f"{option}: must be a time such as 500ms, 30s, 10m, 2h or 7d, got {text!r}")
    return int(found[1]) * _UNITS_MS[found[2]]
