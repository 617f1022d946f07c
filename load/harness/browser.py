"""The system's Chromium, for what is measured and tested in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

_OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--force-color-profile=srgb",
)


def chromium() -> str | None:
    """Where the system's Chromium is."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser(executable: str) -> Iterator[Browser]:
    """A Chromium that calls nobody but whom its pages do."""
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable, args=list(_OPTIONS))
        try:
            yield opened
        finally:
            opened.close()
