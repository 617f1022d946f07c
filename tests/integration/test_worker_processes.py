"""Any process of a worker dies, hangs or is frozen at any time: each record is still used once.

worker   parent ─┬─ fork server
                 └─ the process for the job

pytest tests/integration/test_worker_processes.py -m nightly -n0 repeats each fault 20 times.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from common.embedded.process import Child
from tests.integration.cluster import Cluster, await_condition
from tests.integration.hostile_tasks import HANGING, HANGS, HANGS_ALONE

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.config.settings import Settings
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

# Records of a round, and seconds of a batch of 8 of them. A round takes a worker two seconds.
RECORDS, SECONDS = 400, 0.04
MANY_TIMES = 20
PARENT_MIB = 80.0
TIMES = pytest.mark.parametrize(
    "times",
    [1, pytest.param(MANY_TIMES, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])],
)


@pytest.fixture
def settings(likest_to_production: Settings) -> Settings:
    return likest_to_production


class Processes(NamedTuple):
    """The processes that belong to a worker."""

    parent: int
    server: int
    job: int

    def end(self) -> None:
        """Wait until all have ended."""
        await_condition(lambda: not any(map(runs, self)), f"{self} have ended")


def runs(pid: int) -> bool:
    """Return True if a process runs or is frozen."""
    return state(pid) not in ("", "Z", "X")


def state(pid: int) -> str:
    """Return the state of a process in the kernel's characters. Empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def processes_of(parent: int) -> Processes | None:
    """Return the processes of a worker that works for a job; None if it does not yet.

    Only the fork server has one thread.
    """
    servers, jobs = list[int](), list[int]()
    try:
        for thread in Path(f"/proc/{parent}/task").iterdir():
            for pid in map(int, (thread / "children").read_text().split()):
                if runs(pid):
                    count = len(list(Path(f"/proc/{pid}/task").iterdir()))
                    (servers if count == 1 else jobs).append(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Processes(parent, servers[0], jobs[0]) if len(servers) == len(jobs) == 1 else None


def working(cluster: Cluster, name: str, other_than: int = 0) -> Processes:
    """Wait until a worker works for the job in a process, and return all its processes.

    Args:
        cluster: The cluster.
        name: Name of the worker.
        other_than: Id of the process for the job that has ended.
    """
    found = list[Processes]()

    def works() -> bool:
        processes = processes_of(cluster.pid(name))
        if processes is None or processes.job == other_than:
            return False
        found.append(processes)
        return name in cluster.board.heartbeats()

    await_condition(works, f"{name} works for the job")
    return found[-1]


def under_way(cluster: Cluster) -> None:
    """Produce records, and wait until some of them are trained."""
    before = cluster.version()
    cluster.produce(RECORDS)
    await_condition(lambda: cluster.version() > before, "an update")


def assert_each_record_counts_once(cluster: Cluster) -> None:
    await_condition(cluster.drained, "everything is settled")
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), cluster.records, 0)
    assert cluster.ended() == []


@TIMES
def test_death_of_a_worker_ends_its_processes_and_another_worker_continues(
    make: Make, times: int
) -> None:
    # w0   ██████ killed
    # w1        ██████████████ killed
    # w2                   ██████████
    cluster = make(f"parent-dies-{times}", times * RECORDS, seconds=SECONDS)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w0")
    for number in range(times):
        cluster.start("worker", f"w{number + 1}")
        processes = working(cluster, f"w{number}")
        under_way(cluster)
        cluster.kill(f"w{number}")
        processes.end()
        await_condition(cluster.drained, "the other worker has trained the rest")
    assert_each_record_counts_once(cluster)


@TIMES
def test_death_of_a_fork_server_ends_no_job_and_the_next_process_gets_another_server(
    make: Make, times: int
) -> None:
    # server   ██████ killed           another ████████████████
    # job      ██████████████████ killed       ████████████████
    cluster = make(f"server-dies-{times}", 2 * times * RECORDS, seconds=SECONDS)
    cluster.start("coordinator", "c1")
    for number in range(times):
        # The pauses after deaths become longer, so each round has a new worker.
        name = f"w{number}"
        cluster.start("worker", name)
        before = working(cluster, name)
        os.kill(before.server, signal.SIGKILL)
        await_condition(lambda before=before: not runs(before.server), "the server has ended")  # type: ignore[misc]
        under_way(cluster)
        await_condition(cluster.drained, "the job goes on")
        assert runs(before.job)
        os.kill(before.job, signal.SIGKILL)
        cluster.produce(RECORDS)
        after = working(cluster, name, other_than=before.job)
        assert after.parent == before.parent
        assert after.server != before.server
        await_condition(cluster.drained, "the job goes on in another process")
        cluster.kill(name)
        after.end()
    cluster.start("worker", "last")
    assert_each_record_counts_once(cluster)


