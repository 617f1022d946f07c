"""Measures what fine-tuning costs: 26,628 of 14.5 million parameters are trained, as by LoRA.

    python load/finetune.py        # exits 1 if Redis or a checkpoint carries more than it must

Two workers make 200 updates with K = 2. What travels should depend on the trained parameters alone.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
import redis
import torch
from torch import Tensor, nn

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from common.core.messages import UpdateApplied
from common.core.spans import Partition
from common.data.codecs import codec_of
from common.embedded.services import stop_all
from common.kafka.names import updates_topic
from load.harness import report
from load.harness.counting import spec_of
from load.harness.processor import used_s
from load.harness.report import Figure, Found
from load.harness.stack import NotMeasuredError, await_until, check, servers
from load.harness.updates import read_audit
from load.throughput.backlog import produce

if TYPE_CHECKING:
    from collections.abc import Mapping

ENTRYPOINT = "load.finetune:LowRankTask"
WORKERS, GROUP, BATCH = 2, 2, 4
WIDTH, LAYERS, INPUTS, OUTPUTS = 1_902, 4, 16, 6
TRAINED = 2 * WIDTH * LAYERS + WIDTH * OUTPUTS
WARM_UP, UPDATES = 20, 200
_TOPIC = "finetune"
_LONGEST_S = 600.0


class LowRank(nn.Module):
    """A frozen square layer plus a trained update of rank 1 (Hu et al., "LoRA", 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)  # noqa: FBT003 -- torch's
        self.down = nn.Parameter(torch.randn(1, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.zeros(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, WIDTH)."""
        return torch.relu(self.frozen(x) + x @ self.down.T @ self.up.T)


class LowRankTask:
    """Classifies random numbers."""

    def build(self) -> nn.Module:
        """Return the network."""
        first = nn.Linear(INPUTS, WIDTH).requires_grad_(False)  # noqa: FBT003 -- torch's
        layers = [LowRank() for _ in range(LAYERS)]
        return nn.Sequential(first, *layers, nn.Linear(WIDTH, OUTPUTS, bias=False))

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return (n, OUTPUTS)."""
        outputs: Tensor = module(records["x"])
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return (n,)."""
        return nn.functional.cross_entropy(outputs, records["label"], reduction="none")

    def metrics(self, _outputs: Tensor, _records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return none."""
        return {}


def measure(kafka: str) -> Found:
    """Train, and count what travels from one version to another.

    Raises:
        NotMeasuredError: If a service ends, or the updates take too long.
    """
    spec = spec_of(
        {"x": {"dtype": "float32", "shape": [INPUTS]}, "label": {"dtype": "int64"}},
        name="finetune",
        streams=[_TOPIC],
        task={"entrypoint": ENTRYPOINT},
        batch_size=BATCH,
        group_size=GROUP,
        optimizer={"name": "adamw", "learning_rate": 1e-4},
    )
    draws, rows = np.random.default_rng(0), (UPDATES + 4 * WARM_UP) * GROUP * BATCH
    values = codec_of(spec.records).encode(
        {
            "x": draws.normal(size=(256, INPUTS)).astype(np.float32),
            "label": draws.integers(0, OUTPUTS, 256),
        }
    )
    with ExitStack() as stack:
        on = stack.enter_context(servers(kafka, tasks=(ENTRYPOINT,)))
        produce(on.log, _TOPIC, 4, values, rows)
        services = on.start_all(WORKERS)
        stack.callback(stop_all, services)
        on.submit(spec)
        tail = stack.enter_context(closing(on.log.tail(Partition(updates_topic(spec.name), 0), 0)))
        connection = redis.Redis.from_url(on.settings.redis)
        pids = {"coordinator": services[0].pid, "redis": on.pids["redis"]}

        def mark(version: int) -> tuple[float, int, float]:
            deadline = monotonic() + _LONGEST_S
            while not any(
                isinstance(each, UpdateApplied) and each.version >= version
                for _, each in read_audit(tail, 0.1)
            ):
                check(services)
                if monotonic() > deadline:
                    raise NotMeasuredError(f"no version {version} within {_LONGEST_S:g} s")
            stats = connection.info("stats")
            sent = int(stats["total_net_input_bytes"] + stats["total_net_output_bytes"])
            return monotonic(), sent, sum(map(used_s, pids.values()))

        before, after = mark(WARM_UP), mark(WARM_UP + UPDATES)
        on.stop_jobs(spec.name)
        folder = Path(on.settings.blobs.removeprefix("file://"))
        await_until(lambda: bool(list(folder.rglob("trainer.safetensors"))), 60.0, "a checkpoint")
        checkpoint = max(each.stat().st_size for each in folder.rglob("trainer.safetensors"))
    seconds, sent, used = (b - a for a, b in zip(before, after, strict=True))
    # Vectors of trained weights that pass Redis per update. Each gradient goes in and out, the
    # model goes in once and out to each worker, and a snapshot with adamw's two moments goes in
    # each second. A tenth is added for everything else.
    vectors = 2 * GROUP + 1 + WORKERS + 3 * seconds / UPDATES
    most = 1.1 * vectors * 4 * TRAINED
    figures = (
        Figure("kB through Redis per update", sent / UPDATES / 1e3, 1, most=most / 1e3),
        Figure("MB of a checkpoint", checkpoint / 1e6, 3, most=1.0),
        Figure("ms of coordinator and Redis per update", 1e3 * used / UPDATES, 2),
        Figure("updates/s", UPDATES / seconds, 1),
    )
    return Found(f"Fine-tuning, {on.kafka}", figures, {})


def main() -> int:
    """Measure, report, and check the bars."""
    given = report.parser(__doc__, "python load/finetune.py --kafka embedded").parse_args()
    machine = report.machine()
    found = measure(given.kafka)
    found.draw()
    result = {each.name: each.value for each in found.figures}
    return report.conclude(given.json, machine, result, found.short())


if __name__ == "__main__":
    sys.exit(report.run(main))
