"""python -m load.paper, or python load/paper: see `command`."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # not where a process that simulates loads this file again
    sys.path.insert(0, str(Path(__file__).parents[2]))  # run by path: this checkout's packages

    from load.paper.command import main

    sys.exit(main())
