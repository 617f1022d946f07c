"""The end of a demo: the model on digits that it has never seen, and the proof from Kafka."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.checkpoints.snapshot_file import from_checkpoint
from common.core.audit import audit
from common.topics import names as topics
from common.topics.read import read_decoded
from common.wire.messages import decode_audit, decode_claim
from services.cli.demo.account import account
from services.cli.demo.course import mean_accuracy
from services.cli.demo.summary import Summary

if TYPE_CHECKING:
    from pathlib import Path

    from common.checkpoints.store import Checkpoint
    from common.datasets.records import Records
    from common.jobs.spec import JobSpec
    from services.cli.demo.run import Demo

_BATCH = 512  # records per forward pass


def test_model(
    spec: JobSpec, checkpoint: Checkpoint, held_out: Records, output: Path
) -> dict[str, float]:
    """Mean loss and accuracy of a checkpoint's model, which is also written to `output`.

    Raises:
        CorruptError: If the checkpoint holds no weights of this job.
    """
    # These bring torch, which takes seconds: not while the demo's processes load it too.
    from common.jobs.build import task_of  # noqa: PLC0415 -- see above
    from common.learning.checkpoint import save_weights, weights_in  # noqa: PLC0415 -- see above
    from common.learning.evaluate import evaluate  # noqa: PLC0415 -- see above
    from common.learning.parameters import FlatModel, layout_of  # noqa: PLC0415 -- see above

    weights, _ = weights_in(from_checkpoint(checkpoint).trainer())
    task = task_of(spec, ())
    model = FlatModel(task.build())
    output.write_bytes(save_weights(layout_of(model.module), weights))
    return evaluate(task, model, weights, held_out, _BATCH)


def judge(demo: Demo, tested: dict[str, float]) -> Summary:
    """Fold what Kafka holds, count every record, sum it all up.

    Raises:
        UnavailableError: If Kafka stops answering.
    """
    job = demo.plan.name
    # Updates first: the claims that they are made of are then in the control topic for sure.
    decided = read_decoded(demo.log, topics.updates_topic(job), decode_audit)
    claimed = read_decoded(demo.log, topics.control_topic(job), decode_claim)
    proof = audit(demo.first, claimed, decided)
    updates = proof.updates
    return Summary(
        job=job,
        account=account(proof, demo.first, demo.ends),
        flaws=tuple(f"{flaw.kind}: {flaw.where}" for flaw in proof.flaws),
        curve=tuple(mean_accuracy([update]) or 0.0 for update in updates),
        updates=len(updates),
        takeovers=max(0, proof.takeovers - 1),
        updates_taken_back=proof.taken_back,
        test_accuracy=tested["accuracy"],
        test_loss=tested["loss"],
        prequential_accuracy=mean_accuracy(updates) or 0.0,
        prequential_accuracy_at_end=mean_accuracy(updates[-max(1, len(updates) // 10) :]) or 0.0,
        samples_per_s=proof.trained / demo.streaming_s,
        workers=demo.plan.workers,
        preemptions=demo.cast.preemptions,
        pause_after_preemption_s=demo.pause_s,
        longest_pause_s=demo.course.longest_pause_s,
    )
