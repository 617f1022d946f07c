"""One simulated world and what befalls it, as data: made from a seed, replayed, and shrunk.

Rates are per event, times in virtual seconds. A scenario holds every fault as an entry of its own,
so that the shrinker can leave some out and see whether the failure stays.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, TypeAlias

FaultKind: TypeAlias = Literal[
    "kill worker",  # without notice; a part of what it sent still arrives
    "leave worker",  # on notice
    "freeze worker",  # stops for a while, then goes on with all it had in mind
    "join worker",
    "evict rows",  # a worker loses its cache and reads addresses back
    "rebalance",  # for no reason; the old owner does not notice at once
    "kill coordinator",
    "freeze coordinator",
    "lose lease",
    "wipe redis",
    "copy redis",  # a replica that lags behind from here on
    "fail over redis",  # to that replica
    "redis away",
    "kafka away",
    "retention",  # the oldest records of a partition go, read or not
    "garbage",  # bytes that do not parse, on the control topic and the board
]

COMMON: tuple[FaultKind, ...] = (
    "kill worker",
    "leave worker",
    "freeze worker",
    "join worker",
    "join worker",
    "rebalance",
    "evict rows",
    "garbage",
)
LEADERSHIP: tuple[FaultKind, ...] = (
    "kill coordinator",
    "freeze coordinator",
    "freeze coordinator",
    "lose lease",
)
STORES: tuple[FaultKind, ...] = (
    "wipe redis",
    "copy redis",
    "fail over redis",
    "redis away",
    "kafka away",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    at: float
    kind: FaultKind
    target: int  # which worker, coordinator or partition, modulo how many there are
    seconds: float  # how long, where that means anything


@dataclass(frozen=True, slots=True)
class Scenario:
    """A world: the job, the streams, the network, and the faults."""

    seed: int
    batch_size: int
    group_size: int
    bound: int
    on_missing: Literal["redispatch", "proceed"]
    arrivals: tuple[tuple[tuple[int, float], ...], ...]  # per partition: (offset, arrival time)
    bad: frozenset[tuple[int, int]]  # (partition, offset) of records that do not decode
    poison: tuple[int, int] | None  # a record that kills whoever computes its gradient
    workers: int
    gradient_s: float  # mean time of one gradient
    kafka_s: float  # mean delay of an appended record
    lossy: float  # share of triggers and gradients that are lost; as many come late or twice
    copies: float  # share of Kafka records that are appended again, some much later
    faults: tuple[Fault, ...]
    calm_at: float  # no fault begins after this


def from_seed(seed: int) -> Scenario:
    """Draw a scenario."""
    draw = random.Random(seed)  # noqa: S311 -- reproducible, not secret
    group_size = draw.randint(1, 4)
    calm_at = draw.uniform(2.0, 15.0)
    partitions = draw.randint(1, 4)
    arrivals = tuple(_arrivals(draw, calm_at) for _ in range(partitions))
    every = [(p, offset) for p, records in enumerate(arrivals) for offset, _ in records]
    bad_share = draw.choice([0.0, 0.0, 0.1])
    kinds = list(COMMON)
    kinds += LEADERSHIP * draw.choice([0, 1, 2, 5])
    kinds += STORES * draw.choice([0, 1, 1])
    kinds += ["retention"] * draw.choice([0, 0, 0, 1])
    return Scenario(
        seed=seed,
        batch_size=draw.randint(1, 4),
        group_size=group_size,
        bound=group_size + draw.randint(0, 2),
        on_missing=draw.choice(["redispatch", "redispatch", "proceed"]),
        arrivals=arrivals,
        bad=frozenset(record for record in every if draw.random() < bad_share),
        poison=draw.choice(every) if draw.random() < 0.15 else None,
        workers=draw.randint(1, 4),
        gradient_s=draw.choice([0.01, 0.05, 0.3]),
        kafka_s=draw.choice([0.002, 0.01, 0.1]),
        lossy=draw.choice([0.0, 0.05, 0.25]),
        copies=draw.choice([0.0, 0.06]),
        faults=_faults(draw, kinds, calm_at),
        calm_at=calm_at,
    )


def _arrivals(draw: random.Random, calm_at: float) -> tuple[tuple[int, float], ...]:
    """Offsets with holes; some records are there before anybody begins."""
    count, offset = draw.randint(3, 50), draw.randint(0, 5)
    backlog = draw.random()
    times = sorted(
        0.0 if draw.random() < backlog else draw.uniform(0, calm_at) for _ in range(count)
    )
    records = []
    for time in times:
        records.append((offset, time))
        offset += 1 + (draw.randint(1, 4) if draw.random() < 0.25 else 0)
    return tuple(records)


def _faults(draw: random.Random, kinds: list[FaultKind], calm_at: float) -> tuple[Fault, ...]:
    count = int(calm_at * draw.choice([0.3, 1.0, 3.0]))
    times = sorted(draw.uniform(0, calm_at) for _ in range(count))
    return tuple(
        Fault(time, draw.choice(kinds), draw.randrange(1000), draw.choice([0.2, 1.0, 4.0]))
        for time in times
    )
