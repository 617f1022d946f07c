"""Fixtures for all unit tests."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def process_logging() -> Iterator[None]:
    """Restore the tests' logging after each test, because a test may set up a process's logging."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before
    # Clears the levels that loggers cached.
    root.setLevel(root.level)
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()
