"""Environment variables `<NAME>_FILE` that name a file with the value, as containers use them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from doll.errors import UserError

SUFFIX = "_FILE"
# Largest file in bytes. A chain of certificates has a few thousand.
_LARGEST = 1 << 16


def resolve_files(
    environ: Mapping[str, str], known: Callable[[str], bool]
) -> tuple[dict[str, str], set[str]]:
    """Replace variables `<NAME>_FILE` by `<NAME>` with the content of the file.

    One newline at the end of a file is not part of the value. An empty variable counts as not set.

    Args:
        environ: All variables.
        known: Returns True for a variable of DOLL. A known variable that ends in `_FILE` is not
            replaced.

    Returns:
        All variables with their values, and the names of those that were read from files.

    Raises:
        UserError: If `<NAME>` and `<NAME>_FILE` are both set, or a file has no valid value. The
            message contains no value.
    """
    values, from_files = dict(environ), set[str]()
    for variable, path in environ.items():
        name = variable.removesuffix(SUFFIX)
        if name == variable or known(variable) or not known(name) or not path:
            continue
        if environ.get(name):
            raise UserError(f"{name} and {variable} are both set; remove one of them")
        values[name] = _content(variable, path)
        from_files.add(name)
    return values, from_files


def _content(variable: str, path: str) -> str:
    """Return the value in a file.

    Errors show neither the path nor the content: a user who sets the wrong variable has put the
    secret where the path belongs.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_LARGEST + 1)
    except (OSError, ValueError) as error:
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number else "not a valid path"
        raise UserError(f"{variable}: the file cannot be read: {reason}") from None
    if len(data) > _LARGEST:
        raise UserError(f"{variable}: the file is larger than {_LARGEST} bytes")
    try:
        value = data.decode()
    except UnicodeDecodeError:
        raise UserError(f"{variable}: the file is not UTF-8 text") from None
    value = value.removesuffix("\r\n" if value.endswith("\r\n") else "\n")
    if not value or "\0" in value:
        raise UserError(f"{variable}: the file is {'not text' if value else 'empty'}")
    return value
