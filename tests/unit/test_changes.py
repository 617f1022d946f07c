"""Slow tests run outside the nightly run only after a change of a file that they test."""

from __future__ import annotations

import pytest

from tests import changes
from tests.changes import changed_files, has_changed, marks_of, once_changed


@pytest.mark.parametrize("since", ["", "no-such-commit"])
def test_everything_counts_as_changed_without_a_known_commit(
    monkeypatch: pytest.MonkeyPatch, since: str
) -> None:
    monkeypatch.setenv("TEST_SINCE", since)
    assert changed_files() is None
    assert has_changed("common/core/")


@pytest.mark.parametrize(
    ("changed", "waits"),
    [("common/core/leader.py", False), ("constraints.txt", False), ("common/wire/sums.py", True)],
)
def test_once_changed_runs_a_test_only_after_a_relevant_change(
    monkeypatch: pytest.MonkeyPatch, changed: str, *, waits: bool
) -> None:
    monkeypatch.setattr(changes, "changed_files", lambda: frozenset({changed}))

    @once_changed("common/core/", "common/spot/policies/")
    def looked_at() -> None:
        pass

    marks = [mark.name for mark in getattr(looked_at, "pytestmark", ())]
    assert marks == ["nightly"] * waits
    assert [each.name for each in marks_of("common/core/", "common/spot/policies/")] == marks
