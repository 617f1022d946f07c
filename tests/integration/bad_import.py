"""A module of a task that cannot be imported, though it is there and listed."""

from __future__ import annotations

raise RuntimeError("the task's package needs a licence file")
