"""Docstrings of a model's fields become its descriptions, in the JSON schema, too."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from common.config.synchronisation import SpecPart
from common.config.validation import descriptions_of


class _Base(SpecPart):
    first: int
    """Declared in the base,
    on two lines."""
    again: int
    """Overridden below."""


class _Derived(_Base):
    silent: int
    again: int
    """Here."""
    aliased: Annotated[int, Field(alias="shown")]
    """Has an alias."""
    hidden: int = Field(default=0, exclude=True)
    """Never written."""
    not_a_field: ClassVar = 1
    """Not described."""


def test_description_is_that_of_the_last_declaration() -> None:
    assert descriptions_of(_Derived) == {
        "first": "Declared in the base,\non two lines.",
        "again": "Here.",
        "aliased": "Has an alias.",
        "hidden": "Never written.",
    }


def test_json_schema_has_descriptions_under_its_own_names() -> None:
    read = _Derived.model_json_schema(mode="validation")["properties"]
    written = _Derived.model_json_schema(mode="serialization")["properties"]

    assert {name for name, each in read.items() if "description" in each} == {
        *("first", "again", "shown", "hidden")
    }
    assert {name for name, each in written.items() if "description" in each} == {
        *("first", "again", "shown")
    }
    assert read["again"]["description"] == "Here."
