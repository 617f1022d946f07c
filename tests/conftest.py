"""What all tests share: properties are not timed, for a busy machine is no fault of theirs."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("doll", deadline=None)
settings.load_profile("doll")
