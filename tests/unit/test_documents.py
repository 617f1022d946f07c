"""Links in documents point to existing files, folders and headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"""\]\(([^)\s]+)\)|(?:src|href)="([^"]+)\"""")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(path for tree in ("deploy", "docs", "load") for path in (ROOT / tree).rglob("*.md")),
]


def links(document: Path) -> list[str]:
    """Return the targets of a document's links within the repository."""
    found = LINK.findall(FENCED.sub("", document.read_text()))
    return [link for pair in found for link in pair if link and not re.match(r"[a-z]+:", link)]


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_links_point_to_existing_targets(document: Path) -> None:
    for link in links(document):
        target, _, heading = link.partition("#")
        path = document.parent / target if target else document
        assert path.exists(), link
        assert not heading or heading in anchors(path), link


def test_index_names_every_document() -> None:
    index = ROOT / "docs/README.md"
    named = {(index.parent / link).resolve() for link in links(index)}
    shelves = {path for path in DOCUMENTS if path.is_relative_to(index.parent)}
    notes = set((index.parent / "explain/decisions").glob("2*.md"))
    assert shelves - notes - {index} <= named
