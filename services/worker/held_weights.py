"""The state that a group member holds, and how members' gradients become a step.

    whole    all_reduce the sum ──────────────────▶ step, once the update was read back
    slices   exchange sums ▶ owners prepare steps ▶ gather all weights ▶ commit, once read back

"Read back" means from the audit, Kafka's record of all updates. With `wire: bfloat16`, several
members send rounded gradients: in both layouts, the same parts are added up in float32 and in order
of ranks, and the sum is rounded. Vectors have (P + B,) numbers: parameters, then buffers.

The collective thread calls `add_own`, `add_up` and `settle` without the member's lock, and `result`
with it. So no result is pending, and nothing is applied, while one of the three runs. All other
methods are called with the lock held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, isfinite
from typing import TYPE_CHECKING, TypeAlias

import torch
from msgspec import UNSET

from common.core.messages import reached_mask
from common.errors import GroupError
from common.learning.errors import NotFiniteError
from common.learning.parameters import is_finite, square_of
from common.learning.slices import cut, digest, lengths

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from msgspec import UnsetType
    from torch import Tensor

    from common.collectives.port import Group
    from common.core.messages import Member, Membership, Reduce, Slices
    from common.learning.sliced_trainer import SlicedTrainer
    from common.learning.trainer import Trainer

# Gradients and their samples.
Gradients: TypeAlias = Sequence[tuple["Tensor", int]]
HeldWeights: TypeAlias = "HeldWhole | HeldSlices"


@dataclass(slots=True)
class Formed:
    """A process group of one membership. Only the collective thread knows if it is connected."""

    # Epoch and number of the membership.
    place: tuple[int, int]
    membership: Membership
    rank: int
    group: Group
    failed: GroupError | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """Members in order of rank."""
        return self.membership.members


class _OwnSum:
    """This member's part of the sum, added up as soon as gradients are computed.

    Args:
        out: (P + B,) float32 on the member's device, sum over the samples.
    """

    def __init__(self, out: Tensor) -> None:
        self._out = out
        self._added = list[tuple["Tensor", int]]()

    def add(self, vector: Tensor, samples: int) -> None:
        """Add a gradient."""
        if self._added:
            self._out += vector
        else:
            self._out.copy_(vector)
        self._added.append((vector, samples))

    def take(self, wanted: Gradients) -> int:
        """Make the sum that of `wanted` alone, and return its number of samples."""
        # Vectors are compared by id. No id can have been reused, because `_added` has kept its
        # vectors alive until here.
        if [id(vector) for vector, _ in self._added] != [id(vector) for vector, _ in wanted]:
            self._added.clear()
            for part in wanted:
                self.add(*part)
        if not wanted:
            self._out.zero_()
        # From now on, `out` may be replaced by the sum of all members.
        self._added.clear()
        return sum(samples for _, samples in wanted)


def _check_samples(samples: float, members: int, reduce: Reduce, formed: Formed) -> None:
    if not isclose(samples, reduce.samples, rel_tol=1e-5) or members != len(formed.members):
        raise GroupError(
            f"the sum contains {samples:g} samples of {members:g} members, expected"
            f" {reduce.samples} of {len(formed.members)}"
        )


class HeldWhole:
    """All weights and optimizer state. The step is taken once the update was read back.

    Args:
        trainer: The state.
        wire: Type of gradients that travel.
    """

    def __init__(self, trainer: Trainer, wire: torch.dtype = torch.float32) -> None:
        self._trainer = trainer
        self._wire = wire
        self._make_sum()
        # Digest of the weights; None until it is needed.
        self._digest: int | None = None
        # The attempt whose result `_sum` is.
        self._reduce: Reduce | None = None

    def _make_sum(self) -> None:
        # (P + B + 2,) float32 on the member's device, sum of gradients, samples and members
        self._sum = self._trainer.vector.new_empty(len(self._trainer.vector) + 2)
        self._own = _OwnSum(self._sum[:-2])

    @property
    def weights(self) -> Tensor:
        """Weights on the member's device, not copied."""
        return self._trainer.vector

    @property
    def is_pending(self) -> bool:
        """True if `_sum` is a result that was not applied."""
        return self._reduce is not None

    def add_own(self, vector: Tensor, samples: int) -> None:
        """Add a gradient before members enter."""
        self._own.add(vector, samples)

    def add_up(self, formed: Formed, reduce: Reduce, mine: Gradients) -> None:
        """Sum all gradients, and drop a pending result.

        Raises:
            GroupError: If the group breaks, or other members reduced another update.
        """
        self._reduce = None
        counts = self._sum[-2:]
        counts.copy_(torch.tensor((self._own.take(mine), 1)))
        if len(formed.members) > 1:
            try:
                self._sum_up(formed)
            except GroupError:
                # A broken call may still write into the vector.
                self._make_sum()
                raise
        samples, members = counts.tolist()
        _check_samples(samples, members, reduce, formed)

    def _sum_up(self, formed: Formed) -> None:
        """Sum the vectors and counts of all members in place."""
        group, total, counts = formed.group, self._sum[:-2], self._sum[-2:]
        if self._wire == torch.float32:
            group.all_reduce(self._sum)
            return
        ranks = len(formed.members)
        places = cut(len(total), ranks)
        sizes = lengths(places, range(ranks), ranks)
        rounded, own = total.to(self._wire), places[formed.rank]
        parts = rounded.new_empty(ranks, sizes[formed.rank])
        group.exchange(rounded, sizes, parts.view(-1), [sizes[formed.rank]] * ranks)
        total[own].copy_(parts[0])
        for part in parts[1:]:
            total[own] += part
        rounded[own] = total[own]
        group.gather(rounded, sizes)
        total.copy_(rounded)
        group.all_reduce(counts)

    def result(self, reduce: Reduce) -> tuple[int, float | UnsetType]:
        """Return the digest of the sum and of the current weights, and the sum's squared norm.

        Raises:
            NotFiniteError: If the sum is not finite.
        """
        total = self._sum[:-2]
        if not is_finite(total):
            raise NotFiniteError("the gradient", None)
        weights = self._digested()
        self._reduce = reduce
        # The record has room for 63 bits.
        found = (digest(total) ^ weights) >> 1
        if not reduce.measured:
            return found, UNSET
        return found, square_of(total[: self._trainer.parameter_count])

    def apply(self) -> None:
        """Take the step."""
        if self._reduce is None:
            raise AssertionError("no result is pending")
        # From here on, there is no pending result.
        reduce, self._reduce = self._reduce, None
        rates = reduce.learning_rate, reduce.scale
        reached = reached_mask(reduce.reached)
        self._trainer.step(self._sum[:-2], reduce.samples, *rates, reached=reached)
        self._digest = None

    def settle(self) -> None:
        """Compute the digest of the weights ahead of its use."""
        self._digested()

    def _digested(self) -> int:
        if self._digest is None:
            self._digest = digest(self._trainer.vector)
        return self._digest

    def snapshot(self, slices: Slices) -> bytes:  # noqa: ARG002 -- everything
        """Copy the complete state."""
        return self._trainer.snapshot()

    stored = snapshot

    def model(self) -> bytes:
        """Copy the weights without the optimizer state."""
        return self._trainer.snapshot(optimizer=False)

    def restore(self, data: bytes, slices: Slices) -> None:  # noqa: ARG002 -- as above
        """Replace the complete state."""
        self._trainer.restore(data)
        self._digest = None

    def adopt(self, other: HeldWeights, slices: Slices) -> None:
        """Do nothing: the state is always complete."""


