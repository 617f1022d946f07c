"""What follows from an order that gave no gradient: who is blamed, and what it proves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from common.core.messages import Batch, Failed
    from common.core.rounds import Round


class Verdict(NamedTuple):
    """What a failure proves."""

    hopeless: tuple[Batch, ...] = ()  # batches that can never be used
    reason: str = ""  # why not
    diverged: str = ""  # that the weights are to blame, in words; empty where they are not


def judge(failed: Failed, round_: Round, group_size: int) -> Verdict:
    """Take the order back, with or without blame.

    Args:
        failed: Of this round's model.
        round_: The round in flight.
        group_size: K
    """
    if failed.reason not in ("raised", "not_finite"):
        round_.excuse(failed.worker, failed.batches)
        if failed.reason != "expired":
            return Verdict()
        return Verdict(tuple(b for b in round_.todo if b.offset in failed.batches), "expired")
    if failed.reason == "not_finite":
        round_.not_finite.update(b.offset for b in round_.todo if b.offset in failed.batches)
    poison = round_.accuse(failed.worker, failed.batches)
    count = len(round_.not_finite)
    if count >= max(2, (group_size + 1) // 2):  # half of the data cannot be bad at once
        return Verdict(diverged=f"diverged: {count} batches of one round are not finite")
    return Verdict(poison, f"poison: {failed.reason}: {failed.detail}")
