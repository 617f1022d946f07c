"""Ranks of plain PyTorch DDP over gloo: single-threaded processes that meet in a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from load.harness.stack import NotMeasuredError
from services.worker.memory import keep_freed_memory

if TYPE_CHECKING:
    from pathlib import Path


def run_ranks(
    script: Path, words: Sequence[str], ranks: int, timeout_s: float
) -> list[dict[str, Any]]:
    """Run a script once per rank, with the rank, their number and a folder as last arguments.

    Returns:
        The JSON that each rank printed.

    Raises:
        NotMeasuredError: If a rank fails or does not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="doll-ranks-") as folder:
        processes = [
            subprocess.Popen(  # noqa: S603 -- our own command line, no shell
                [sys.executable, str(script), *words, str(rank), str(ranks), folder],
                stdout=subprocess.PIPE,
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(ranks)
        ]
        try:
            answers = [process.communicate(timeout=timeout_s)[0] for process in processes]
        except subprocess.TimeoutExpired as error:
            raise NotMeasuredError(f"DDP did not end in {timeout_s:g} s") from error
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode for process in processes):
        raise NotMeasuredError("a rank of DDP has failed")
    return [json.loads(answer) for answer in answers]


@contextmanager
def as_rank(rank: str, ranks: str, folder: str) -> Iterator[None]:
    """Join a group of ranks in this context, on one thread."""
    keep_freed_memory()  # like the workers
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=int(rank), world_size=int(ranks)
    )
    yield
    # No rank leaves while another still receives from it.
    distributed.barrier()
    distributed.destroy_process_group()
