"""Actions that begin and end each kind of fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from common.core.messages import ModelId, TriggerId, UpdateTrigger
from common.core.spans import Partition
from common.embedded.apache_kafka import ApacheKafka
from common.embedded.redis import EmbeddedRedis
from common.kafka.names import control_topic, updates_topic
from common.kafka.opening import open_log
from common.wire import messages as wire
from load.faults.fleet import Fleet, Slot
from load.faults.tiers import Tiers
from load.harness.outside import Outside
from load.harness.proxy import Proxy
from load.harness.s3_servers import LIES, Lie
from load.harness.stack import freeze, thaw
from load.harness.transactions import Transactions

if TYPE_CHECKING:
    from common.kafka.port import Log
    from load.harness.counting import CountingJob
    from load.harness.producers import Producers

# Epochs of forged triggers: the highest that an id may have, and one that no leader has.
_HIGHEST, _NOBODYS = 2**64 - 1, 2**60
# Delay in each direction, as on a bad path between continents.
_LATENCY_S = 0.15

T = TypeVar("T")


class Action(NamedTuple):
    """Functions that begin and end a kind of fault. Their argument is the target's number.

    If ending takes a while, `end` returns a `Future` that is done when the target works again.
    """

    begin: Callable[[int], object]
    end: Callable[[int], object]


@dataclass(frozen=True)
class Targets:
    """Targets of the faults."""

    outside: Outside
    workers: Fleet
    coordinators: Fleet
    job: CountingJob
    producers: Producers
    transactions: Transactions
    tiers: Tiers
    log: Log

    def grow(self) -> None:
        """Add a partition to the job's smallest stream, and start a producer for it."""

        def grown() -> None:
            sizes = Counter(place.topic for place in self.job.places)
            place = self.job.grow(min(sizes, key=lambda stream: sizes[stream]))
            self.producers.write_to(open_log(self.outside.settings, "chaos-added"), place)

        self.outside.in_turn(grown)

    def forge_trigger(self, epoch: int) -> None:
        """Append a forged trigger, under an id of this epoch, to the Redis stream of triggers."""
        leader_status = self.job.board.get_leader_status()
        stream = f":{leader_status.triggers}" if leader_status and leader_status.triggers else ""
        trigger = UpdateTrigger(TriggerId(_NOBODYS, 1), ModelId(_NOBODYS, 1), ())
        self.outside.append_to_redis(
            f"doll:{{{self.job.name}}}:triggers{stream}",
            f"{epoch}-1",
            {"trigger": wire.encode_trigger(trigger)},
        )

    def start_from(self, lie: Lie) -> None:
        """Make storage answer wrongly, empty Redis and restart all coordinators."""
        self.outside.lie(self.job.record.id, lie)
        self.coordinators.kill_all()
        self.outside.redis_admin().flushall()
        self.coordinators.bring_back_in_turn()

    def cut(self, *topics: Callable[[str], str]) -> None:
        """Make Kafka lose the last records of the job's own topics."""
        places = [Partition(topic(self.job.name), 0) for topic in topics]
        self.outside.cut_tails(self.log, places)


def actions_on(targets: Targets) -> dict[str, Action]:
    """Return all actions, by the name of their kind."""
    outside, workers, coordinators = targets.outside, targets.workers, targets.coordinators
    actions = {
        "all workers killed": _each([workers], Fleet.kill_all, Fleet.bring_back_in_turn),
        "Redis killed": _each([outside.redis], EmbeddedRedis.kill, EmbeddedRedis.restart),
        "Redis frozen": _each([outside.redis], freeze, thaw),
        "Redis a replica": _each([outside], _demote, _promote),
        "Redis out of memory": _each([outside], _fill, Outside.empty_redis),
        "Redis evicting": _each([outside], Outside.squeeze_redis, Outside.empty_redis),
        "Redis flushed": _each([outside], lambda it: it.redis_admin().flushall(), _nothing),
        "highest trigger forged": _each([_HIGHEST], targets.forge_trigger, _nothing),
        "epoch of a trigger forged": _each([_NOBODYS], targets.forge_trigger, _nothing),
        "broker killed": _to_broker(outside, ApacheKafka.kill, ApacheKafka.restart),
        "broker stopped": _to_broker(outside, ApacheKafka.stop, ApacheKafka.restart),
        "broker frozen": _to_broker(outside, freeze, thaw),
        "partition added": _each([targets], Targets.grow, _nothing),
        "storage cut off": _each([outside.storage_link], Proxy.cut, Proxy.heal),
        "storage refuses": _each([outside.storage_link], Proxy.refuse, Proxy.heal),
    }
    actions |= {
        f"store lies: {lie}": _each(
            [lie], targets.start_from, lambda _: outside.answer_truthfully()
        )
        for lie in LIES
    }
    for name, lose in (
        ("spot machines lost", partial(Tiers.lose, tier="spot")),
        ("reliable machines lost", partial(Tiers.lose, tier="reliable")),
        ("owners killed", Tiers.lose_owners),
    ):
        actions[name] = _each([targets.tiers], lose, Tiers.bring_back)
    writes = [targets.transactions]
    actions |= {
        "transaction committed": _each(writes, Transactions.begin, Transactions.commit),
        "transaction aborted": _each(writes, Transactions.begin_again, Transactions.abort),
        "transactional producer lost": _each(
            writes, Transactions.begin_again, Transactions.abandon
        ),
    }
    for name, topics in (
        ("control topic", [control_topic]),
        ("updates topic", [updates_topic]),
        ("own topics", [control_topic, updates_topic]),
    ):
        actions[f"{name} cut"] = _each(
            [topics],
            lambda topics: targets.cut(*topics),
            lambda _: outside.in_turn(outside.kafka.restart),
        )
    for name, fleet in (("worker", workers), ("coordinator", coordinators)):
        actions |= {
            f"{name} killed": _each(fleet.slots, Slot.kill, Slot.bring_back),
            f"{name} frozen": _each(fleet.slots, Slot.freeze, Slot.thaw),
            f"{name} given notice": _each(fleet.slots, Slot.give_notice, Slot.bring_back),
        }
    slow = partial(Proxy.slow, latency_s=_LATENCY_S)
    for name, links in (("Redis", outside.redis_links), ("Kafka", outside.kafka_links)):
        actions |= {
            f"worker-{name} cut": _each(links, Proxy.cut, Proxy.heal),
            f"worker-{name} reset": _each(links, Proxy.refuse, Proxy.heal),
            f"worker-{name} slow": _each(links, slow, Proxy.heal),
        }
    return actions


def _to_broker(
    outside: Outside,
    begin: Callable[[ApacheKafka], object],
    end: Callable[[ApacheKafka], object],
) -> Action:
    return Action(
        lambda _: outside.in_turn(lambda: begin(outside.kafka)),
        lambda _: outside.in_turn(lambda: end(outside.kafka)),
    )


def _demote(outside: Outside) -> None:
    """Make Redis a replica of a server that is unavailable, as in the middle of a fail-over."""
    outside.redis_admin().replicaof("127.0.0.1", "1")


def _promote(outside: Outside) -> None:
    outside.redis_admin().replicaof("NO", "ONE")


def _fill(outside: Outside) -> None:
    outside.redis_admin().config_set("maxmemory", "1")


def _nothing(_: object) -> None:
    pass


def _each(targets: Sequence[T], begin: Callable[[T], object], end: Callable[[T], object]) -> Action:
    return Action(lambda number: begin(targets[number]), lambda number: end(targets[number]))
