"""Runs the parts of the GPU benchmark, and reports their results."""

from __future__ import annotations

import time
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from common.learning.devices import device_of
from common.learning.errors import one_line
from load.gpus import copies, faults, groups, training
from load.gpus.models import GROUP
from load.harness import report

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

_COLUMNS = (
    *("model", "precision", "pass_records", "ours", "plain loop", "consumer", "ratio", "bar"),
    "starved",
)


def run_parts(given: argparse.Namespace) -> int:
    """Run the parts, print their results, and return the exit status."""
    gpu = torch.cuda.is_available()
    device = device_of(torch.device("cuda", 0) if gpu else torch.device("cpu"))
    on = report.machine() | {"device": device.name, "driver": device.driver or "none"}
    print(report.in_words(on), flush=True)
    result, failed = dict[str, Any](), list[str]()
    parts: dict[str, Callable[[], Sequence[str]]] = {
        "training": partial(_train, given, gpu, result),
        "copies": partial(copies.measure, result),
        "groups": partial(groups.check, result),
        "faults": partial(faults.provoke, result),
    }
    for name in given.only:
        began = time.monotonic()
        try:
            failed += parts[name]()
        # The other parts are worth running, whatever this machine does to one of them.
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            failed.append(f"{name}: {one_line(error)}")
        result.setdefault("seconds", {})[name] = round(time.monotonic() - began, 1)
        # A later part may exceed the time of this run.
        report.write(given.json, {"machine": on, **result, "failed": failed})
    seconds = ", ".join(f"{name} {each:g} s" for name, each in result["seconds"].items())
    print(f"duration: {seconds}")
    return report.conclude(given.json, on, result | {"failed": failed}, failed)


def _train(given: argparse.Namespace, gpu: bool, result: dict[str, Any]) -> Sequence[str]:  # noqa: FBT001
    found = list[training.Measured]()

    def note(measured: training.Measured) -> None:
        found.append(measured)
        print(" ".join(_row(measured, gpu=gpu)), flush=True)

    try:
        return training.measure(given, gpu=gpu, report=note)
    finally:
        result["training"] = [each.as_data() for each in found]
        title = (
            f"training, records/s: two topics, one worker of one slot, K = {GROUP},"
            f" synchronous; medians of blocks of {given.seconds:g} s"
        )
        report.draw(title, _COLUMNS, [_row(each, gpu=gpu) for each in found])
        print(
            "ratio: ours to the slower one of the plain loop and the consumer, which only reads and"
            " decodes; starved: share of the time in which producers were less than a batch ahead"
        )


def _row(found: training.Measured, *, gpu: bool) -> tuple[str, ...]:
    bar = f"{found.bar:g}"
    if gpu:
        bar += " met" if found.ratio >= found.bar else " MISSED"
    rates = (report.spread(each)["median"] for each in (found.ours, found.loop, [found.consumer]))
    return (
        *(found.model, found.precision, f"{found.pass_records:,}"),
        *(f"{each:,.0f}" for each in rates),
        *(f"{found.ratio:.3f}", bar, f"{found.starved:.0%}"),
    )
