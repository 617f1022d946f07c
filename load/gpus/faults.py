"""Faults of a GPU, provoked in one job while another job trains on the same GPU."""

from __future__ import annotations

import re
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.data.codecs import codec_of
from common.embedded.services import stop_all
from common.jobs.store import JobStore
from common.testing.counting import ENTRYPOINT, CountingTask
from load.harness.counting import CountingJob, counting_spec
from load.harness.producers import Producers
from load.harness.stack import NotMeasuredError, await_running, servers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from common.embedded.services import EmbeddedService
    from load.harness.stack import Servers

GREEDY = "load.gpus.faults:GreedyTask"
_BATCH, _GROUP = 8, 4
# Records of a job with a fault. All others have weights of their own.
_RECORDS = 20 * _BATCH
# An id without a weight, in one record of one batch. Its index makes a kernel assert.
_BAD, _BAD_AT = 1 << 20, _RECORDS // 2
_BESIDE_RECORDS, _BESIDE_PER_S = 40_000, 200
_PATIENCE_S = 90.0
_LOST = "device-side assert"
# The reason of a held job names both amounts.
_AMOUNTS = re.compile(r"requested [\d.]+ \w+, free [\d.]+ \w+")


class GreedyTask(CountingTask):
    """Counts, but first requests twice the memory of the GPU."""

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Request the memory, which fails."""
        device = records["id"].device
        size = 2 * torch.cuda.get_device_properties(device).total_memory
        torch.empty(size, dtype=torch.uint8, device=device)
        return super().forward(module, records)


def provoke(result: dict[str, Any]) -> list[str]:
    """Provoke both faults, print what became of the jobs, and return descriptions of failures.

    Raises:
        NotMeasuredError: If a job does not react in time.
    """
    if not torch.cuda.is_available():
        print("faults: skipped: no GPU")
        return []
    with ExitStack() as stack:
        on = stack.enter_context(servers("embedded", tasks=(ENTRYPOINT, GREEDY)))
        on = stack.enter_context(closing(on.using("0")))
        services = [on.start("coordinator", "coordinator")]
        stack.callback(stop_all, services)
        beside = _job(on, stack, services, "beside", _BESIDE_RECORDS)
        # Each id of the other job is written once.
        producers = Producers(beside.record, on.log, 1, lambda seconds: _BESIDE_PER_S * seconds)
        stack.callback(producers.stop)

        def trained() -> int:
            return beside.audit().trained

        await_running(services, lambda: trained() > 0, _PATIENCE_S, "the job beside trains")
        reason = _held_for_memory(on, stack, services)
        print(f"faults, memory: held: {reason}", flush=True)
        after_first = trained()
        failed = _lose_gpu(on, stack, services, result)
        await_running(
            services, lambda: trained() > after_first, _PATIENCE_S, "the job beside still trains"
        )
        producers.stop()
        await_running(services, beside.drained, _PATIENCE_S, "the job beside is drained")
        wrong = len(beside.unlearned(beside.audit(), producers.produced))
    result["faults"] = result.get("faults", {}) | {"held": reason, "beside_wrong_weights": wrong}
    if not _AMOUNTS.search(reason):
        failed.append(f"the job without memory is held without the amounts: {reason}")
    if wrong:
        failed.append(f"the job beside has {wrong} wrong weights")
    print(f"faults, beside: {producers.produced:,} records, {wrong} wrong weights")
    return [f"faults: {each}" for each in failed]


def _held_for_memory(on: Servers, stack: ExitStack, services: list[EmbeddedService]) -> str:
    """Return the reason for which a job without enough memory is held."""
    job = _job(on, stack, services, "greedy", _RECORDS, GREEDY)
    _write(on, job, range(_RECORDS))
    with closing(JobStore(on.log)) as job_store:
        await_running(
            services, lambda: job_store.get(job.name).held, _PATIENCE_S, "the greedy job is held"
        )
        return job_store.get(job.name).reason


def _lose_gpu(
    on: Servers, stack: ExitStack, services: list[EmbeddedService], result: dict[str, Any]
) -> list[str]:
    """Let a kernel assert, and return descriptions of what did not happen."""
    job = _job(on, stack, services, "asserts", _RECORDS)
    ids = list(range(_RECORDS))
    ids[_BAD_AT] = _BAD
    _write(on, job, ids)
    said = set[str]()

    def is_quarantined() -> bool:
        said.update(job.board.unable().values())
        return bool(job.audit().quarantined)

    await_running(services, is_quarantined, _PATIENCE_S, "a batch is quarantined")
    found = job.audit().quarantined[0]
    named = [each for each in said if _LOST in each]
    result["faults"] = {"quarantined": found.reason, "reported": named}
    print(f"faults, assert: quarantined: {found.reason}; reported: {named}")
    failed = [] if named else [f"no process reported a {_LOST}, but: {sorted(said)}"]
    if not any(span.start <= _BAD_AT < span.end for span in found.batch.address):
        at = ", ".join(map(str, found.batch.address))
        return [*failed, f"a batch is quarantined that does not assert: {at}"]
    await_running(services, job.drained, _PATIENCE_S, "all other batches are trained")
    proof = job.audit()
    if proof.trained != _RECORDS - found.batch.samples or len(proof.quarantined) > 1:
        failed.append(f"only {proof.trained} records are trained beside the batch that asserts")
    return failed + [f"{each.kind}: {each.where}" for each in proof.flaws]


def _job(
    on: Servers,
    stack: ExitStack,
    services: list[EmbeddedService],
    name: str,
    records: int,
    entrypoint: str = ENTRYPOINT,
) -> CountingJob:
    """Submit a counting job with one partition, and start a worker for it alone."""
    spec = counting_spec(
        records,
        0.0,
        name=name,
        streams=[f"{name}-a"],
        batch_size=_BATCH,
        group_size=_GROUP,
        batch_linger_s=0.3,
        group_linger_s=0.5,
        hot_snapshot={"every_s": 0.3},
        max_failures=1,
    )
    task = spec.task.model_copy(update={"entrypoint": entrypoint})
    job = CountingJob(spec.model_copy(update={"task": task}), on.settings, on.log, partitions=1)
    stack.callback(job.board.close)
    services.append(on.start("worker", f"worker-{name}", "--job", name))
    return job


def _write(on: Servers, job: CountingJob, ids: Sequence[int]) -> None:
    """Write a record for each id."""
    with closing(on.log.writer()) as writer:
        for value in codec_of(job.record.spec.records).encode({"id": np.array(ids, np.int64)}):
            writer.append(job.record.spec.streams[0], value, partition=0)
        if not writer.flush(_PATIENCE_S):
            raise NotMeasuredError("Kafka did not accept the records")
