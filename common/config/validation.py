"""Messages about pydantic models for people: errors by the path of each field, and field docs."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from doll.yaml_file import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic_core import ErrorDetails

_SHOWN_PROBLEMS = 3


def complaint(
    error: ValidationError,
    *,
    name: Callable[[str], str] = str,
    allowed: Callable[[Sequence[str | int]], list[str]] = lambda _: [],
) -> str:
    """Return what is wrong, in words.

    Args:
        error: Errors that the model found.
        name: Returns the reader's name for the field at a path.
        allowed: Returns the fields that are allowed at a path, for suggestions.
    """
    # A misspelled field is also reported as missing: unknown fields come first.
    errors = _of_unions(error.errors(include_url=False))
    errors.sort(key=lambda details: details["type"] != "extra_forbidden")
    problems = [_problem(details, name, allowed) for details in errors]
    more = len(problems) - _SHOWN_PROBLEMS
    return "; ".join(problems[:_SHOWN_PROBLEMS]) + (f" (and {more} more)" if more > 0 else "")


def problems_of(errors: Sequence[ErrorDetails]) -> list[tuple[str, str]]:
    """Return the path of each field with an error, and what is wrong with it."""
    return [(_path_of(details["loc"]), _said(details)) for details in errors]


def field_names(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Return the names of the fields that are allowed at a path of a model."""
    part = model
    for step in location:
        field = part.model_fields.get(str(step))
        if field is None:
            # The key of a mapping, such as a record's field.
            continue
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                part = kind
    return sorted(field.alias or name for name, field in part.model_fields.items())


def nearest(name: str, known: list[str]) -> str:
    """Suggest the name that an unknown name may stand for; if none is similar, list all."""
    close = difflib.get_close_matches(name, known, n=1)
    return f'did you mean "{close[0]}"?' if close else f"allowed are {', '.join(known)}"


def _of_unions(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Keep, of the errors about a union, those about the form that was meant.

    Pydantic reports errors for each form. The form that was meant has the shape of the input. If no
    form has it, one message names all forms. Pydantic also puts a form's name into the path. The
    name means nothing to the author of the file, so it is removed.
    """
    unions: dict[tuple[str | int, ...], list[ErrorDetails]] = {
        details["loc"][:at]: []
        for details in errors
        for at, part in enumerate(details["loc"])
        if str(part).startswith("constrained-")
    }
    reported: list[ErrorDetails] = []
    for details in errors:
        location = details["loc"]
        starts = (location[:length] for length in range(len(location)))
        unions.get(next((start for start in starts if start in unions), ()), reported).append(
            details
        )
    for place, forms in unions.items():
        deep = len(place) + 1
        meant = [each for each in forms if len(each["loc"]) > deep or each["type"] not in _SHAPES]
        for each in meant:
            each["loc"] = (*place, *each["loc"][deep:])
        if not meant:
            wanted = [_WANTED[each["type"]](each.get("ctx", {})) for each in forms]
            words = " or ".join(dict.fromkeys(each.removeprefix("must be ") for each in wanted))
            first = forms[0]
            first["ctx"] = {"error": f"must be {words}, got {shown(first['input'])}"}
            first["loc"], first["type"] = place, "value_error"
            meant = [first]
        reported += meant
    return reported


def _path_of(location: Sequence[str | int]) -> str:
    """Format a field's path: `records.fields.image.shape[1]`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _problem(
    details: ErrorDetails,
    name: Callable[[str], str],
    allowed: Callable[[Sequence[str | int]], list[str]],
) -> str:
    location = details["loc"]
    field = name(_path_of(location))
    if details["type"] == "extra_forbidden":
        return f'unknown field "{field}" ({nearest(str(location[-1]), allowed(location[:-1]))})'
    # The message of such an error names the field itself.
    if details["type"] == "value_error" and not location:
        return _said(details)
    return f"{field}: {_said(details)}"


def _said(details: ErrorDetails) -> str:
    """Return what is wrong, without the field."""
    kind, context = details["type"], details.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "unknown field"
    # The text is from one of our validators.
    if kind == "value_error":
        return str(context["error"])
    wanted = _WANTED[kind](context) if kind in _WANTED else details["msg"]
    return f"{wanted}, got {shown(details['input'])}"


_WANTED: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda context: f"must be at least {context['ge']}",
    "greater_than": lambda context: f"must be above {context['gt']}",
    "less_than": lambda context: f"must be below {context['lt']}",
    "less_than_equal": lambda context: f"must be at most {context['le']}",
    "int_type": lambda _: "must be a whole number",
    "int_parsing": lambda _: "must be a whole number",
    "bool_parsing": lambda _: "must be true or false",
    "int_from_float": lambda _: "must be a whole number",
    "float_type": lambda _: "must be a number",
    "float_parsing": lambda _: "must be a number",
    "finite_number": lambda _: "must be a finite number",
    "bool_type": lambda _: "must be true or false",
    "string_type": lambda _: "must be text",
    "tuple_type": lambda _: "must be a list",
    "dict_type": lambda _: "must be a mapping of names to values",
    "model_type": lambda _: "must be a mapping of fields to values",
    "too_short": lambda context: f"must have at least {context['min_length']} entries",
    "too_long": lambda context: f"must have at most {context['max_length']} entries",
    "literal_error": lambda context: f"must be {context['expected']}",
}
# Types of errors about inputs that do not even have the expected shape.
_SHAPES = {
    *("float_type", "float_parsing", "int_type", "int_parsing"),
    *("dict_type", "model_type", "tuple_type", "literal_error"),
}


@cache
def descriptions_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a model's fields, by field name, for fields that have one.

    Pydantic could read them when it creates the class, by parsing the source again. That would take
    80 ms of a processor for a job file and the settings at the start of every process, and few
    processes need the docstrings.
    """
    found = dict[str, str]()
    for each in reversed(model.__mro__):
        if issubclass(each, BaseModel) and each is not BaseModel:
            found.update(_written(each))
    return {name: text for name, text in found.items() if name in model.model_fields}


def _written(model: type) -> Iterator[tuple[str, str]]:
    [made] = ast.parse(dedent(inspect.getsource(model))).body
    if not isinstance(made, ast.ClassDef):
        return
    for field, after in pairwise(made.body):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, inspect.cleandoc(text)
