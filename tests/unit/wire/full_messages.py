"""One message of each wire type, with every field set."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from common.core.job_placement import JobDemand, WorkerPlacement
from common.core.messages import (
    Assignment,
    AttemptId,
    Batch,
    BatchReady,
    Broken,
    CheckpointStored,
    Copy,
    Drifted,
    Evaluated,
    Failed,
    Gradient,
    GradientReady,
    GroupOrders,
    GroupStatus,
    Lead,
    LeaderStatus,
    Member,
    Membership,
    MetricSum,
    ModelId,
    Opened,
    Quarantined,
    Reduce,
    Reduced,
    Reference,
    Replayed,
    Requeued,
    Schema,
    SchemaFound,
    Skipped,
    SpanExpired,
    StateReport,
    Stored,
    Synchrony,
    Traffic,
    TriggerId,
    Unsettled,
    UpdateApplied,
    UpdateTrigger,
    WorkerId,
    WorkerLeaving,
)
from common.core.scores import BINS
from common.core.spans import LogPosition, Partition, Span
from common.spot.provisioning import records as plans

W1 = WorkerId("w1")
ADDRESS = (Span("ads", 0, 10, 20, 3, 1, 18, 2), Span("ads", 1, 5, 9, 0, -1, -1, -1))
SKIPPED = (Skipped("ads", 0, 11, "no json", (2, 1)),)
BATCH = Batch(7, W1, ADDRESS, 5, SKIPPED)
OPENED = Opened(Partition("ads", 0), 4, 5, "id", 10, 1)
MODEL, EARLIER = ModelId(3, 6), ModelId(3, 5)
ATTEMPT = AttemptId(3, 2, 7)
M1, M2 = Member(W1, 11), Member(WorkerId("w2"), 12)
SCORES = (10, *(0,) * (2 * BINS - 1))
TRAFFIC = Traffic(5, 1000)
REACHED = bytes([5, 1])
SUMS = {"accuracy": MetricSum(3.0, 9)}
BELIEF = plans.EstimateRecord(1.0, 0.5, 0.25, 2.0)

CLAIMS = (
    BatchReady(W1, ADDRESS, 5, SKIPPED, 1.5, 2.5),
    SpanExpired(W1, ADDRESS),
    OPENED,
)
AUDITS = (
    Lead(3, MODEL, "me", 4, 1, "a tail", exact=True, slices=4),
    UpdateApplied(
        3,
        7,
        (BATCH, Batch(9, W1, ADDRESS[:1], 5)),
        10,
        0.5,
        {"accuracy": 0.5},
        "linger",
        2,
        0.1,
        {"ads": 3},
        5,
        Synchrony(2, 1, single_worker=True, local_rate=0.1),
        5,
        (1, 1),
        0.5,
        0.01,
        6.5,
        ATTEMPT,
        77,
        2,
        1000,
        {"accuracy": 9},
        1,
    ),
    Quarantined(3, BATCH, "expired", 6),
    Requeued(BATCH, "me", 1.5),
    Replayed(BATCH, "me", 1.5),
    CheckpointStored(3, 7),
    Evaluated(MODEL, 1.5, 10, {"loss": 0.5}, {"ads": {"loss": 0.5}}),
    Drifted(MODEL, 1.5, "ads", 0.5, 0.75),
)
SCHEMAS = (SchemaFound(5, Schema("AVRO", '"int"', (Reference("r", "{}"),))),)
STATUSES = (
    LeaderStatus(
        3,
        50,
        {Partition("ads", 0): 20},
        40,
        2,
        3,
        {Partition("ads", 0): 20},
        "triggers",
        {Partition("ads", 0): (OPENED,)},
        {Partition("ads", 0): LogPosition(20, "id", 1)},
        GroupStatus((W1,), {WorkerId("w2"): "memory"}, 2, (W1,), {W1: 1.5}),
        {WorkerId("w3"): "another model"},
    ),
)
ORDERS = GroupOrders(
    ModelId(2, 6),
    Membership(2, (M1, M2), ((0, 1), (1,))),
    AttemptId(3, 2, 6),
    5,
    Reduce(ATTEMPT, (((7,), (9,)), ((8,),)), 9, 0.5, 0.1, 2.0, measured=True, reached=REACHED),
    (Copy(M2, M1, (0, 2)),),
    True,  # noqa: FBT003 -- report
    M1,
    M2,
    (M1,),
    MODEL,
    {W1: "127.0.0.1:5000"},
    2,
)
TRIGGERS = (
    UpdateTrigger(
        TriggerId(3, 1),
        MODEL,
        (Assignment(W1, (BATCH,), 0.1, squared=True),),
        bytes(8),
        "replica",
        Unsettled(50, 40, 2, 3),
        5,
        EARLIER,
        b"abc",
        ORDERS,
        "digest",
    ),
)
REPLIES = (
    Gradient(
        *(W1, MODEL, (7, 9), 10, 1.0, SUMS, 0.1, 0.5, 2.0, SCORES, True, TRAFFIC, REACHED, None),
    ),
    GradientReady(
        *(W1, MODEL, (7, 9), 10, 1.0, SUMS, 0.1, 0.5, 2.0, SCORES, True, TRAFFIC, REACHED),
        life=11,
    ),
    Reduced(W1, MODEL, 11, ATTEMPT, 77, 2.0),
    Broken(W1, MODEL, 11, ATTEMPT, "left", (M2,)),
    StateReport(
        *(W1, MODEL, 11, TriggerId(3, 1), EARLIER, 5, (M2,), "127.0.0.1:5000", 100, (0, 2)),
        *("reliable", 1.5, 4),
    ),
    Stored(W1, MODEL, 11, EARLIER, (0, 2)),
    Failed(W1, MODEL, (7, 9), "raised", "why", "where"),
    WorkerLeaving(W1, MODEL, (7, 9)),
)
DEMANDS = (JobDemand("a", 1, 2, 3.0, 4.0, 5, 1.0, runs=True, target=2, unserved_s=1.5, task="t"),)
PLACEMENTS = (WorkerPlacement("w1", 1, "a", 1.5, True, ("t",), ("b",), "c"),)  # noqa: FBT003
PLANNED = plans.Planned(
    term=1,
    number=2,
    at_s=1.5,
    policy="expected",
    why="price",
    reason="cheapest",
    feasible=True,
    binding="deadline",
    pools=("on-demand", "spot"),
    places=(1, -1),
    spot=1,
    on_demand=1,
    updates_left=5.0,
    deadline_left_s=60.0,
    spent_usd=1.5,
    expected_cost_usd=2.5,
    expected_runtime_s=3.5,
    on_demand_only_usd=4.5,
    stability=1.25,
    usd_per_hour={"spot": 0.5},
    believed={"rate": BELIEF},
    warning="too few",
    transfer_usd=0.25,
    answers=4,
)
COUNTED = plans.OfferCount("spot", 2, "m5", "a", 0.5)
PLANS = (
    plans.ProvisionerLead(3, "me", 1.5),
    plans.Priced(1, 1.5, {"spot": 0.5}, (plans.OfferPrice("spot", "m5", "a", 0.5),)),
    PLANNED,
    replace(PLANNED, places=(), machines=(COUNTED,)),
    plans.LaunchRequested(1, 2, 1.5, 0, "spot", "w1", "m5", "a", 0.5),
    plans.Started(1, 2, 1.5, "i-1", "m5", "a", 0.5),
    plans.SlotAssigned(1, 1.5, 0, 2, "w1"),
    plans.Left(1, 1.5, 2),
    plans.Ended(1, 2, 1.5, "failed", "why"),
    plans.Reviewed(1, 1.5, 7, 5.0, 2, 3, 1.5, 2.5, 1.25, {"rate": BELIEF}, "too few"),
    plans.ReplanAsked(1.5, "me", "why"),
    plans.Settled(1, 1.5, "done", 1.5, 2.5, 3.5),
)
MESSAGES: dict[str, tuple[Any, ...]] = {
    "claim": CLAIMS,
    "audit": AUDITS,
    "schema": SCHEMAS,
    "leader status": STATUSES,
    "trigger": TRIGGERS,
    "reply": REPLIES,
    "job demand": DEMANDS,
    "worker placement": PLACEMENTS,
    "plan": PLANS,
}
