"""`doll job submit --from`: a checkpoint of another job becomes what a new one begins with.

It is copied into the new job's folder, since the other job goes on deleting its own: so version 0
of the new job can always be made again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import typer

from common.errors import CorruptError, UserError
from common.jobs.store import JobStore, Origin
from common.kafka import names as topics
from common.kafka.read import read_decoded
from common.learning.torch_here import need_torch
from common.storage.find import in_storage, pick, wish_of
from common.storage.store import CheckpointStore
from common.wire.messages import decode_audit

if TYPE_CHECKING:
    from common.config.servers import Outside
    from common.jobs.spec import JobSpec


def begin_with(
    source: str, spec: JobSpec, to: str, book: JobStore, outside: Outside
) -> tuple[Origin, str]:
    """Find a checkpoint that counts, see that it fits, and copy it.

    Args:
        source: JOB or JOB@VERSION, where the version is a number, `newest` or `best`.
        spec: The new job.
        to: The id that it will have.
        book: The jobs topic.
        outside: The outside.

    Returns:
        What the job begins with, kept in its folder, and a sentence about it.

    Raises:
        UserError: If there is no such job, no such checkpoint, no object storage or no PyTorch, or
            if the model is another.
        FutureFormatError: If a newer program wrote a checkpoint of that job.
        UnavailableError: If Kafka or object storage is unavailable.
    """
    need_torch(f"--from {source}")
    from common.jobs.build import optimizer_of, trainer_of

    job, _, version = source.partition("@")
    wish = wish_of(version) if "@" in source else "newest"
    found_in = book.get(job).id
    if not outside.settings.blobs:
        raise UserError(
            f"--from {source}: checkpoints are in object storage, and none is named: set DOLL_BLOBS"
        )
    blobs = outside.open_blobs()
    updates = read_decoded(outside.open_log(), topics.updates_topic(found_in), decode_audit)
    tell = partial(typer.echo, err=True)
    found, data = pick(in_storage(blobs, found_in, tell), updates, wish, tell)
    trainer = trainer_of(spec, outside.settings.tasks)()
    try:
        other = trainer.adopt(data)
    except CorruptError as error:
        raise UserError(
            f"--from {source}: {found.title} of {job} does not fit: {error}; give the new job the"
            " same task, with the same options"
        ) from error
    sha256 = CheckpointStore(blobs, to).put_origin(trainer.snapshot())
    origin = Origin(job, found.snapshot.by, found.snapshot.made.version, sha256)
    own = optimizer_of(spec).kind
    what = (
        f"weights and optimizer state ({own})"
        if other == own
        else f"weights alone, for the optimizer was {other} and is {own} now"
    )
    return origin, f"it begins with {found.title} of {job}: {what}"
