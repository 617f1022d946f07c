"""The reference of the GPU benchmark: a plain PyTorch loop over decoded records in main memory.

    python -m load.gpus.plain_loop JOB ABOVE

`JOB` is the job's specification and `ABOVE` is `Model.above`, both as JSON. The process serves like
`load.throughput.baseline`. It gets every fair advantage: records are ready batches in pinned
memory, no metric is computed, the gradient stays on the GPU and the optimizer is fused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from common.jobs.spec import JobSpec, job_from_json
from common.learning.arithmetic import Arithmetic
from common.learning.tasks import build_model, task_of
from load.gpus.models import Model
from load.throughput.baseline import serve
from services.worker.memory import keep_freed_memory

# Updates whose records are in memory.
_UPDATES = 2


def training_update(spec: JobSpec, above: dict[str, int]) -> Callable[[], int]:
    """Return a function that makes an update of K batches, and returns its number of records.

    Precision, determinism, memory format and mathematics are those of the job's worker.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    task = task_of(spec, [spec.task_name])
    module = build_model(task, spec.seed).to(device).train()
    trained = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, spec.optimizer.learning_rate, fused=True)
    arithmetic = Arithmetic(spec.precision, spec.deterministic)
    fields = {
        each.name: {"dtype": each.dtype, "shape": each.shape} for each in spec.records.described()
    }
    b, count = spec.batch_size, spec.group_size
    drawn = Model("", {}, fields, above, b, 0.0).records(_UPDATES * count * b, seed=1)
    records = {name: torch.from_numpy(column) for name, column in drawn.items()}
    if device.type == "cuda":
        records = {name: column.pin_memory() for name, column in records.items()}
    at = 0

    def update() -> int:
        nonlocal at
        with arithmetic.applied(device):
            for _ in range(count):
                batch = {
                    name: column[at : at + b].to(device, non_blocking=True)
                    for name, column in records.items()
                }
                with arithmetic.forward(device):
                    losses = task.losses(task.forward(module, batch), batch)
                torch.autograd.backward(losses.sum() / (count * b))
                at = (at + b) % (_UPDATES * count * b)
            optimizer.step()
            optimizer.zero_grad()
        return count * b

    return update


def main() -> int:
    """Serve until the standard input ends."""
    keep_freed_memory()  # like the workers
    torch.set_num_threads(1)
    job, above = sys.argv[1:]
    update = training_update(job_from_json(job), json.loads(above))
    update()
    serve(update, torch.cuda.synchronize if torch.cuda.is_available() else int)
    return 0


if __name__ == "__main__":
    sys.exit(main())
