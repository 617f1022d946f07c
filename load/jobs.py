"""Many jobs on one coordinator: what they cost, and how workers spread over them.

python load/jobs.py --only idle       # exits 1 where a hundred idle jobs cost too much
python load/jobs.py --only spread     # exits 1 where a small job waits too long for a worker
python load/jobs.py --only submit     # exits 1 where `doll job submit` takes long beside many jobs
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by path: this checkout's packages

from common.testing.counting import ENTRYPOINT
from load.harness import report
from load.harness.stack import servers
from load.many_jobs.idle import measure_idle
from load.many_jobs.spread import measure_spread
from load.many_jobs.submit import measure_submit

if TYPE_CHECKING:
    from collections.abc import Callable

    from load.harness.stack import Servers

PARTS: dict[str, Callable[[Servers, int], report.Found]] = {
    "idle": measure_idle,
    "spread": measure_spread,
    "submit": measure_submit,
}


def main() -> int:
    """Measure, report, judge."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--logs", type=Path, help="keep the services' logs in this folder")
    given = parser.parse_args()
    machine, found = report.machine(), dict[str, report.Found]()
    for part in given.only:
        with servers(given.kafka, tasks=(ENTRYPOINT,), logs=given.logs) as on:
            found[part] = PARTS[part](on, given.jobs)
        found[part].draw()
    short = [f"{part}: {what}" for part, one in found.items() for what in one.short()]
    result = {part: one.data for part, one in found.items()}
    return report.conclude(given.json, machine, result, short)


if __name__ == "__main__":
    sys.exit(report.run(main))
