"""Measures training on a GPU: records per second relative to plain PyTorch, hidden copies, faults.

    python -m load.gpu                    # less than 8 minutes; without a GPU, small sizes
    python -m load.gpu --pack .luggage    # packages for a machine that can install none

Exit status 1: a check failed, for example because a record was lost. Missed speeds do not count.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from load.gpus import luggage

PARTS = "training", "copies", "groups", "faults"
MODELS = "cnn", "resnet", "lora"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python -m load.gpu --only training --models cnn --json gpu.json",
    )
    add = found.add_argument
    add("--only", action="append", choices=PARTS, help="part to run, repeatable [default: all]")
    add("--models", nargs="+", choices=MODELS, default=MODELS, help="models of the part `training`")
    add(
        "--seconds",
        type=float,
        default=4.0,
        metavar="S",
        help="length of a block; with the default, all parts together take less than 8 minutes on a"
        " GPU [default: 4]",
    )
    add("--pairs", type=int, default=3, metavar="N", help="pairs of blocks [default: 3]")
    add(
        "--pass-records",
        nargs="+",
        type=int,
        metavar="N",
        help="values of the job option to try, with one pair each and in bfloat16 alone",
    )
    add("--json", type=Path, metavar="FILE", help="file to write the result to")
    add("--luggage", type=Path, metavar="DIR", help="packages of --pack [default: .luggage]")
    add("--pack", type=Path, metavar="DIR", help="only make the folder for --luggage")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    add("--python-version", default=version, help="of the machine for --pack [default: this one's]")
    return found


def main() -> int:
    """Pack, or run the parts, and return the exit status."""
    given = parser().parse_args()
    if given.pack is not None:
        return luggage.pack(given.pack, given.python_version)
    folder: Path = given.luggage or luggage.DEFAULT
    if given.luggage and not folder.is_dir():
        print(f"--luggage: there is no folder {folder}; make it with --pack", file=sys.stderr)
        return 2
    if (given.luggage or folder.exists()) and not luggage.runs_with(folder):
        return luggage.run_with(folder, "load.gpu", sys.argv[1:])
    os.environ |= {
        # The services inherit this: they need the task of the part `training`.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [*map(str, luggage.SOURCES), os.environ.get("PYTHONPATH")])
        ),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    # The packages may have arrived in the luggage.
    from load.gpus.parts import run_parts  # noqa: PLC0415

    given.only = given.only or PARTS
    return run_parts(given)


if __name__ == "__main__":
    sys.exit(main())
