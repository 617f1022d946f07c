"""Simulates in a process of its own: `python -m common.spot.planning.simulation_process [FOLDER]`.

One line of JSON comes on standard input, a `SimulateRequest`; each line on standard output is a
`Report`, the last one with the result. The process can be killed, and ends when its standard input
does: whoever asked has gone.

FOLDER is what the experiment's files are relative to. Without it the experiment names no files, the
process has little memory and little of a processor, and reports the result alone: so the API asks.
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

_NICER = 10  # the API goes first
# What is within the limits of `simulation` takes some 800 MB, most of it libraries. What takes more
# shall be refused here, before the machine ends whoever else runs on it.
MOST_BYTES = 2 << 30


def simulated(asked: bytes, folder: Path, progress: Callable[[str, float], None]) -> Report:
    """Simulate what a `common.spot.planning.simulation.SimulateRequest` in JSON says."""
    # It takes long to load scipy: whether whoever asked has gone is watched by then.
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
    """Read an order, carry it out, answer."""
    order = sys.stdin.buffer.readline()
    if not order.endswith(b"\n"):
        return  # whoever asked has gone already
    threading.Thread(target=_end_with_input, daemon=True).start()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # to end in silence while it reports progress
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
    os._exit(1)  # nothing of ours is to be saved


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    os._exit(0)  # a thread still waits for the end of the input
