"""Many jobs on one coordinator: what they cost, and how workers spread over them.

python load/jobs.py --only idle       # exits 1 where a hundred idle jobs cost too much
python load/jobs.py --only spread     # exits 1 where a small job waits too long for a worker
python load/jobs.py --only submit     # exits 1 where `doll job submit` takes long beside many jobs
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by path: this checkout's packages

from common.errors import UserError
from common.testing.counting import ENTRYPOINT
from load.harness import report
from load.harness.stack import NotMeasuredError, servers
from load.many_jobs.idle import IdleFound, measure_idle
from load.many_jobs.spread import SpreadFound, measure_spread
from load.many_jobs.submit import SubmitFound, measure_submit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from load.harness.stack import Servers

PARTS: dict[str, Callable[[Servers, Path, int], IdleFound | SpreadFound | SubmitFound]] = {
    "idle": measure_idle,
    "spread": measure_spread,
    "submit": measure_submit,
}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--kafka", default="apache", help="apache, embedded, or an address")
    parser.add_argument("--logs", type=Path, help="keep the services' logs in this folder")
    parser.add_argument("--json", type=Path, help="write the result here")
    return parser.parse_args(words)


def main() -> int:
    """Measure, report, judge."""
    given = parse()
    found_machine, found = report.machine(), {}
    for part in given.only:
        with tempfile.TemporaryDirectory(prefix="doll-load-") as name:
            try:
                with servers(given.kafka, Path(name), tasks=(ENTRYPOINT,)) as on:
                    kafka = on.kafka
                    found[part] = PARTS[part](on, given.logs or Path(name), given.jobs)
            except (NotMeasuredError, UserError) as error:
                print(f"not measured: {error}", file=sys.stderr)
                return 2
        found[part].print(kafka)
    print(report.in_words(found_machine))
    short = [f"{part}: {what}" for part, one in found.items() for what in one.short()]
    for each in short:
        print(f"FALLS SHORT: {each}")
    result = {part: one.as_data() for part, one in found.items()}
    report.write(given.json, {"machine": found_machine, **result})
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
