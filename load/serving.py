"""Measures predictions by a model that trains meanwhile: latency, staleness, rollbacks, throughput.

    python load/serving.py --json out/serving.json    # exits 1 if a figure misses its requirement
    python load/serving.py --seconds 20 --pairs 2     # shorter

Training (Kafka, Redis, two coordinators, a worker; the 28x28 CNN) and this program share one core,
the model server and its client another. Two runs send requests on a schedule, an image each: in the
first the leader is killed twice, in the second Redis loses the job's data right when its leader is
killed. An answer is taken back if its version is not in the effective history at the end. An answer
is stale for the time that a newer snapshot has been on the board. Then blocks of requests, each
sent once the last is answered, alternate in pairs between `doll serve`, which still follows the
training, and a plain server of the same network.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple, get_args

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
import numpy as np

from common.embedded.process import free_port
from common.embedded.services import EmbeddedService, environment_of
from load.harness import report
from load.harness.asking import Address, connect, in_turn
from load.harness.counting import Aggregation
from load.harness.processor import used_s
from load.harness.stack import NotMeasuredError, await_until, servers
from load.predictions.asker import CAME, Came, request
from load.predictions.trained import Trained, stale_s

JOB = "served"
START_S = 60.0
# Connections of a block without a schedule.
CONNECTIONS = 8
BLOCK_S = 3.0
_ASKER, _PLAIN = (
    Path(__file__).parent / "predictions" / name for name in ("asker.py", "plain_server.py")
)


class Run(NamedTuple):
    """Results of requests on a schedule."""

    came: Came
    stale_s: list[float]  # per answer
    taken_back: int

    def p99_ms(self) -> float:
        """99 % quantile of the latency, from the time a request was due."""
        return 1e3 * float(np.quantile(self.came.seconds, 0.99))

    def stale_p99_s(self) -> float:
        """99 % quantile of the staleness."""
        return float(np.quantile(self.stale_s, 0.99))


class Pair(NamedTuple):
    """Paired blocks of both servers."""

    ours_per_s: float
    plain_per_s: float
    ours_cpu_us: float  # per answer
    plain_cpu_us: float

    @property
    def ratio(self) -> float:
        """Our throughput relative to the plain server's."""
        return self.ours_per_s / self.plain_per_s


def main() -> int:
    """Measure and print tables. Returns the exit status."""
    example = "python load/serving.py --seconds 20 --pairs 2 --json out/serving.json"
    parser = report.parser(__doc__, example)
    parser.add_argument(
        "--seconds", type=float, default=120.0, metavar="S", help="seconds per run (120)"
    )
    parser.add_argument(
        "--rate", type=float, default=200.0, metavar="N", help="predictions per second (200)"
    )
    parser.add_argument("--pairs", type=int, default=8, metavar="N", help="pairs of blocks (8)")
    parser.add_argument(
        "--aggregation",
        choices=get_args(Aggregation),
        default="board",
        help="where the weights are; default %(default)s",
    )
    given = parser.parse_args()
    machine, cores = report.machine(), sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        # Also applies to every process started from here.
        os.sched_setaffinity(0, cores[:1])
        on = stack.enter_context(servers(given.kafka))
        trained = stack.enter_context(closing(Trained(on, JOB, given.aggregation)))
        with _on(cores[-1]):
            port = free_port()
            own = on.settings.model_copy(update={"api_port": port})
            ours = EmbeddedService("serve", "serve", own, on.logs, (JOB,))
            stack.callback(ours.stop)
            plain_port = free_port()
            plain = subprocess.Popen(  # noqa: S603 -- our own command line, no shell
                [sys.executable, str(_PLAIN), str(plain_port)], env=environment_of(on.settings)
            )
            stack.callback(plain.wait)
            stack.callback(plain.kill)
        address = Address("127.0.0.1", port, "")
        _await_ready(address, ours)

        def ask() -> subprocess.Popen[bytes]:
            with _on(cores[-1]):
                asked = (str(port), JOB, str(given.rate), str(given.seconds))
                return subprocess.Popen(  # noqa: S603 -- our own command line, no shell
                    [sys.executable, str(_ASKER), *asked], stdout=subprocess.PIPE
                )

        killed = _run(trained, ask, lambda: _kill_twice(trained, given.seconds))
        wiped = _run(trained, ask, lambda: _wipe_once(trained, given.seconds))
        plain_address = Address("127.0.0.1", plain_port, "")
        await_until(lambda: _answers(plain_address), START_S, "the plain server answers")
        pairs = _pairs(given.pairs, (address, ours.pid), (plain_address, plain.pid))
    return _concluded(given.json, machine, killed, wiped, pairs)