@TIMES
def test_killed_process_of_a_job_is_restarted(make: Make, times: int) -> None:
    # w0   ██████ killed    ██████████
    cluster = make(f"job-dies-{times}", times * RECORDS, seconds=SECONDS)
    cluster.start("coordinator", "c1")
    for number in range(times):
        name = f"w{number}"
        cluster.start("worker", name)
        before = working(cluster, name)
        under_way(cluster)
        os.kill(before.job, signal.SIGKILL)
        after = working(cluster, name, other_than=before.job)
        assert after[:2] == before[:2]
        await_condition(cluster.drained, "the job goes on in another process")
        assert "died of SIGKILL" in cluster.said(name)
        cluster.kill(name)
        after.end()
    cluster.start("worker", "last")
    assert_each_record_counts_once(cluster)


@TIMES
@pytest.mark.parametrize(
    ("task", "event"),
    [(HANGS, "gradient_given_up"), (HANGS_ALONE, "job_process_killed")],
    ids=["sleeps", "stops all threads"],
)
def test_process_that_hangs_ends_when_its_worker_leaves(
    settings: Settings, tmp_path: Path, task: str, event: str, times: int
) -> None:
    name = f"hangs-{task.rpartition(':')[2].lower()}-{times}"
    # Each end of a process with the batch in its hands counts as a failure of the batch.
    options = f"max_failures: {times}"
    with closing(Cluster(settings, tmp_path, name, 8, options, entrypoint=task)) as cluster:
        cluster.start("coordinator", "c1")
        cluster.produce(8)
        for number in range(times):
            name = f"w{number}"
            cluster.start("worker", name, leave_s=0.2)
            processes = working(cluster, name)
            await_condition(partial(hangs, cluster, name), "the task hangs")
            assert cluster.stop(name) == 0
            assert event in cluster.said(name)
            processes.end()


def hangs(cluster: Cluster, name: str) -> bool:
    """Return True if the task of a worker says that it hangs."""
    return HANGING in cluster.said(name)


@TIMES
def test_frozen_process_of_a_job_changes_nothing_when_it_wakes(make: Make, times: int) -> None:
    # w0   ██████ frozen ░░░░░░░░░░░░ thaws ████
    # w1   █████████████████████████████████████
    cluster = make(f"job-freezes-{times}", 3 * times * RECORDS, seconds=SECONDS)
    cluster.start("coordinator", "c1")
    for name in ("w0", "w1"):
        cluster.start("worker", name)
    for number in range(times):
        frozen = working(cluster, f"w{number % 2}")
        working(cluster, f"w{(number + 1) % 2}")
        under_way(cluster)
        os.kill(frozen.job, signal.SIGSTOP)
        try:
            cluster.produce(RECORDS)
            await_condition(cluster.drained, "the other worker has taken over")
            assert state(frozen.job) == "T"
        finally:
            os.kill(frozen.job, signal.SIGCONT)
        cluster.produce(RECORDS)
        await_condition(cluster.drained, "everything is settled")
    assert_each_record_counts_once(cluster)


def test_parent_of_a_process_for_a_job_needs_little_memory(
    make: Make, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    cluster = make("memory", 400)
    cluster.start("coordinator", "c1")
    command = [sys.executable, "-m", "services.worker", "--name", "w1", "--job", cluster.job]
    environ = {**os.environ, **cluster.settings.environ()}
    # A fork would share its memory with the tests' fork server.
    with Child(command, tmp_path / "worker.log", environ) as worker:
        cluster.produce(400)
        await_condition(cluster.drained, "the job works")
        processes = processes_of(worker.pid)
        assert processes is not None
        found = {name: share_mib(pid) for name, pid in processes._asdict().items()}
    for name, mib in found.items():
        record_property(f"{name}_mib", mib)
        print(f"{name}: {mib:.0f} MiB")  # noqa: T201 -- pytest -s shows it
    assert found["parent"] <= PARENT_MIB


def share_mib(pid: int) -> float:
    """Return the proportional set size of a process, which divides shared pages among sharers."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except FileNotFoundError:
        pytest.skip("this kernel has no /proc/PID/smaps_rollup")
    [kib] = [line.split()[1] for line in lines if line.startswith("Pss:")]
    return int(kib) / 1024
