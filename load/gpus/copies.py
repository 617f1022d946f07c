"""Share of the time of copies to a GPU in which the GPU also computes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.learning.arithmetic import Arithmetic
from common.learning.feed import pinned
from common.learning.gradients import GradientComputer
from common.learning.tasks import build_model, task_of
from load.gpus.models import GROUP, model_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_BAR = 0.8
# Gradients of K batches that are measured.
_GRADIENTS = 3
# A span of time in microseconds: start and end.
_Span = tuple[float, float]


def measure(result: dict[str, Any]) -> list[str]:
    """Measure gradients of ResNet-32 and of the CNN, and print the shares. No check can fail."""
    if not torch.cuda.is_available():
        print("copies: not measured: no GPU")
        return []
    result["copies"] = {}
    for model in (model_of(name, Path(), small=False) for name in ("cnn", "resnet")):
        spec = model.job("copies", ["copies"], precision="bfloat16")
        device = torch.device("cuda", torch.cuda.current_device())
        task = task_of(spec, ())
        computer = GradientComputer(
            task,
            build_model(task, spec.seed),
            device,
            arithmetic=Arithmetic(spec.precision, spec.deterministic),
            pass_records=spec.records_per_pass,
        )
        batches = list[dict[str, Any]]()
        for seed in range(GROUP):
            batches.append({})
            for name, column in model.records(model.batch_size, seed).items():
                # The worker keeps its batches in such memory.
                batches[-1][name] = pinned(column.shape, column.dtype)
                batches[-1][name][...] = column
        computer.compute(batches)
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profiler:
            for _ in range(_GRADIENTS):
                computer.compute(batches)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        share = hidden_share(events)
        result["copies"][model.name] = {"hidden_share": share, "bar": _BAR}
        met = "met" if share >= _BAR else "MISSED"
        print(f"copies, {model.name}: {share:.3f} of their time is hidden; bar {_BAR:g} {met}")
    return []


def hidden_share(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the share of the time of host-to-device copies in which a kernel runs.

    Args:
        events: Events of a trace in Chrome's format, as torch's profiler exports it.

    Returns:
        NaN if there are no copies.
    """
    copied, computed = list[_Span](), list[_Span]()
    for event in events:
        if event.get("cat") == "kernel":
            computed.append((event["ts"], event["ts"] + event["dur"]))
        elif event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]:
            copied.append((event["ts"], event["ts"] + event["dur"]))
    busy = list[_Span]()
    for start, end in sorted(computed):
        if busy and start <= busy[-1][1]:
            busy[-1] = busy[-1][0], max(busy[-1][1], end)
        else:
            busy.append((start, end))
    hidden = sum(
        max(min(end, until) - max(start, since), 0.0)
        for start, end in copied
        for since, until in busy
    )
    total = sum(end - start for start, end in copied)
    return hidden / total if total else float("nan")
