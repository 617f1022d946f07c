"""Members of groups as processes that add up, step and copy. The benchmark plays the leader.

As in a job with `aggregation: {mode: group}`, each update is an all-reduce of a gradient that costs
nothing, a digest of the sum, and Adam's step at every member. The parent ends groups.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from common.collectives.port import TIMEOUT_S, Group, Peer
from common.collectives.torch_group import TorchGroups, advertised
from common.config.settings import Settings
from common.errors import GroupError
from common.learning.optimizers import OptimizerSettings
from common.learning.parameters import is_finite
from common.learning.slices import digest
from common.learning.trainer import Trainer
from common.redis.boards import open_boards

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from signal import Signals


# Time for processes to start on a busy machine.
START_S = 60.0
_ADAM = OptimizerSettings("adam", 1e-3)
_numbers = count()


class Pace(NamedTuple):
    """Durations of updates."""

    seconds: list[float]
    # Mean over updates, all threads of one member.
    processor_s: float


class _Process:
    """A member's operations, in its own process."""

    def __init__(self, redis: str, weights: int) -> None:
        torch.set_num_threads(1)
        settings = Settings(redis=redis)
        rendezvous = open_boards(settings).rendezvous("load")
        self._groups = TorchGroups(advertised(settings), rendezvous)
        self._made: dict[str, Group] = {}
        self._gradient = torch.full((weights,), 1e-3)
        self._sum = torch.empty_like(self._gradient)
        self._trainer = Trainer(self._gradient.numpy(), weights, _ADAM)

    def address(self) -> str:
        """Return the address at which other members reach this one."""
        return self._groups.address

    def make(self, name: str, peers: Sequence[Peer], rank: int) -> None:
        """Create a group. From then on it can be aborted."""
        self._made = {name: self._groups.group(name, peers, rank, TIMEOUT_S)}

    def updates(self, name: str, updates: int) -> Pace:
        """Form the group, and make updates in it."""
        group = self._made[name]
        group.form()
        self._update(group)
        began, used_s = [time.perf_counter()], time.process_time()
        for _ in range(updates):
            self._update(group)
            began.append(time.perf_counter())
        used_s = time.process_time() - used_s
        return Pace(np.diff(began).tolist(), used_s / max(1, updates))

    def copy(self, name: str, vectors: int) -> float:
        """Form a group of two and copy this many vectors. Returns the duration."""
        state = [self._gradient.clone() for _ in range(vectors)]
        began = time.perf_counter()
        group = self._made[name]
        group.form()
        group.copy(state)
        return time.perf_counter() - began

    def abort(self, name: str) -> None:
        """Abort a group."""
        with suppress(KeyError):
            self._made[name].abort()

    def _update(self, group: Group) -> None:
        self._sum.copy_(self._gradient)
        group.all_reduce(self._sum)
        if not is_finite(self._sum):
            raise AssertionError("gradients of 1e-3 have a sum")
        digest(self._sum)
        self._trainer.step(self._sum, samples=1)


def _serve(pipe: Connection[Any, Any], redis: str, weights: int) -> None:
    """Execute requests, each in a thread, because one may wait while another aborts its group."""
    process, lock = _Process(redis, weights), threading.Lock()

    def answer(number: int, method: str, arguments: Sequence[object]) -> None:
        try:
            found = getattr(process, method)(*arguments)
        except GroupError as error:
            found = error
        with lock, suppress(OSError):
            # The parent may have ended.
            pipe.send((number, found))

    with suppress(EOFError):
        while True:
            threading.Thread(target=answer, args=pipe.recv(), daemon=True).start()


class Member:
    """A member, from outside."""

    def __init__(self, name: str, redis: str, weights: int) -> None:
        context = multiprocessing.get_context("forkserver")
        # This module imports torch, which takes 2 s of a processor to load.
        context.set_forkserver_preload([__name__])
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, redis, weights), daemon=True)
        self._process.start()
        theirs.close()
        self._asked = dict[int, Future[Any]]()
        threading.Thread(target=self._listen, daemon=True).start()
        self.peer = Peer(name, self.ask("address").result(START_S))

    def ask(self, method: str, *arguments: object) -> Future[Any]:
        """Call a method in the member's process. The answer may be an error."""
        number, answer = next(_numbers), Future[Any]()
        self._asked[number] = answer
        self._pipe.send((number, method, arguments))
        return answer

    def signal(self, number: Signals) -> None:
        """Send the process a signal."""
        pid = self._process.pid
        if pid is not None:
            os.kill(pid, number)

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, found = self._pipe.recv()
                answer = self._asked.pop(number)
                if isinstance(found, Exception):
                    answer.set_exception(found)
                else:
                    answer.set_result(found)
        for answer in self._asked.values():
            answer.set_exception(EOFError("it has ended"))
