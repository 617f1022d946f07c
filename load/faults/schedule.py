"""A schedule of faults, as data drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from load.harness.s3_servers import LIES

# Time without faults at the beginning.
_FIRST_S = 1.0
# No fault begins this long before the end.
_LAST_S = 1.0
# Mean time from one fault to the next. At this pace, a deck with a card for every fault of
# `KINDS`, `often` cards for each, lasts a little over a minute.
_MEAN_GAP_S = 1.7
# Maximum number of broken targets. With more, no update would come for half a minute.
_AT_ONCE = 3


class Kind(NamedTuple):
    """A kind of fault."""

    name: str
    # Family of the targets, such as `worker`. A family such as `redis` has a single target.
    family: str
    # Number of cards in the deck.
    often: int
    # Shortest time until the fault is undone.
    shortest_s: float
    longest_s: float
    # Minimum time between the end of a fault and the next fault of the same target.
    recovers_s: float = 0.0


# Some freezes and cuts are shorter and some are longer than the timeouts that detect them:
# heartbeats (1.2 s), the lease (1 s), the session in the consumer group (2 s), the wait for an
# answer from Redis (5 s).
KINDS = (
    Kind("worker killed", "worker", 4, 0.1, 4.0),
    Kind("worker frozen", "worker", 3, 0.3, 5.0),
    # The notice lasts for this time. Then the machine ends.
    Kind("worker given notice", "worker", 3, 3.0, 6.0),
    Kind("all workers killed", "fleet", 1, 1.0, 3.0, recovers_s=5.0),
    Kind("coordinator killed", "coordinator", 2, 0.5, 4.0),
    Kind("coordinator frozen", "coordinator", 2, 0.5, 8.0),
    Kind("coordinator given notice", "coordinator", 1, 3.0, 6.0),
    Kind("Redis killed", "redis", 1, 0.1, 2.0),
    Kind("Redis frozen", "redis", 1, 0.5, 6.0),
    Kind("Redis a replica", "redis", 1, 0.1, 4.0),
    Kind("Redis out of memory", "redis", 1, 0.1, 4.0),
    Kind("Redis evicting", "redis", 1, 0.1, 4.0),
    Kind("Redis flushed", "redis", 1, 0.0, 0.1),
    Kind("highest trigger forged", "redis", 1, 0.0, 0.1),
    Kind("epoch of a trigger forged", "redis", 1, 0.0, 0.1),
    Kind("broker killed", "kafka", 1, 0.1, 1.0, recovers_s=8.0),
    Kind("broker stopped", "kafka", 1, 0.1, 1.0, recovers_s=8.0),
    Kind("broker frozen", "kafka", 1, 0.5, 4.0, recovers_s=2.0),
    Kind("partition added", "kafka", 1, 0.0, 0.1),
    Kind("transaction committed", "transactions", 1, 0.1, 6.0),
    Kind("transaction aborted", "transactions", 1, 0.1, 6.0),
    Kind("transactional producer lost", "transactions", 1, 0.1, 6.0),
    Kind("storage cut off", "storage", 1, 2.0, 12.0),
    Kind("storage refuses", "storage", 1, 2.0, 12.0),
    Kind("worker-Redis cut", "worker-redis", 2, 0.3, 8.0),
    Kind("worker-Redis reset", "worker-redis", 1, 0.0, 1.0),
    Kind("worker-Redis slow", "worker-redis", 1, 1.0, 5.0),
    Kind("worker-Kafka cut", "worker-kafka", 2, 0.3, 8.0),
    Kind("worker-Kafka reset", "worker-kafka", 1, 0.0, 1.0),
    Kind("worker-Kafka slow", "worker-kafka", 1, 1.0, 5.0),
)
FAMILIES = frozenset(kind.family for kind in KINDS)
# Faults in which Kafka loses the records it acknowledged last. They need somebody who resumes the
# job after each.
LOSSES = (
    Kind("control topic cut", "kafka", 1, 0.1, 1.0, recovers_s=20.0),
    Kind("updates topic cut", "kafka", 1, 0.1, 1.0, recovers_s=20.0),
    Kind("own topics cut", "kafka", 1, 0.1, 1.0, recovers_s=20.0),
)
# Faults of machines of tiers, if each slice of the weights has one owner.
TIERS = (
    Kind("spot machines lost", "tiers", 5, 0.5, 3.0, recovers_s=3.0),
    Kind("reliable machines lost", "tiers", 3, 0.5, 3.0, recovers_s=3.0),
    # The times include the search for the owners.
    Kind("owners killed", "tiers", 2, 2.0, 4.0, recovers_s=3.0),
)
# Faults drawn only on request: object storage answers wrongly while Redis is empty and coordinators
# start, and the job waits for its newest checkpoint.
STORE_LIES = tuple(
    Kind(f"store lies: {lie}", "store", 1, 2.0, 20.0, recovers_s=20.0) for lie in LIES
)


class Fault(NamedTuple):
    """One fault. Times count from the beginning of the run."""

    at_s: float
    kind: str
    family: str
    # Index of the target in its family, from 0.
    number: int
    lasts_s: float

    @property
    def ends_s(self) -> float:
        """Time at which the fault is undone."""
        return self.at_s + self.lasts_s


class _Card(NamedTuple):
    kind: Kind
    number: int
    lasts_s: float

    @property
    def target(self) -> tuple[str, int]:
        return self.kind.family, self.number


def draw(
    seed: int, seconds: float, sizes: dict[str, int], kinds: Sequence[Kind] = KINDS
) -> tuple[Fault, ...]:
    """Draw a schedule, sorted by time.

    Kinds are dealt from a shuffled deck, so that a run of a minute has nearly all of them. Times
    are uniform, so that there are clusters and lulls. But a fault waits while too many targets are
    broken, and no target is struck again before it has recovered.

    Args:
        seed: Seed of all random choices.
        seconds: Length of the run. Everything is undone by then.
        sizes: Number of targets of each family. The default is 1.
        kinds: Kinds of fault to draw from.
    """
    random = Random(seed)  # noqa: S311 -- chance that can be repeated, no secret
    last_s = seconds - _LAST_S
    count = max(0, round((last_s - _FIRST_S) / _MEAN_GAP_S))
    times = sorted(random.uniform(_FIRST_S, last_s) for _ in range(count))
    deck = list[_Card]()
    # Time at which each target may be struck again.
    whole_at = dict[tuple[str, int], float]()
    faults = list[Fault]()
    for time_s in times:
        broken = sorted(whole_s for whole_s in whole_at.values() if whole_s > time_s)
        at_s = broken[-_AT_ONCE] if len(broken) >= _AT_ONCE else time_s
        if at_s > last_s:
            break
        if not any(whole_at.get(card.target, 0.0) <= at_s for card in deck):
            deck += _shuffled(random, sizes, kinds)
        free = [card for card in deck if whole_at.get(card.target, 0.0) <= at_s]
        if not free:
            # If there are few kinds, all targets may be broken or not yet recovered.
            continue
        card = free[0]
        deck.remove(card)
        lasts_s = min(card.lasts_s, seconds - at_s)
        faults.append(Fault(at_s, card.kind.name, card.kind.family, card.number, lasts_s))
        whole_at[card.target] = at_s + lasts_s + card.kind.recovers_s
    return tuple(faults)


def _shuffled(random: Random, sizes: dict[str, int], kinds: Sequence[Kind]) -> Sequence[_Card]:
    cards = [
        _Card(
            kind,
            random.randrange(sizes.get(kind.family, 1)),
            random.uniform(kind.shortest_s, kind.longest_s),
        )
        for kind in kinds
        for _ in range(kind.often)
    ]
    random.shuffle(cards)
    return cards
