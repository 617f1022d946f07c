"""Reproduces section V of the paper by simulation: figures 3 to 5, Table II, and extensions.

    python -m load.paper                     # everything, into docs/explain/paper: some minutes
    python -m load.paper --quick             # twelve runs of fewer settings, into out/paper
    python -m load.paper --only traces       # one part again; the others stay as they are
    python -m load.paper --only markets --json out/markets.json --prices my-prices

Needs no servers and no cloud: it simulates the paper's update process in virtual time, under the
policies of common/spot/theory. Exit status: 0 if all is well; 1 if a requirement is missed; 2 on
bad input.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[2]))

from common.errors import UserError
from load.paper import accuracy, equations, figures, markets, policies, recorded, updates_law
from load.paper.document import Section, write, write_json
from load.paper.runner import FEW, Asked, Runner

_ROOT = Path(__file__).parents[2]
_DATA = _ROOT.parent / "shared" / "data"
_OUT, _QUICK_OUT = _ROOT / "docs/explain/paper", _ROOT / "out" / "paper"
_RUNS, _PROCESSES = 200, 2

PARTS: Mapping[str, Callable[[Runner], Section]] = {
    "figures": figures.run,
    "policies": policies.run,
    "traces": recorded.run,
    "markets": markets.run,
    "theorem1": updates_law.run,
    "equations": equations.run,
    "accuracy": accuracy.run,
}
_HEAD = """\
# Section V of the paper, reproduced

`{command}` with seed {seed} writes this page; do not edit it. It uses the simulator of
`doll simulate` and the policies of `doll plan`. [results.json](results.json) has all numbers;
[load/README.md](../../../load/README.md) explains how to run it.
"""


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m load.paper",
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python -m load.paper --only policies equations --runs 50 --out out/paper",
    )
    parser.add_argument("--quick", action="store_true", help="make 12 runs of fewer settings")
    parser.add_argument("--runs", type=int, help=f"runs per setting; default: {_RUNS}")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of all simulations; default: %(default)d"
    )
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts to run; default: all"
    )
    parser.add_argument(
        "--data", type=Path, help="folder of traces and images; default: ../shared/data"
    )
    parser.add_argument("--prices", type=Path, help="folder of spot prices for the part markets")
    parser.add_argument(
        "--availability", type=Path, help="folder of recorded zones for the part markets"
    )
    parser.add_argument(
        "--no-live",
        action="store_true",
        help="leave out the run of the part markets on real processes (2 minutes)",
    )
    parser.add_argument("--json", type=Path, help="another file for the rows of the part markets")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder to write to; default: docs/explain/paper, or out/paper with --quick",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=_PROCESSES,
        help="number of processes; default: %(default)d",
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the selected parts, write their sections, and check the bars."""
    given = parse(words)
    data: Path = given.data or _DATA
    for name in ("data", "prices", "availability"):
        folder: Path | None = getattr(given, name)
        if folder and not folder.is_dir():
            print(f"--{name}: is not a folder, got {folder}", file=sys.stderr)
            return 2
    runs = given.runs or (FEW if given.quick else _RUNS)
    if runs < FEW or given.processes < 1:
        print(f"--runs: must be at least {FEW}; --processes: must be at least 1", file=sys.stderr)
        return 2
    out: Path = given.out or (_QUICK_OUT if given.quick else _OUT)
    with tempfile.TemporaryDirectory(prefix="doll-paper-") as scratch:
        there = data.resolve() if data.is_dir() else None
        asked = Asked(
            *(runs, given.seed, given.quick, there, Path(scratch)),
            *(given.prices, given.availability),
            live=not (given.quick or given.no_live),
        )
        try:
            with Runner(asked, given.processes, show=True) as runner:
                found = {name: PARTS[name](runner) for name in given.only}
        except UserError as error:
            print(f"not run: {error}", file=sys.stderr)
            return 2
    command = "python -m load.paper" + " --quick" * given.quick
    command += f" --runs {given.runs}" if given.runs else ""
    write(out, found, list(PARTS), _HEAD.format(command=command, seed=given.seed))
    if "markets" in found:
        print(found["markets"].text)
        if given.json:
            write_json(given.json, found["markets"].data)
    print(f"written to {out}")
    missed = [f"{name}: {each}" for name, section in found.items() for each in section.missed]
    for each in missed:
        print(f"FALLS SHORT: {each}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
