"""What members of a group copy from storage: all that they hold of one version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import CorruptError
from common.learning.sliced_trainer import whole_of

if TYPE_CHECKING:
    from common.core.messages import ModelId
    from common.storage.store import CheckpointStore


def stored_state(checkpoints: CheckpointStore, made: ModelId) -> bytes:
    """Weights and optimizer state of a version, as `Trainer.snapshot` writes them.

    One process has stored them all, or owners have stored their slices.

    Raises:
        CorruptError: If they are not whole.
        UnavailableError: If the storage is.
    """
    try:
        return checkpoints.state(made)
    except CorruptError:
        return whole_of(checkpoints.slices(made))
