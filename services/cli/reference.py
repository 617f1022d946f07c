"""Writes the references of docs/ from the code: `python -m services.cli.reference`.

The job file comes from `JobSpec`, the settings from `Settings`, and the commands from `doll`
itself.
"""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from common.config.settings import Settings
from common.config.validation import descriptions_of
from common.jobs.spec import JobSpec
from services.cli.app import app

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_BY = "Printed by `python -m services.cli.reference`; a test holds them together."
_JOB_FILE = f"""\
# Job file

{_BY}

YAML or JSON; `doll job submit FILE` and `POST /v1/jobs` read the same. What is not listed is
refused by name. [Your topics](../start/your-topics.md) and [your task](../start/your-task.md) have
examples."""
_SETTINGS = f"""\
# Settings

{_BY}

Of every process, from its environment. With `_FILE` behind its name a variable names a file that
holds the value. An unknown `DOLL_` variable is refused with the nearest name."""
_COMMANDS = f"""\
# Commands

{_BY}

`doll --help` says the same. Exit codes: 0 done; 1 a fault of ours; 2 the command line is wrong;
3 what was asked makes no sense; 4 a server is unavailable; 5 an audit found a gap, an overlap or a
batch used twice; 6 it found nothing wrong, but records that it needs are gone."""
_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def documents() -> dict[str, str]:
    """Return each document's text, by its name in docs/reference."""
    return {
        "job-file.md": "\n".join(_job_file()),
        "settings.md": "\n".join(_settings()),
        "cli.md": "\n".join(_commands()),
    }


def _job_file() -> Iterator[str]:
    yield _JOB_FILE
    yield from chain.from_iterable(_section(model, path) for path, model in models(JobSpec, ""))


def models(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield a model and those of its fields, with the path of each in a job file."""
    yield path, model
    for name, field in model.model_fields.items():
        for inner in _parts(field.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                below = f"{path}{name}.*." if _is_mapping(field.annotation) else f"{path}{name}."
                yield from models(inner, below)


def _section(model: type[BaseModel], path: str) -> Iterator[str]:
    title = f"`{path.rstrip('.')}`" if path else "The job"
    yield from ("", f"## {title}", "", (model.__doc__ or "").partition("\n")[0], "")
    yield from ("| field | value | default | means |", "| --- | --- | --- | --- |")
    described = descriptions_of(model)
    for name, field in model.model_fields.items():
        shown, means = field.alias or name, _cell(described[name])
        yield f"| `{shown}` | {_value(field)} | {_default(field)} | {means} |"
    if model.model_config.get("extra") == "allow":
        yield "| any other | | | an option of the task |"


def _settings() -> Iterator[str]:
    yield _SETTINGS
    yield from ("", "| variable | value | default | means |", "| --- | --- | --- | --- |")
    described = descriptions_of(Settings)
    for name, field in Settings.model_fields.items():
        variable = "DOLL_" + name.upper() + ("_*" if field.annotation == dict[str, str] else "")
        yield f"| `{variable}` | {_value(field)} | {_default(field)} | {_cell(described[name])} |"


def _value(field: FieldInfo) -> str:
    """Describe the values of a field in words."""
    limits = [_limit(each) for each in [*field.metadata, *_metadata(field.annotation)]]
    return ", ".join([_kind(field.annotation), *filter(None, limits)]).replace("|", "\\|")


def _kind(annotation: Any) -> str:  # noqa: ANN401 -- annotations have no common type
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        several = [part for part in get_args(annotation) if part is not type(None)]
        return ", ".join(dict.fromkeys(map(_kind, several)))
    parts = _parts(annotation)
    if get_origin(annotation) is tuple:
        return f"list of {_kind(get_args(annotation)[0])}"
    if _is_mapping(annotation):
        return "mapping"
    if all(isinstance(part, type) and issubclass(part, BaseModel) for part in parts):
        return "block below"
    return ", ".join(_WORDS[p] if isinstance(p, type) else f"`{p}`" for p in parts)


def _is_mapping(annotation: Any) -> bool:  # noqa: ANN401 -- annotations have no common type
    return get_origin(annotation) is dict


def _parts(annotation: Any) -> list[Any]:  # noqa: ANN401 -- annotations have no common type
    """Return the types and literals that an annotation allows."""
    origin = get_origin(annotation)
    if origin is Annotated or origin is tuple:
        return _parts(get_args(annotation)[0])
    if origin is Literal:
        return list(get_args(annotation))
    if origin is dict:
        return _parts(get_args(annotation)[1])
    if origin in (Union, types.UnionType):
        return [part for each in get_args(annotation) for part in _parts(each)]
    return [annotation]


def _metadata(annotation: Any) -> list[Any]:  # noqa: ANN401 -- annotations have no common type
    if get_origin(annotation) in (Union, types.UnionType):
        return [each for part in get_args(annotation) for each in _metadata(part)]
    if get_origin(annotation) is Annotated:
        inner = [each for field in get_args(annotation)[1:] for each in field.metadata]
        return [*inner, *_metadata(get_args(annotation)[0])]
    return []


def _limit(constraint: object) -> str:
    for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        bound = getattr(constraint, name, None)
        if bound is not None:
            return "" if abs(bound) >= 2**31 - 1 else f"{sign} {bound:g}"
    return ""


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    default = field.default
    if isinstance(default, BaseModel):
        return "as below"
    if default in (None, "", (), {}):
        return ""
    return f"`{json.dumps(default)}`" if not isinstance(default, str) else f"`{default}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _commands() -> Iterator[str]:
    yield _COMMANDS
    command = typer.main.get_command(app)
    yield from _command(command, command.make_context("doll", [], resilient_parsing=True))


def _command(command: Any, context: Any) -> Iterator[str]:  # noqa: ANN401 -- typer's classes have no public names
    yield from ("", f"## `{context.command_path}`", "", *_help(command), "")
    parameters = [each for each in command.get_params(context) if each.name != "help"]
    if parameters:
        yield from ("| argument | default | means |", "| --- | --- | --- |")
        yield from (_row(each) for each in parameters)
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command(inner, type(context)(inner, info_name=name, parent=context))


def _help(command: Any) -> Iterator[str]:  # noqa: ANN401 -- typer's classes have no public names
    help_text = (command.help or "").replace("[bold]", "`").replace("[/]", "`")
    for line in chain.from_iterable(
        wrap(each, 96, break_on_hyphens=False) or [""] for each in help_text.splitlines()
    ):
        yield line.strip()


def _row(parameter: Any) -> str:  # noqa: ANN401 -- likewise
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = f"`{(parameter.name or '').upper()}`"
    shown = "" if parameter.default in (None, "", False, ()) else f"`{parameter.default}`"
    if isinstance(described := getattr(parameter, "show_default", None), str):
        shown = described
    text = getattr(parameter, "help", "") or ""
    return f"| {names} | {'required' if parameter.required else shown} | {_cell(text)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m services.cli.reference",
        description="Writes job-file.md, settings.md and cli.md.",
        epilog="example: python -m services.cli.reference --out docs/reference",
    )
    parser.add_argument("--out", type=Path, default=Path("docs/reference"), help="[%(default)s]")
    folder: Path = parser.parse_args().out
    for document, text in documents().items():
        (folder / document).write_text(text + "\n")
