"""Variables that name a file instead of holding a value: so containers get their secrets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from doll.errors import UserError

SUFFIX = "_FILE"
_LARGEST = 1 << 16  # bytes; a chain of certificates has a few thousand


def resolve_files(
    environ: Mapping[str, str], known: Callable[[str], bool]
) -> tuple[dict[str, str], set[str]]:
    """Read the files that variables `<NAME>_FILE` name: each then is the value of `<NAME>`.

    One newline at the end of a file is not part of the value. An empty variable counts as not set.

    Args:
        environ: All variables.
        known: Whether a name is one of ours; what ends in `_FILE` and is known stays as it is.

    Returns:
        Variables with the content of files in place of their names, and those that had one.

    Raises:
        UserError: If a variable is given both ways, or a file holds no value; no value is shown.
    """
    values, from_files = dict(environ), set[str]()
    for variable, path in environ.items():
        name = variable.removesuffix(SUFFIX)
        if name == variable or known(variable) or not known(name) or not path:
            continue
        if environ.get(name):
            raise UserError(f"{name} and {variable} are both set: keep one of them")
        values[name] = _content(variable, path)
        from_files.add(name)
    return values, from_files


def _content(variable: str, path: str) -> str:
    """The value in a file.

    Neither path nor content is ever told: who sets the wrong variable has put the secret there.
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
