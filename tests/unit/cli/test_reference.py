"""docs/reference shows job file, settings and commands as the code defines them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.config.settings import Settings
from common.config.validation import descriptions_of
from common.jobs.spec import JobSpec
from services.cli.reference import documents, models

if TYPE_CHECKING:
    from pydantic import BaseModel

FOLDER = Path(__file__).parents[3] / "docs" / "reference"


@pytest.mark.parametrize("name", ["job-file.md", "settings.md", "cli.md"])
def test_reference_document_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == documents()[name] + "\n", (
        "python -m services.cli.reference"
    )


def test_every_field_has_a_description() -> None:
    found: list[type[BaseModel]] = [Settings, *(model for _, model in models(JobSpec, ""))]
    silent = [
        f"{model.__name__}.{name}"
        for model in found
        for name in model.model_fields
        if not descriptions_of(model).get(name)
    ]
    assert silent == []


def test_every_command_shows_an_example() -> None:
    for section in documents()["cli.md"].split("\n## ")[2:]:
        group = "| argument |" not in section
        assert group or "Example" in section, section.partition("\n")[0]
