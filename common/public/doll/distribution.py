"""Finds the distribution `doll`: its packages `common` and `services`, and its command.

A user may have folders of these names in the working directory or on PYTHONPATH. So `load` first
looks beside this package, where `doll` is installed, or in a checkout two folders above.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_PLACES = map(str, Path(__file__).parents[1:4:2])
_ROOT = next((place for place in _PLACES if Path(place, "services", "cli").is_dir()), "")


def load(module: str) -> ModuleType:
    """Import a module of the distribution `doll`.

    Raises:
        ImportError: If `doll` is not installed, or a user's package of the same name was imported.
    """
    package = module.partition(".")[0]
    if not _ROOT:
        raise ImportError(
            "this is part of the distribution `doll`, which is not installed; `doll-client` has"
            " only the client"
        )
    sys.path.insert(0, _ROOT)
    try:
        found = import_module(package)
        if found.__file__ is None or not Path(found.__file__).is_relative_to(_ROOT):
            raise ImportError(
                f"{package!r} is a package of DOLL, but {found.__file__} was imported under that"
                " name; rename your package"
            )
        return import_module(module)
    finally:
        sys.path.remove(_ROOT)


def main() -> None:
    """Run the command `doll`."""
    # Imports and help make no garbage. A command that runs enables collection.
    gc.disable()
    load("services.cli.__main__").main()
