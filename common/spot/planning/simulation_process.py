"""Simulates in its own process: `python -m common.spot.planning.simulation_process [FOLDER]`.

Standard input has one line of JSON, a `SimulateRequest`. Each line of standard output is a
`Report`, the last one with the result. The process can be killed, and ends with its standard input,
because its caller is gone then.

FOLDER is the folder of the experiment's files. Without it, as for the API, the experiment has no
files, the process has little memory and low priority, and it reports only the result.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from common.errors import UserError
from common.spot.planning.simulation import Report, SimulateRequest

# The API has priority.
_NICER = 10
# A simulation within the limits of `simulation` takes some 800 MB, most of it libraries. A larger
# one must fail here, before the machine kills other processes.
MOST_BYTES = 2 << 30


def simulated(asked: bytes, folder: Path, progress: Callable[[str, float], None]) -> Report:
    """Simulate a `common.spot.planning.simulation.SimulateRequest` in JSON."""
    # scipy loads slowly, and the thread that watches the caller runs by now.
    from common.spot.planning.compare import as_data, compare, with_policies  # noqa: PLC0415 -- above

    request = SimulateRequest.model_validate_json(asked)
    variants = with_policies(request.experiment, request.policies)
    try:
        results = compare(variants, folder, request.runs, request.seed, progress)
    except UserError as error:
        return Report(refused=str(error))
    except MemoryError:
        return Report(refused="it takes more memory than there is: ask for fewer runs or workers")
    data = as_data(request.experiment, request.seed, results)
    return Report(msgspec.Raw(msgspec.json.encode(data)))


def main(folder: Path | None) -> None:
    """Read a request, run it, and write the result."""
    order = sys.stdin.buffer.readline()
    if not order.endswith(b"\n"):
        # The caller is already gone.
        return
    threading.Thread(target=_end_with_input, daemon=True).start()
    # End silently if the caller goes while progress is reported.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if folder is None:
        os.nice(_NICER)
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        least = MOST_BYTES if most == resource.RLIM_INFINITY else min(MOST_BYTES, most)
        resource.setrlimit(resource.RLIMIT_DATA, (least, most))
        _say(simulated(order, Path(), lambda _policy, _share: None))
    else:
        _say(simulated(order, folder, lambda *done: _say(Report(progress=done))))


def _say(report: Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    # There is nothing to save.
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    # A thread still waits for the end of the input.
    os._exit(0)
