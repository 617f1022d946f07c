"""What follows from an order that gave no gradient: who is blamed, and what it proves."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from common.core.messages import Batch, Failed
    from common.core.rounds import Round

SETTLED_WINDOW = 100  # batches over which the share of poison is judged


class Verdict(NamedTuple):
    """What a failure proves."""

    hopeless: tuple[Batch, ...] = ()  # batches that can never be used
    reason: str = ""  # why not
    hold: str = ""  # why no batch is to blame and the job must be held; empty where it need not


def judge(failed: Failed, round_: Round, group_size: int) -> Verdict:
    """Take the order back, with or without blame.

    Args:
        failed: Of this round's model.
        round_: The round in flight.
        group_size: K
    """
    if failed.reason not in ("raised", "not_finite"):
        had = round_.excuse(failed.worker, failed.batches)
        if failed.reason == "task" and had:  # what comes late or twice is of a task that was mended
            return Verdict(hold=f"the task is wrong: {failed.detail}; mend it and resume the job")
        if failed.reason != "expired":
            return Verdict()
        return Verdict(tuple(b for b in round_.todo if b.offset in failed.batches), "expired")
    if failed.reason == "not_finite":
        round_.not_finite.update(b.offset for b in round_.todo if b.offset in failed.batches)
    poison = round_.accuse(failed.worker, failed.batches)
    count = len(round_.not_finite)
    if count >= max(2, (group_size + 1) // 2):  # half of the data cannot be bad at once
        return Verdict(
            hold=f"diverged: {count} batches of one round are not finite;"
            " lower the learning rate and start again"
        )
    return Verdict(poison, f"poison: {failed.reason}: {failed.detail}")


class PoisonLimits:
    """How much of what was settled last is poison: so much at once is the task's fault, not data's.

    A leader counts anew: after a takeover, and after its job was held for it and resumed.

    Args:
        in_a_row: Poison batches without one applied update between them that are too many.
        share: Of the last `SETTLED_WINDOW` settled batches, more than which are too many.
    """

    def __init__(self, in_a_row: int, share: float) -> None:
        self._most_in_a_row = in_a_row
        self._share = share
        self._in_a_row = 0
        self._settled = deque[bool](maxlen=SETTLED_WINDOW)  # whether each was poison

    def forget(self) -> None:
        """Count anew."""
        self._in_a_row = 0
        self._settled.clear()

    def applied(self, batches: int) -> None:
        """An update of so many batches was applied."""
        self._in_a_row = 0
        self._settled.extend([False] * batches)

    def quarantined(self) -> str:
        """A batch turned out to be poison; says why that is too much, empty where it is not."""
        self._in_a_row += 1
        self._settled.append(True)
        if self._in_a_row >= self._most_in_a_row:
            return f"{self._in_a_row} batches in a row"
        count = sum(self._settled)
        # Of a window that is not full yet, too: the first batch of a job may well be bad.
        if count > self._share * SETTLED_WINDOW:
            return f"{count} of the last {len(self._settled)} batches"
        return ""
