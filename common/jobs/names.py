"""How a person may name a job or an API key: the name becomes part of topics and addresses."""

from __future__ import annotations

import re

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


def check_name(value: str) -> str:
    """Return a legal name as it is.

    Raises:
        ValueError: If it is none; says what one is made of.
    """
    if not _NAME.fullmatch(value):
        raise ValueError(
            "must be 1 to 100 lower case letters, digits, '.', '_' or '-' and begin with a letter"
            f" or digit, got {value!r}"
        )
    return value
