"""Set up hypothesis and the garbage collector for all tests.

Properties have no deadline because a busy machine would exceed it. In CI they try the same few
examples each time, so that a change is judged by itself. Elsewhere they look for new examples, and
at night (`--hypothesis-profile=nightly`) for many.
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

# Imports leave no garbage, and with the collector they would take a third longer.
gc.disable()


def pytest_collection_finish() -> None:
    # The collector never scans the imported modules again.
    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    # Outages that one test causes must not reach the next test in the same process.
    outages.forget()
