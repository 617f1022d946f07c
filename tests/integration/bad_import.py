"""A listed task's module that exists, but raises at its import."""

from __future__ import annotations

raise RuntimeError("the task's package needs a licence file")