class HeldSlices:
    """All weights, and the optimizer state of some slices. A step is prepared, then committed.

    Args:
        trainer: The state.
        wire: Type of gradients that travel.
    """

    def __init__(self, trainer: SlicedTrainer, wire: torch.dtype = torch.float32) -> None:
        self._trainer = trainer
        self._wire = wire
        # (P + B,) float32 on the member's device, sum of this member's gradients
        self._sum = torch.empty_like(trainer.following)
        self._own = _OwnSum(self._sum)
        # Slices that the pending result prepared.
        self._owned: tuple[int, ...] = ()
        # Squared norm of the gradient sum of the pending result.
        self._square = 0.0
        # True if there is a pending result.
        self._pending = False

    @property
    def weights(self) -> Tensor:
        """Weights on the member's device, not copied."""
        return self._trainer.weights

    @property
    def is_pending(self) -> bool:
        """True if the next weights are prepared and not committed."""
        return self._pending

    def add_own(self, vector: Tensor, samples: int) -> None:
        """Add a gradient before members enter."""
        self._own.add(vector, samples)

    def add_up(self, formed: Formed, reduce: Reduce, mine: Gradients) -> None:
        """Reduce gradients at the owners of slices, prepare their steps, and gather all weights.

        Raises:
            GroupError: If the group breaks, or other members reduced another update.
            NotFiniteError: If the sum is not finite.
        """
        self._pending = False
        trainer, membership = self._trainer, formed.membership
        owners, rank = membership.owners or (), formed.rank
        samples = self._own.take(mine)
        firsts = [ranks[0] for ranks in owners]
        totals = self._at_first_owners(formed, firsts)
        # Rows by rank: samples, 1 if a sum is not finite, and the squared norm of its slices' sums.
        facts = torch.zeros(len(formed.members), 3, dtype=torch.float64)
        finite = all(map(is_finite, totals.values()))
        own = samples, not finite, trainer.square(totals)
        facts[rank] = torch.tensor(own, dtype=torch.float64)
        totals |= self._at_other_owners(formed, owners, totals)
        self._gather(formed, facts.view(-1).view(torch.float32), [6] * len(facts))
        _check_samples(float(facts[:, 0].sum()), len(facts), reduce, formed)
        self._square = float(facts[:, 2].sum())
        if facts[:, 1].any() or not isfinite(self._square):
            raise NotFiniteError("the gradient", None)
        self._owned = tuple(sorted(totals))
        rates = reduce.learning_rate, reduce.scale
        reached = reached_mask(reduce.reached)
        trainer.prepare(totals, reduce.samples, self._square, *rates, reached=reached)
        self._gather_weights(formed, firsts)

    def _exchange(
        self,
        formed: Formed,
        vectors: Mapping[int, Tensor] | Callable[[int], Tensor],
        sent: Sequence[Collection[int]],
        received: Sequence[Collection[int]],
    ) -> list[dict[int, Tensor]]:
        """Send some slices to each rank, and return the received slices by rank."""
        of = vectors if callable(vectors) else vectors.__getitem__
        places = self._trainer.places
        parts = [of(number) for numbers in sent for number in numbers]
        outgoing = torch.cat(parts) if parts else self._sum.new_empty(0)
        sizes = [
            [sum(places[n].stop - places[n].start for n in numbers) for numbers in each]
            for each in (sent, received)
        ]
        incoming = outgoing
        if len(formed.members) > 1:
            outgoing = outgoing.to(self._wire)
            incoming = outgoing.new_empty(sum(sizes[1]))
            formed.group.exchange(outgoing, sizes[0], incoming, sizes[1])
            incoming = incoming.float()
        found, start = list[dict[int, "Tensor"]](), 0
        for numbers in received:
            found.append({})
            for number in numbers:
                end = start + places[number].stop - places[number].start
                found[-1][number], start = incoming[start:end], end
        return found

    def _at_first_owners(self, formed: Formed, firsts: Sequence[int]) -> dict[int, Tensor]:
        """Return the sums of the slices whose first owner is this member."""
        ranks = range(len(formed.members))
        sent = [[n for n, first in enumerate(firsts) if first == rank] for rank in ranks]
        places = self._trainer.places
        own = sent[formed.rank]
        parts = self._exchange(formed, lambda n: self._sum[places[n]], sent, [own for _ in ranks])
        totals = {number: parts[0][number].clone() for number in own}
        # The order of ranks is fixed, so that sums have the same bits.
        for part in parts[1:]:
            for number in own:
                totals[number] += part[number]
        if len(parts) > 1:
            # Further owners get the rounded sum, and all owners need the same bits.
            totals = {number: total.to(self._wire).float() for number, total in totals.items()}
        return totals

    def _at_other_owners(
        self, formed: Formed, owners: Sequence[Sequence[int]], totals: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return the sums of the slices that this member owns without being their first owner."""
        if all(len(ranks) == 1 for ranks in owners):
            return {}
        ranks, own = range(len(formed.members)), formed.rank
        sent = [[n for n in totals if rank in owners[n][1:]] for rank in ranks]
        received = [
            [n for n, each in enumerate(owners) if each[0] == rank and own in each[1:]]
            for rank in ranks
        ]
        parts = self._exchange(formed, totals, sent, received)
        return {number: total.clone() for part in parts for number, total in part.items()}

    def _gather(self, formed: Formed, vector: Tensor, sizes: Sequence[int]) -> None:
        if len(formed.members) > 1:
            formed.group.gather(vector, sizes)

    def _gather_weights(self, formed: Formed, firsts: Sequence[int]) -> None:
        """Send the next weights of each slice from its first owner to all members."""
        following, places = self._trainer.following, self._trainer.places
        order = sorted(range(len(places)), key=lambda n: (firsts[n], n))
        arranged = torch.cat([following[places[n]] for n in order])
        self._gather(formed, arranged, lengths(places, firsts, len(formed.members)))
        start = 0
        for number in order:
            place = places[number]
            end = start + place.stop - place.start
            following[place].copy_(arranged[start:end])
            start = end

    def result(self, reduce: Reduce) -> tuple[int, float | UnsetType]:
        """Return the digest of the next weights (equal on all machines), and the squared norm."""
        self._pending = True
        return digest(self._trainer.following) >> 1, self._square if reduce.measured else UNSET

    def apply(self) -> None:
        """Commit the prepared step."""
        self._pending = False
        self._trainer.commit(self._owned)

    def settle(self) -> None:
        """Do nothing: a result has the digest of the next weights, not of these."""

    def _numbers(self, slices: Slices) -> tuple[int, ...]:
        return tuple(range(len(self._trainer.places))) if slices is UNSET else slices

    def snapshot(self, slices: Slices) -> bytes:
        """Copy the weights and the given slices."""
        return self._trainer.snapshot(self._numbers(slices))

    def stored(self, slices: Slices) -> bytes:
        """Copy the given slices with their weights."""
        return self._trainer.snapshot(self._numbers(slices), whole=False)

    def model(self) -> bytes:
        """Copy the weights without the optimizer state."""
        return self._trainer.model()

    def restore(self, data: bytes, slices: Slices) -> None:
        """Replace the weights and the given slices."""
        self._trainer.restore(data, self._numbers(slices))

    def adopt(self, other: HeldWeights, slices: Slices) -> None:
        """Take over the given slices of the same version."""
        if isinstance(other, HeldSlices):
            self._trainer.adopt(other._trainer, self._numbers(slices))  # noqa: SLF001 -- of its kind
