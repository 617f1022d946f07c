"""Members in memory compute the same weights as a single process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from msgspec import UNSET, structs

from common.collectives.port import Peer
from common.core.messages import (
    AttemptId,
    Member,
    Membership,
    ModelId,
    Reduce,
    WorkerId,
    reached_bits,
)
from common.errors import CorruptError, GroupError
from common.learning.checkpoint import TensorSlice, whole_of
from common.learning.errors import NotFiniteError
from common.learning.optimizers import OptimizerSettings
from common.learning.sliced_trainer import SlicedTrainer
from common.learning.slices import BLOCK
from common.learning.trainer import Trainer
from common.storage.memory import MemoryBlobs
from common.storage.store import CheckpointStore
from common.telemetry.metrics.worker import WorkerMetrics
from services.worker.held_weights import Formed, HeldSlices, HeldWhole
from services.worker.traffic import TrafficCounter, counted
from tests.fakes.group import MemoryGroup, MemoryNetwork
from tests.ulps import assert_within_ulps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from common.core.messages import Vector
    from common.learning.optimizers import Reduction
    from services.worker.held_weights import Gradients

PARAMETERS, BUFFERS, COUNT = 5 * BLOCK - 7, 30, 4
NUMBERS = PARAMETERS + BUFFERS
ADAM = OptimizerSettings("adam", 0.01, clip_norm=0.5)
SUMS = OptimizerSettings("sgd", 1.0)


def drawn(seed: int) -> Vector:
    return np.random.default_rng(seed).normal(size=NUMBERS).astype(np.float32)


def part(vector: Vector, samples: int) -> tuple[torch.Tensor, int]:
    """Return a gradient as a member has it on its device."""
    return torch.from_numpy(vector), samples


def numbers() -> SlicedTrainer:
    return SlicedTrainer(drawn(0), PARAMETERS, ADAM, count=COUNT)


class _Members:
    """Members with slices; an update has one gradient of each."""

    def __init__(self, count: int) -> None:
        self.held = [HeldSlices(numbers()) for _ in range(count)]
        self._network = MemoryNetwork()
        self._groups = [self._network.groups() for _ in range(count)]
        self._updates = 0

    def update(self, *owners: tuple[int, ...], gradients: Sequence[Vector]) -> set[int]:
        """Enter and apply an update; return the digests."""
        self._updates += 1
        attempt = AttemptId(1, self._updates, self._updates)
        members = tuple(Member(WorkerId(f"w{n}"), n) for n in range(len(self.held)))
        membership = Membership(self._updates, members, owners)
        peers = [Peer(f"w{n}", each.address) for n, each in enumerate(self._groups)]
        reduce = Reduce(attempt, (), 4 * len(members), measured=True)

        def enter(rank: int) -> int:
            group = self._groups[rank].group(f"{self._updates}", peers, rank)
            if len(members) > 1:
                group.form()
            formed = Formed((1, self._updates), membership, rank, group)
            held = self.held[rank]
            held.add_up(formed, reduce, [part(gradients[rank], 4)])
            found, square = held.result(reduce)
            total = np.sum(gradients, axis=0)
            assert isinstance(square, float)
            assert_within_ulps(square, np.square(total[:PARAMETERS], dtype=np.float64).sum(), 1)
            held.apply()
            return found

        with ThreadPoolExecutor(len(members)) as pool:
            return set(pool.map(enter, range(len(members))))


def stepped(trainer: Trainer, updates: Iterable[Sequence[Vector]]) -> Trainer:
    for gradients in updates:
        for gradient in gradients:
            trainer.add(0, gradient, 4)
        trainer.apply(0)
    return trainer


def alone(updates: Iterable[Sequence[Vector]]) -> Trainer:
    return stepped(Trainer(drawn(0), PARAMETERS, ADAM), updates)


def weights(held: HeldSlices | Trainer) -> Vector:
    found: Vector = held.weights.numpy() if isinstance(held, HeldSlices) else held.vector.numpy()
    return found


def test_slice_owners_compute_the_weights_of_a_single_process() -> None:
    # Slices 0 to 3 have two owners each in the first update, and one of the two in the second.
    group, updates = _Members(3), [[drawn(10 * n + m) for m in range(3)] for n in range(2)]
    assert len(group.update((2, 0), (1, 2), (2, 1), (0, 1), gradients=updates[0])) == 1
    assert len(group.update((0,), (2,), (1,), (1,), gradients=updates[1])) == 1

    expected = weights(alone(updates))
    assert all(weights(each).tobytes() == weights(group.held[0]).tobytes() for each in group.held)
    assert_within_ulps(weights(group.held[0]), expected, 4)


def test_single_member_owns_all_slices() -> None:
    group, updates = _Members(1), [[drawn(1)], [drawn(2)]]
    for gradients in updates:
        group.update(*[(0,)] * COUNT, gradients=gradients)
    assert_within_ulps(weights(group.held[0]), weights(alone(updates)), 1)


def test_non_finite_sum_of_slices_raises_for_all_members() -> None:
    group, gradients = _Members(2), [drawn(1), drawn(2)]
    gradients[0][3] = np.inf
    with pytest.raises(NotFiniteError):
        group.update((1,), (1,), (1,), (1,), gradients=gradients)


def test_member_continues_with_copied_and_stored_slices() -> None:
    group, updates = _Members(2), [[drawn(1), drawn(2)], [drawn(3), drawn(4)]]
    group.update((0,), (1,), (1,), (0,), gradients=updates[0])
    first, second = group.held
    stored = whole_of([first.stored((0, 3)), second.stored((1, 2))])
    third = HeldSlices(numbers())
    third.restore(first.snapshot((0,)), (0,))
    more = HeldSlices(numbers())
    more.restore(second.snapshot((2, 1)), (1, 2))
    third.adopt(more, (1, 2))
    group.held = [HeldSlices(numbers()), third]
    group.held[0].restore(stored, UNSET)
    group.update((1,), (1,), (1,), (0,), gradients=updates[1])

    assert_within_ulps(weights(third), weights(alone(updates)), 4)
    trainer = Trainer(drawn(0), PARAMETERS, ADAM)
    # `stored` has the state after the first update.
    trainer.restore(stored)
    assert weights(trainer).tobytes() != weights(alone(updates)).tobytes()
    assert_within_ulps(weights(trainer), weights(alone(updates[:1])), 4)


def test_missing_slices_of_a_version_are_reported() -> None:
    held = HeldSlices(numbers())
    with pytest.raises(CorruptError, match=r"slices \[1, 3\] are missing"):
        whole_of([held.stored((0,)), held.stored((2,))])
    with pytest.raises(CorruptError, match=r"it lacks slices \[1\]"):
        held.restore(held.snapshot((0,)), (0, 1))


MOMENTUM = OptimizerSettings("momentum", 0.1, clip_norm=0.5)
SETTINGS = [OptimizerSettings("sgd", 0.5), MOMENTUM, ADAM]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: each.name)
def test_step_from_a_sum_equals_a_single_trainer_step_bit_for_bit(
    settings: OptimizerSettings, reduction: Reduction
) -> None:
    held = HeldWhole(Trainer(drawn(0), PARAMETERS, settings, reduction))
    alone = Trainer(drawn(0), PARAMETERS, settings, reduction)
    group = MemoryNetwork().groups().group("one", [Peer("w", "")], 0)
    members = (Member(WorkerId("w"), 1),)
    formed = Formed((1, 1), Membership(1, members), 0, group)
    digests = set[int]()
    for number in range(1, 4):
        parts = [part(drawn(10 * number), 3), part(drawn(10 * number + 1), 5)]
        kept = [vector.clone() for vector, _ in parts]
        reduce = Reduce(AttemptId(1, 1, number), (), 8, learning_rate=0.1 * number, measured=True)
        # The attempt after a failed one has the same result.
        for _ in range(2):
            held.add_up(formed, reduce, parts)
            found, square = held.result(reduce)
        held.apply()
        held.settle()
        digests.add(found)
        for vector, samples in parts:
            alone.add(0, vector.numpy(), samples)
        assert square == alone.square(0)
        alone.apply(0, 0.1 * number)
        assert torch.equal(held.weights, alone.vector)
        assert held.snapshot(UNSET) == alone.snapshot()
        assert all(torch.equal(vector, k) for (vector, _), k in zip(parts, kept, strict=True))
    assert len(digests) == 3


def test_adam_state_moves_from_board_to_replicas_and_back_bit_for_bit() -> None:
    # One trainer makes updates 1 and 2, two replicas 3 and 4, and one trainer 5 and 6. The state is
    # stored and loaded in between, and compared with that of a trainer that makes all six.
    updates = [[drawn(2 * n), drawn(2 * n + 1)] for n in range(6)]
    kept, store = Trainer(drawn(0), PARAMETERS, ADAM), CheckpointStore(MemoryBlobs(), "job")
    stepped(kept, updates[:2])
    first, second = ModelId(1, 2), ModelId(2, 4)
    store.put_state(first, kept.snapshot())

    members = [HeldWhole(Trainer(drawn(9), PARAMETERS, ADAM)) for _ in range(2)]
    for held in members:
        held.restore(store.state(first), UNSET)
        held.settle()
    network = MemoryNetwork()
    groups = [network.groups() for _ in members]
    peers = [Peer(f"w{n}", each.address) for n, each in enumerate(groups)]
    named = tuple(Member(WorkerId(f"w{n}"), n) for n in range(2))

    def enter(rank: int) -> list[int]:
        group, digests = groups[rank].group("1", peers, rank), list[int]()
        group.form()
        formed, held = Formed((1, 1), Membership(1, named), rank, group), members[rank]
        for number, gradients in enumerate(updates[2:4]):
            reduce = Reduce(AttemptId(1, 1, number), (), 8)
            held.add_up(formed, reduce, [part(gradients[rank], 4)])
            digests.append(held.result(reduce)[0])
            held.apply()
            held.settle()
        return digests

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(enter, range(2))
    assert one == other
    store.put_state(second, members[1].stored(UNSET))

    back = Trainer(drawn(8), PARAMETERS, ADAM)
    back.restore(store.state(second))
    assert back.snapshot() == alone(updates[:4]).snapshot()
    stepped(back, updates[4:])
    assert back.snapshot() == alone(updates).snapshot()


@pytest.mark.parametrize("owners", [1, 2])
def test_rounded_gradients_take_half_the_bytes_and_are_summed_in_float32(owners: int) -> None:
    parts = drawn(0), PARAMETERS, OptimizerSettings("adamw", 0.01)
    ranks = range(3)
    owned = tuple(tuple((n + m) % 3 for m in range(owners)) for n in range(COUNT))
    gradients = [drawn(rank + 1) for rank in ranks]
    rounded = [torch.from_numpy(each).bfloat16().float() for each in gradients]
    total = (rounded[0] + rounded[1] + rounded[2]).bfloat16().float()
    expected = Trainer(*parts)
    expected.step(total.clone(), 12)

    def traffic(layout: str, wire: torch.dtype) -> int:
        """Update three members; return the bytes of gradients that they sent and received."""
        network, counters = MemoryNetwork(), [TrafficCounter(WorkerMetrics(("a",))) for _ in ranks]
        groups = [network.groups() for _ in ranks]
        peers = [Peer(f"w{n}", each.address) for n, each in enumerate(groups)]
        members = tuple(Member(WorkerId(f"w{n}"), n) for n in ranks)
        held: list[HeldWhole | HeldSlices] = [
            HeldWhole(Trainer(*parts), wire)
            if layout == "replicas"
            else HeldSlices(SlicedTrainer(*parts, count=COUNT), wire)
            for _ in ranks
        ]

        def enter(rank: int) -> int:
            group = counted(groups[rank], counters[rank])("1", peers, rank)
            group.form()
            formed = Formed((1, 1), Membership(1, members, owned), rank, group)
            reduce = Reduce(AttemptId(1, 1, 1), (), 12)
            held[rank].add_up(formed, reduce, [part(gradients[rank], 4)])
            found, _ = held[rank].result(reduce)
            held[rank].apply()
            return found

        with ThreadPoolExecutor(3) as pool:
            assert len(set(pool.map(enter, ranks))) == 1
        found = {each.weights.numpy().tobytes() for each in held}
        assert len(found) == 1
        if wire == torch.bfloat16:
            assert found == {expected.vector.numpy().tobytes()}
        return sum(each.traffic.total for each in counters)

    one_way = 2 * 4 * NUMBERS * 2  # sent and received, by all but one of three
    for layout, weights_bytes in (("replicas", 0), ("slices", one_way)):
        full = traffic(layout, torch.float32) - weights_bytes
        half = traffic(layout, torch.bfloat16) - weights_bytes
        # Counts of samples and members are not halved.
        assert half == pytest.approx(full / 2, abs=600)


def test_rounded_gradients_of_a_model_smaller_than_the_group_are_summed() -> None:
    # One member sums all numbers, because a part is at least one block.
    network = MemoryNetwork()
    groups = [network.groups() for _ in range(3)]
    peers = [Peer(f"w{n}", each.address) for n, each in enumerate(groups)]
    members = tuple(Member(WorkerId(f"w{n}"), n) for n in range(3))

    def enter(rank: int) -> list[float]:
        group = groups[rank].group("1", peers, rank)
        group.form()
        held = HeldWhole(Trainer(np.zeros(4, np.float32), 4, SUMS, "sum"), torch.bfloat16)
        formed = Formed((1, 1), Membership(1, members), rank, group)
        reduce = Reduce(AttemptId(1, 1, 1), (), 12)
        held.add_up(formed, reduce, [(torch.full((4,), rank + 1.0), 4)])
        held.result(reduce)
        held.apply()
        found: list[float] = held.weights.tolist()
        return found

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(enter, range(3))) == [[-6.0] * 4] * 3


def test_non_finite_sum_of_a_replica_cannot_be_applied() -> None:
    held = HeldWhole(Trainer(drawn(0), PARAMETERS, ADAM))
    group = MemoryNetwork().groups().group("one", [Peer("w", "")], 0)
    formed = Formed((1, 1), Membership(1, (Member(WorkerId("w"), 1),)), 0, group)
    reduce, large = Reduce(AttemptId(1, 1, 1), (), 8), torch.full((NUMBERS,), 3e38)
    held.add_up(formed, reduce, [(large, 4), (large, 4)])
    with pytest.raises(NotFiniteError):
        held.result(reduce)
    with pytest.raises(AssertionError, match="no result is pending"):
        held.apply()


def of_one(number: int) -> tuple[Formed, Reduce]:
    """Return a group of one, and its attempt at an update."""
    group = MemoryNetwork().groups().group("one", [Peer("w", "")], 0)
    membership = Membership(1, (Member(WorkerId("w"), 1),), ((0,),) * COUNT)
    attempt = AttemptId(1, 1, number)
    return Formed((1, 1), membership, 0, group), Reduce(attempt, (), 8, measured=True)


def whole() -> HeldWhole:
    return HeldWhole(Trainer(drawn(0), PARAMETERS, ADAM))


def sliced() -> HeldSlices:
    return HeldSlices(numbers())


def updated(held: HeldSlices | HeldWhole, number: int, mine: Gradients) -> bytes:
    """Return weights and results after an update of a group of one."""
    formed, reduce = of_one(number)
    held.add_up(formed, reduce, mine)
    found = held.result(reduce)
    held.apply()
    return held.weights.numpy().tobytes() + repr(found).encode()


def test_members_leave_tensors_that_no_gradient_reached_as_they_are() -> None:
    # tensor     0             1
    # slice      0   1   2   3 (also has the buffers)
    sizes = 2 * BLOCK, PARAMETERS - 2 * BLOCK
    layout = (
        *(TensorSlice((f"{n}",), (size,)) for n, size in enumerate(sizes)),
        TensorSlice(("buffer",), (BUFFERS,), is_buffer=True),
    )
    reduction: Reduction = "mean"
    parts = drawn(0), PARAMETERS, OptimizerSettings("adamw", 0.01), reduction, layout
    alone = Trainer(*parts)
    members: list[HeldWhole | HeldSlices] = [HeldWhole(Trainer(*parts))]
    members.append(HeldSlices(SlicedTrainer(*parts, count=COUNT)))
    for number, mask in enumerate((0b11, 0b01, 0b10), start=1):
        alone.add(0, drawn(number), 8, mask)
        alone.apply(0)
        for held in members:
            formed, reduce = of_one(number)
            reduce = structs.replace(reduce, reached=reached_bits(mask))
            held.add_up(formed, reduce, [part(drawn(number), 8)])
            held.result(reduce)
            held.apply()
    assert members[0].snapshot(UNSET) == alone.snapshot()
    assert whole_of([members[1].stored(UNSET)]) == alone.snapshot()


@pytest.mark.parametrize("make", [whole, sliced])
@pytest.mark.parametrize(
    ("early", "wanted"),
    [
        ("", "ab"),
        ("ab", "ab"),
        ("ba", "ab"),
        ("a", "ab"),
        ("abc", "ab"),
        ("ca", "a"),
        ("aab", "ab"),
    ],
)
def test_update_contains_only_its_named_gradients_whatever_was_added_before(
    make: Callable[[], HeldSlices | HeldWhole], early: str, wanted: str
) -> None:
    parts = {name: part(drawn(10 + n), 8 // len(wanted)) for n, name in enumerate("abc")}
    mine = [parts[name] for name in wanted]
    plain, held = make(), make()
    # No part of the first update is left in the second.
    for number in (1, 2):
        for name in early:
            held.add_own(*parts[name])
        assert updated(held, number, mine) == updated(plain, number, mine)


@pytest.mark.parametrize("make", [whole, sliced])
def test_gradient_in_reused_memory_is_not_mistaken_for_the_previous_one(
    make: Callable[[], HeldSlices | HeldWhole],
) -> None:
    plain, held, memory = make(), make(), torch.from_numpy(drawn(1))
    held.add_own(memory[:], 8)
    memory[:] = torch.from_numpy(drawn(2))
    # The first gradient's memory was released, and has another gradient now.
    another = memory[:]
    assert updated(held, 1, [(another, 8)]) == updated(plain, 1, [part(drawn(2), 8)])


@pytest.mark.parametrize("make", [whole, sliced])
def test_member_without_gradients_adds_nothing_from_before(
    make: Callable[[], HeldSlices | HeldWhole],
) -> None:
    network = MemoryNetwork()
    groups = [network.groups() for _ in range(2)]
    peers = [Peer(f"w{n}", each.address) for n, each in enumerate(groups)]
    members = tuple(Member(WorkerId(f"w{n}"), n) for n in range(2))
    membership = Membership(1, members, ((0,), (1,), (1,), (0,)))
    _, reduce = of_one(1)

    def enter(rank: int) -> bytes:
        group, held = groups[rank].group("1", peers, rank), make()
        group.form()
        held.add_own(*part(drawn(1 + rank), 8))
        mine = [] if rank else [part(drawn(1), 8)]
        held.add_up(Formed((1, 1), membership, rank, group), reduce, mine)
        held.result(reduce)
        held.apply()
        return held.weights.numpy().tobytes()

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(enter, range(2))
    plain = make()
    updated(plain, 1, [part(drawn(1), 8)])
    assert one == other == plain.weights.numpy().tobytes()


@pytest.mark.parametrize("make", [whole, sliced])
def test_result_is_pending_until_it_is_applied_or_another_attempt_begins(
    make: Callable[[], HeldSlices | HeldWhole],
) -> None:
    # calls     add_up  result  add_up (fails)  add_up  result  apply
    # pending   ······  ██████  ··············  ······  ██████  ·····
    held = make()
    formed, reduce = of_one(1)
    mine = [part(drawn(1), 8)]
    held.add_own(*mine[0])
    assert not held.is_pending
    held.add_up(formed, reduce, mine)
    held.result(reduce)
    assert held.is_pending
    with pytest.raises(GroupError, match="expected 9 of 1"):
        held.add_up(formed, structs.replace(reduce, samples=9), mine)
    assert not held.is_pending
    held.add_up(formed, reduce, mine)
    assert not held.is_pending
    held.result(reduce)
    assert held.is_pending
    held.apply()
    assert not held.is_pending


class _Broken(MemoryGroup):
    """A group whose sum fails, and is written to afterwards."""

    def all_reduce(self, vector: torch.Tensor) -> None:
        self.summed = vector
        raise GroupError("broken")


def test_sum_of_a_broken_call_is_not_used_again() -> None:
    held, plain, mine = whole(), whole(), [part(drawn(1), 4)]
    network = MemoryNetwork()
    peers, members = [Peer("w", "a"), Peer("v", "b")], [Member(WorkerId(n), 1) for n in "wv"]
    broken = _Broken(network, "1", peers, 0, 1.0)
    formed = Formed((1, 1), Membership(1, tuple(members)), 0, broken)
    with pytest.raises(GroupError, match="broken"):
        held.add_up(formed, of_one(1)[1], mine)
    held.add_own(*mine[0])
    broken.summed.fill_(7)
    reduce = structs.replace(of_one(2)[1], samples=4)
    for each in (held, plain):
        each.add_up(of_one(2)[0], reduce, mine)
    assert held.result(reduce) == plain.result(reduce)


def test_digest_covers_the_current_weights_whether_or_not_they_were_read_before() -> None:
    looked, plain, mine = whole(), whole(), [part(drawn(1), 8)]
    looked.settle()
    for number in (1, 2):
        assert updated(looked, number, mine) == updated(plain, number, mine)
        looked.settle()
    for each in (looked, plain):
        each.restore(whole().snapshot(UNSET), UNSET)
    assert updated(looked, 3, mine) == updated(plain, 3, mine) == updated(whole(), 1, mine)
