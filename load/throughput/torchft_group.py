"""What a group is held against, too: replicas of torchft, of which some die.

    PYTHON load/throughput/torchft_group.py WEIGHTS SECONDS UPDATES KILLS

PYTHON has torchft 0.2.0. Its servers listen on all interfaces, so this is to run in a network of
its own. Four replicas, processes of one thread, train the counting model with SGD, gradients a
timed wait. Each adds its gradient up by the manager: the wrapper of DDP that comes with 0.2.0 ends
with an AssertionError once that has failed over gloo. The lighthouse is tuned for quick repair:
beats are missed after 500 ms, and joiners waited for 100 ms. Printed as JSON:

    updates_s       how long a step took in the median, without faults
    repaired_ms     of each SIGKILL, until all who are left have made a step without the dead
    thrown_away     of each SIGKILL, steps that one of them computed for nothing, at most
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

# Run by path, and by an interpreter that knows nothing of this checkout.
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "common" / "public"))

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # its stubs lack it

from common.testing.counting import CountingTask
from services.worker.memory import keep_freed_memory

_REPLICAS = 4
_BEATS_MS, _JOIN_MS, _TICK_MS = 500, 100, 10
_FIRST = 3  # steps that are not counted: buckets are made, memory is taken
_CALM = 5  # steps with everybody in them, between kills
_IDS = 8  # of a batch
_TIMEOUT_S = 60.0


class _Step(NamedTuple):
    """One step of a replica, as it printed it."""

    at: float  # `monotonic`
    counts: bool  # else it was thrown away
    participants: int


class _Replica:
    """One replica, from outside."""

    def __init__(self, name: str, lighthouse: str, weights: str, seconds: str) -> None:
        self.steps = list[_Step]()
        self._process = subprocess.Popen(  # noqa: S603 -- our own command line, no shell
            [sys.executable, __file__, "replica", name, lighthouse, weights, seconds],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def calm(self, participants: int) -> bool:
        """Whether its last steps counted, and had so many in them."""
        last = self.steps[-_CALM:]
        return len(last) == _CALM and all(
            each.counts and each.participants == participants for each in last
        )

    def kill(self) -> None:
        """As if its machine had vanished."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.steps.append(_Step(*json.loads(line)))


def _train(name: str, lighthouse: str, weights: int, seconds: float) -> None:
    """A replica: train for ever."""
    from torchft import (  # type: ignore[import-not-found] # noqa: PLC0415 -- see `main`
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )

    keep_freed_memory()
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    task = CountingTask(weights, seconds=seconds)
    module, wait = task.build(), timedelta(seconds=5)
    sgd = torch.optim.SGD(module.parameters(), lr=1.0, fused=True)

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["module"])
        sgd.load_state_dict(state["sgd"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=wait),
        load_state_dict=load,
        state_dict=lambda: {"module": module.state_dict(), "sgd": sgd.state_dict()},
        min_replica_size=1,
        timeout=wait,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
    )
    optimizer = Optimizer(manager, sgd)
    records = {"id": torch.arange(_IDS)}
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        task.losses(task.forward(module, records), records).sum().backward()  # type: ignore[no-untyped-call]
        for parameter in module.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        counts = manager.current_step() > before
        print(json.dumps([time.monotonic(), counts, manager.num_participants()]), flush=True)


def _await(condition: Any, what: str) -> None:  # noqa: ANN401 -- a callable
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.002)


def _measure(weights: str, seconds: str, updates: int, kills: int) -> dict[str, Any]:
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found] # noqa: PLC0415

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=_JOIN_MS,
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=_BEATS_MS,
    )
    address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"  # it tells the host's name
    draw = Random(1)  # noqa: S311 -- when to strike, no secret
    replicas = [_Replica(f"r{n}", address, weights, seconds) for n in range(_REPLICAS)]
    repaired_ms, thrown_away = list[float](), list[int]()
    try:
        _await(lambda: all(each.calm(_REPLICAS) for each in replicas), "all take part")
        begun = len(replicas[0].steps) + _FIRST
        _await(lambda: len(replicas[0].steps) > begun + updates, "steps")
        times = [each.at for each in replicas[0].steps[begun:]]
        usual_s = median(after - before for before, after in pairwise(times))
        for kill in range(kills):
            _await(lambda: all(each.calm(_REPLICAS) for each in replicas), "all take part again")
            time.sleep(draw.uniform(0.0, usual_s))
            victim = replicas.pop(0)
            known = [len(each.steps) for each in replicas]
            struck = time.monotonic()
            victim.kill()
            after = list[list[_Step]]()

            def over() -> bool:
                after[:] = [each.steps[n:] for each, n in zip(replicas, known, strict=True)]  # noqa: B023 -- awaited in this pass
                return all(any(_without(step) for step in steps) for steps in after)  # noqa: B023 -- likewise

            _await(over, "a step without the dead")
            first = [next(n for n, step in enumerate(steps) if _without(step)) for steps in after]
            done_at = max(steps[n].at for steps, n in zip(after, first, strict=True))
            repaired_ms.append(1e3 * (done_at - struck))
            thrown_away.append(
                max(
                    sum(not step.counts for step in steps[:n])
                    for steps, n in zip(after, first, strict=True)
                )
            )
            name = f"r{_REPLICAS + kill}"
            replicas.append(_Replica(name, address, weights, seconds))
    finally:
        for each in replicas:
            each.kill()
        server.shutdown()
    return {"updates_s": usual_s, "repaired_ms": repaired_ms, "thrown_away": thrown_away}


def _without(step: _Step) -> bool:
    return step.counts and step.participants == _REPLICAS - 1


def main() -> int:
    """Be a replica, or measure some."""
    socket.gethostname = lambda: "127.0.0.1"  # by which torchft tells others to reach it, as it is
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # when it is imported
    if sys.argv[1] == "replica":
        name, lighthouse, weights, seconds = sys.argv[2:]
        _train(name, lighthouse, int(weights), float(seconds))
        return 0
    weights, seconds, updates, kills = sys.argv[1:]
    print(json.dumps(_measure(weights, seconds, int(updates), int(kills))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