@contextmanager
def _on(core: int) -> Iterator[None]:
    """Run processes that are started in this context on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _plain_request(address: Address) -> bytes:
    images = np.random.default_rng(0).integers(0, 256, (1, 1, 28, 28)).tolist()
    return address.request("POST", "/predict", msgspec.json.encode({"images": images}))


def _answers(address: Address, path: str = "/docs") -> bool:
    async def ask() -> int:
        link = await connect(address)
        answer = await link.ask(address.request("GET", path))
        link.writer.close()
        return answer.status

    try:
        return asyncio.run(ask()) == 200
    except OSError:
        return False


def _await_ready(address: Address, ours: EmbeddedService) -> None:
    def ready() -> bool:
        if ours.exit_code is not None:
            raise NotMeasuredError(f"doll serve ended: {ours.last_words()}")
        return _answers(address, "/v2/health/ready")

    await_until(ready, START_S, "doll serve is ready")


def _run(
    trained: Trained, ask: Callable[[], subprocess.Popen[bytes]], disturb: Callable[[], None]
) -> Run:
    """Send requests on a schedule while `disturb` disturbs the training."""
    asking = ask()
    disturb()
    said, _ = asking.communicate()
    if asking.returncode:
        raise NotMeasuredError("requests could not be sent")
    came = CAME.decode(said)
    counting = trained.counting()
    return Run(
        came,
        [stale_s(trained.seen, made, at) for at, made in came.notes],
        sum(made not in counting for _, made in came.notes),
    )


def _kill_twice(trained: Trained, seconds: float) -> None:
    for _ in range(2):
        time.sleep(seconds / 3)
        trained.kill_leader()


def _wipe_once(trained: Trained, seconds: float) -> None:
    time.sleep(seconds / 3)
    trained.kill_leader(before=trained.board.wipe)


def _pairs(count: int, ours: tuple[Address, int], plain: tuple[Address, int]) -> list[Pair]:
    """Measure pairs of blocks of requests, one block per server.

    The server whose block comes first alternates. The first pair only warms both servers up.
    """
    requests = {ours: request(ours[0], JOB), plain: _plain_request(plain[0])}
    pairs = list[Pair]()
    for number in range(-1, count):
        found = dict[tuple[Address, int], tuple[float, float]]()
        for each in (ours, plain) if number % 2 else (plain, ours):
            address, pid = each
            before_s = used_s(pid)
            per_s = asyncio.run(in_turn(address, requests[each], CONNECTIONS, BLOCK_S))
            found[each] = per_s, 1e6 * (used_s(pid) - before_s) / (per_s * BLOCK_S)
        (ours_per_s, ours_us), (plain_per_s, plain_us) = found[ours], found[plain]
        if number >= 0:
            pairs.append(Pair(ours_per_s, plain_per_s, ours_us, plain_us))
    return pairs


def _concluded(
    path: Path | None, machine: dict[str, object], killed: Run, wiped: Run, pairs: list[Pair]
) -> int:
    stale_s = max(killed.stale_p99_s(), wiped.stale_p99_s())
    p99_ms = max(killed.p99_ms(), wiped.p99_ms())
    ratio, ours_us, plain_us = (
        float(np.median([getattr(pair, name) for pair in pairs]))
        for name in ("ratio", "ours_cpu_us", "plain_cpu_us")
    )
    figures = (
        report.Figure("failed_requests", killed.came.failed + wiped.came.failed, most=0),
        report.Figure("answers_taken_back", killed.taken_back, most=0),
        report.Figure("answers_taken_back_after_wipe", wiped.taken_back),
        report.Figure("staleness_p99_s", stale_s, 3, most=1.0),
        report.Figure("answer_p99_ms", p99_ms, 1, most=20.0),
        report.Figure("throughput_ratio", ratio, 2, least=0.9),
        report.Figure("cpu_us_per_answer", ours_us),
        report.Figure("plain_cpu_us_per_answer", plain_us),
    )
    versions = {
        name: len({made for _, made in run.came.notes}) for name, run in _named(killed, wiped)
    }
    data = {
        **{figure.name: figure.value for figure in figures},
        "versions_served": versions,
        "answers": {name: len(run.came.notes) for name, run in _named(killed, wiped)},
        "pairs": [pair._asdict() for pair in pairs],
    }
    found = report.Found(f"predictions beside training: {versions}", figures, data)
    found.draw()
    return report.conclude(path, machine, data, found.short())


def _named(killed: Run, wiped: Run) -> tuple[tuple[str, Run], ...]:
    return ("leader killed", killed), ("board wiped", wiped)


if __name__ == "__main__":
    sys.exit(report.run(main))
