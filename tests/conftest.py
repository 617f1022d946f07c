"""What all tests share: how properties are tried.

They are not timed, for a busy machine is no fault of theirs. In CI they try the same few examples
each time, so that a change is judged by itself; everywhere else they look for new ones, and at
night (`--hypothesis-profile=nightly`) for many.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("nightly", deadline=None, max_examples=300)
settings.load_profile("ci" if "CI" in os.environ else "here")
