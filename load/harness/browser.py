"""The system's Chromium, for measurements and tests in a real browser."""

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
    """Return the path of the system's Chromium, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser(executable: str) -> Iterator[Browser]:
    """Run a Chromium that makes no requests but those of its pages."""
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable, args=list(_OPTIONS))
        try:
            yield opened
        finally:
            opened.close()
