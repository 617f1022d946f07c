"""What all tests share: how properties are tried, and what garbage collection leaves alone.

They are not timed, for a busy machine is no fault of theirs. In CI they try the same few examples
each time, so that a change is judged by itself; everywhere else they look for new ones, and at
night (`--hypothesis-profile=nightly`) for many.
"""

from __future__ import annotations

import gc
import os

from hypothesis import settings

from common.telemetry import outages

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("nightly", deadline=None, max_examples=300)
settings.load_profile("ci" if "CI" in os.environ else "here")

gc.disable()  # a quarter of the time of all imports goes into looking for garbage that is not there


def pytest_collection_finish() -> None:
    gc.freeze()  # nor is what was imported looked through again and again
    gc.enable()


def pytest_runtest_setup() -> None:
    outages.forget()  # a test's own processes know of their servers what they meet themselves
