"""The docstrings of a model's fields, which describe them.

Pydantic would read them when it makes the class, by parsing the source again: 80 ms of a processor
for a job's file and the settings, at the start of every process. Few are ever asked for them.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Iterator


@cache
def descriptions_of(model: type[BaseModel]) -> dict[str, str]:
    """What the docstrings of a model's fields say, by the name of each; of those that have one."""
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
