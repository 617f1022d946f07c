"""A fleet that is slow after a freeze, or a pipeline with an idle worker, misses its goal."""

from __future__ import annotations

from common.core.messages import Assignment, ModelId, TriggerId, UpdateTrigger, WorkerId
from load import pipeline
from load.faults import thaws
from load.faults.drill import Conditions
from load.faults.thaws import Thawed, Thaws
from load.harness.processor import Block
from load.harness.witness import SeenRound
from tests.unit.core.examples import A, B, batch


def thawed(updates: float, *batches: float) -> Thawed:
    shares = {f"w{number}": share for number, share in enumerate(batches)}
    return Thawed(2, 10.0, leader=True, owned_s=1.0, updates_share=updates, batches_share=shares)


def test_thaw_misses_its_goal_if_updates_or_one_worker_are_slow() -> None:
    enough, slow, idle = thawed(0.9, 0.8, 1.2), thawed(0.89, 0.9, 0.9), thawed(1.0, 1.5, 0.4)

    assert Thaws(Conditions(), [enough], 0.0).missed == []
    case = "2 workers and leader, 10 s"
    assert Thaws(Conditions(), [enough, slow, idle], 0.0).missed == [
        f"{case}: updates/s 0.89 of before the freeze, required 0.9",
        f"{case}: w1 computes 0.40 of its batches before the freeze, required 0.8",
    ]


def test_batch_assigned_to_two_workers_counts_for_the_last() -> None:
    def trigger(number: int, worker: WorkerId, *offsets: int) -> UpdateTrigger:
        orders = (Assignment(worker, tuple(map(batch, offsets))),)
        return UpdateTrigger(TriggerId(1, number), ModelId(1, 0), orders)

    round_ = SeenRound(ModelId(1, 0), [(0.0, trigger(1, A, 0, 1)), (1.0, trigger(2, B, 1))])

    assert thaws._computed([round_, round_]) == {A: 2, B: 2}  # noqa: SLF001 -- how it counts


def test_block_with_an_idle_worker_misses_its_goal() -> None:
    def block(one: float, other: float) -> Block:
        return Block(1.0, {"worker-0": one, "worker-1": other, "others": 0.0})

    assert pipeline._uneven([block(0.5, 1.0), block(0.9, 0.9)]) == []  # noqa: SLF001 -- its verdict
    assert pipeline._uneven([block(0.9, 0.9), block(0.9, 0.03)]) == [  # noqa: SLF001 -- its verdict
        "block 2: the workers used 0.90, 0.03 cores, required at least 0.5 of the most"
    ]
