"""How each kind of fault is done to the stack, and undone."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from common.embedded.redis import EmbeddedRedis
from load.fleet import Fleet, Slot
from load.outside import Outside
from load.proxy import Proxy
from load.stack import freeze, thaw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LATENCY_S = 0.15  # each way: a bad path between continents

T = TypeVar("T")


class Action(NamedTuple):
    """Beginning and end of a kind of fault, each for one of its targets by number."""

    begin: Callable[[int], None]
    end: Callable[[int], None]


def actions_on(outside: Outside, workers: Fleet, coordinators: Fleet) -> dict[str, Action]:
    """All actions, by the name of their kind."""
    actions = {
        "all workers killed": _each([workers], Fleet.kill_all, Fleet.bring_back_in_turn),
        "Redis killed": _each([outside.redis], EmbeddedRedis.kill, EmbeddedRedis.restart),
        "Redis frozen": _each([outside.redis], freeze, thaw),
        "Redis a replica": _each([outside], Outside.demote_redis, Outside.promote_redis),
        "Redis out of memory": _each([outside], Outside.fill_redis, Outside.empty_redis),
        "Redis flushed": _each([outside], Outside.flush_redis, lambda _: None),
        "broker killed": _each([outside], Outside.kill_broker, Outside.restart_broker),
        "broker stopped": _each([outside], Outside.stop_broker, Outside.restart_broker),
        "broker frozen": _each([outside], Outside.freeze_broker, Outside.thaw_broker),
        "storage cut off": _each([outside.storage_link], Proxy.cut, Proxy.heal),
        "storage refuses": _each([outside.storage_link], Proxy.refuse, Proxy.heal),
    }
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


def _each(targets: Sequence[T], begin: Callable[[T], object], end: Callable[[T], object]) -> Action:
    def begun(number: int) -> None:
        begin(targets[number])

    def ended(number: int) -> None:
        end(targets[number])

    return Action(begun, ended)
