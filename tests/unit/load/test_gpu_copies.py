"""Hidden copies in a trace, as the GPU benchmark counts them."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Any

from load.gpus.copies import hidden_share

if TYPE_CHECKING:
    from collections.abc import Mapping


def event(kind: str, start: float, end: float, name: str = "") -> Mapping[str, Any]:
    return {"cat": kind, "name": name, "ts": start, "dur": end - start}


def test_copy_is_hidden_while_any_kernel_runs() -> None:
    #  copies   0-----4    6--8        20--22
    #  kernels    2-----5 5---7 6-7           30-31
    copies = [
        event("gpu_memcpy", *each, "Memcpy HtoD (Pinned -> Device)")
        for each in ((0, 4), (6, 8), (20, 22))
    ]
    kernels = [event("kernel", *each) for each in ((30, 31), (6, 7), (2, 5), (5, 7))]
    others = [
        event("gpu_memcpy", 2, 5, "Memcpy DtoH (Device -> Pinned)"),
        event("cpu_op", 0, 40, "aten::copy_"),
        {"name": "process_name", "ph": "M"},
    ]

    assert hidden_share([*kernels, *others, *copies]) == (2 + 1) / (4 + 2 + 2)


def test_share_without_copies_is_not_a_number() -> None:
    assert isnan(hidden_share([event("kernel", 0, 1)]))
