"""What all tests share: how properties are tried.

They are not timed, for a busy machine is no fault of theirs. In CI they try the same examples each
time, so that a change is judged by itself; everywhere else they look for new ones.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("doll", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("doll")
