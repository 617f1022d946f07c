"""`doll demo` and `doll up` on real processes: their output is true, and no process survives."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from confluent_kafka.admin import AdminClient

from common.config.settings import read_settings
from common.data.codecs import codec_of
from common.kafka import names as topics
from common.testing.counting import ENTRYPOINT
from load.harness.counting import CountingJob, counting_job
from services.cli import exits
from tests.integration.cluster import Cluster, await_condition
from tests.servers import kafka_jars

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.alone,  # a demo has a deadline
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc"),
]

DOLL = (sys.executable, "-m", "services.cli")
ROOT = Path(__file__).parents[2]
END_S = 60.0


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield a folder for temporary files. Its name is short because it holds sockets."""
    folder = Path(tempfile.mkdtemp(prefix="demo-"))
    yield folder
    shutil.rmtree(folder)


@contextmanager
def running(
    arguments: list[str], temporary: Path, out: Path, path: str = os.environ["PATH"]
) -> Iterator[subprocess.Popen[bytes]]:
    """A `doll` command with its output in a file. The fixture kills it if the test does not."""
    environment = {**os.environ, "TMPDIR": str(temporary), "PATH": path}
    with (
        out.open("wb") as output,
        subprocess.Popen(  # noqa: S603 -- our own interpreter and program
            [*DOLL, *arguments], cwd=ROOT, env=environment, stdout=output, stderr=output
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def descendants(pid: int) -> set[int]:
    """Return all processes below one."""
    found = set[int]()
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
        return found
    for child in map(int, " ".join(lists).split()):
        found |= {child} | descendants(child)
    return found


def left(pids: set[int]) -> set[int]:
    """Return the processes that still run."""
    return {pid for pid in pids if _state(pid) not in ("", "Z")}


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def machines_of(owner: int) -> dict[int, bytes]:
    """Return the rented machines that end with a process, no matter which process started them.

    Maps the id of each of their processes to the variable that names the machine.
    """
    found = dict[int, bytes]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        # A process of another user, or one that has just ended.
        with suppress(OSError):
            variables = path.read_bytes().split(b"\0")
            mine = b"DOLL_OWNER_PID=%d" % owner in variables
            for tag in variables:
                if mine and tag.startswith(b"FLEET_MACHINE="):
                    found[int(path.parent.name)] = tag
    return found


def machine_count(owner: int) -> int:
    """Return the number of rented machines that end with a process."""
    return len(set(machines_of(owner).values()))


def name_of(pid: int) -> str:
    """Return the name that `ps` shows for a process."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_demo_uses_every_record_once_and_leaves_nothing_running(
    tmp_path: Path, temporary: Path
) -> None:
    seen = set[int]()
    arguments = ["demo", "--seconds", "8", "--rate", "1000"]
    with running([*arguments, "--out", str(tmp_path)], temporary, tmp_path / "said") as process:

        def ended() -> bool:
            seen.update(descendants(process.pid))
            return process.poll() is not None

        await_condition(ended, "the demo has ended", 150.0)
        assert process.returncode == 0, (tmp_path / "said").read_text()

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["records_produced"] == summary["records_trained"] == 8000
    assert summary["records_lost"] == summary["records_duplicated"] == 0
    assert summary["flaws"] == []
    assert summary["preemptions"] == 1
    assert summary["updates"] >= 8000 // 128
    # Guesses would reach 0.1.
    assert summary["test_accuracy"] > 0.7
    assert (summary["kafka"], summary["redis"]) == ("embedded", "embedded")
    # Two servers, the fork server, a coordinator, three workers, and a worker's restart.
    assert len(seen) >= 8
    await_condition(lambda: not left(seen), "the kernel has ended them")
    assert list(temporary.glob("doll-*")) == []


@pytest.mark.nightly
def test_demo_on_rented_machines_reports_their_cost_and_releases_all(
    tmp_path: Path, temporary: Path
) -> None:
    seen = set[int]()
    arguments = ["demo", "--provision", "--seconds", "12", "--workers", "2", "--rate", "1000"]
    with running([*arguments, "--out", str(tmp_path)], temporary, tmp_path / "said") as process:

        def ended() -> bool:
            seen.update(machines_of(process.pid), descendants(process.pid))
            return process.poll() is not None

        await_condition(ended, "the demo has ended", 150.0)

    said, summary = (
        (tmp_path / "said").read_text(),
        json.loads((tmp_path / "summary.json").read_text()),
    )
    assert process.returncode == (exits.OK if summary["in_time"] else exits.FAILED), said
    assert (summary["flaws"], summary["records_duplicated"]) == ([], 0)
    assert summary["records_trained"] >= 128 * summary["updates"] > 0
    assert summary["plans"] == len(summary["reasons"]) >= 1
    assert all(summary["reasons"])
    assert summary["machines"] >= 1
    # At most two machines for the whole time at the highest price.
    longest_s = summary["runtime_s"] + 60
    assert 0 < summary["spent_usd"] < 4 * longest_s * 0.478 / 3600
    assert summary["on_demand_only_usd"] == pytest.approx(2 * 12 * 0.239 / 3600, rel=0.05)
    assert "live page: http://127.0.0.1:" in said
    # Two servers, coordinator, provisioner, admin and a machine.
    assert len(seen) >= 6
    await_condition(lambda: not left(seen), "all machines are released")


@pytest.mark.nightly
def test_rented_machines_end_with_a_killed_demo(tmp_path: Path, temporary: Path) -> None:
    said = tmp_path / "said"
    arguments = ["demo", "--provision", "--workers", "2", "--out", str(tmp_path)]
    with running(arguments, temporary, said) as process:
        await_condition(lambda: machine_count(process.pid) == 2, "both machines run", 120.0)
        everything = machines_of(process.pid).keys() | descendants(process.pid)
        process.kill()
        process.wait(END_S)
    await_condition(lambda: not left(everything), "everything has ended")


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_stopped_demo_leaves_nothing_running(
    tmp_path: Path, temporary: Path, how: signal.Signals
) -> None:
    said = tmp_path / "said"
    arguments = ["demo", "--seconds", "60", "--out", str(tmp_path)]
    with running(arguments, temporary, said) as process:
        await_condition(lambda: "streaming starts" in said.read_text(), "the demo streams", 120.0)
        children = descendants(process.pid)
        # Two servers, the coordinator, the fork server, and three processes for each worker.
        assert len(children) == 13
        process.send_signal(how)
        assert process.wait(END_S) == 128 + how, said.read_text()
    assert left(children) == set()
    assert list(temporary.glob("doll-*")) == []
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.nightly
def test_killed_demo_leaves_nothing_running(tmp_path: Path, temporary: Path) -> None:
    said = tmp_path / "said"
    with running(["demo", "--out", str(tmp_path)], temporary, said) as process:
        await_condition(lambda: len(descendants(process.pid)) >= 13, "all processes are running")
        children = descendants(process.pid)
        process.kill()
        process.wait(END_S)
    await_condition(lambda: not left(children), "the kernel has ended them")


@pytest.mark.nightly
def test_worker_that_dies_unexpectedly_ends_the_demo_and_is_named(
    tmp_path: Path, temporary: Path
) -> None:
    said = tmp_path / "said"
    arguments = ["demo", "--seconds", "60", "--out", str(tmp_path)]
    with running(arguments, temporary, said) as process:
        await_condition(lambda: "streaming starts" in said.read_text(), "the demo streams", 120.0)
        children = descendants(process.pid)
        [victim] = [pid for pid in children if name_of(pid) == "worker-1"]
        os.kill(victim, signal.SIGKILL)
        assert process.wait(END_S) == exits.FAILED
    assert "worker-1 ended unexpectedly with status -9" in said.read_text()
    assert left(children) == set()


@pytest.fixture(params=["Java", "no Java"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Return a PATH, and the Kafka that `doll up` starts with it, and why."""
    if request.param == "Java":
        kafka_jars()
        started = "Apache Kafka (--kafka-built-in starts the small one)"
        return os.environ["PATH"], started
    keeps = "it keeps 5 MB of each partition, and loses all data when it ends"
    why = "no Java here: install a JRE of version 17 or later"
    return str(tmp_path), f"the built-in one, for a first try: {keeps} ({why})"


def test_doll_up_prints_everything_another_terminal_needs(
    machine: tuple[str, str], tmp_path: Path, temporary: Path
) -> None:
    said, folder = tmp_path / "said", tmp_path / "up"
    arguments = ["up", "--workers", "1", "--directory", str(folder)]
    path, started = machine
    with running(arguments, temporary, said, path) as process:
        await_condition(lambda: "Ctrl-C stops everything" in said.read_text(), "everything is up")
        listed = subprocess.run(  # noqa: S603 -- our own program
            ["/bin/sh", "-c", f'. {folder}/environment && exec "$@"', "sh", *DOLL, "job", "list"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "no jobs yet" in listed.stdout, listed.stderr  # the API answered
        assert (folder / "environment").stat().st_mode & 0o077 == 0  # it holds a key
        assert f"Kafka: {started}\n" in said.read_text()
        bootstrap = re.search(r"address for other clients: (127\.0\.0\.1:\d+)\n", said.read_text())
        assert bootstrap is not None
        assert topics.JOBS in AdminClient({"bootstrap.servers": bootstrap[1]}).list_topics().topics
        found = re.search(r"page: (http\S+) .* password (\S+)\)", said.read_text())
        assert found is not None
        exported = (folder / "environment").read_text().splitlines()
        assert f"export DOLL_API={found[1]}" in exported
        assert f"export DOLL_API_KEY={found[2]}" in exported
        children = descendants(process.pid)
        # The last one is the server that forks the worker's processes.
        assert len(children) == 7
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0, said.read_text()
    await_condition(lambda: not left(children), "the kernel has ended them")
    assert list(temporary.glob("doll-*")) == []
    assert not (folder / "environment").exists()


def test_task_that_exits_its_process_ends_no_stack_and_no_other_job(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # dying     its process ends several times; then its batch is quarantined
    # innocent                                                          all trained
    task = "tests.integration.bad_tasks:EndsItsProcess"
    monkeypatch.setenv("DOLL_TASKS", f"{task},{ENTRYPOINT}")
    said, folder = tmp_path / "said", tmp_path / "up"
    arguments = ["up", "--workers", "1", "--directory", str(folder)]
    with running([*arguments, "--kafka-built-in"], temporary, said) as process:
        await_condition(lambda: "Ctrl-C stops everything" in said.read_text(), "everything is up")
        lines = (folder / "environment").read_text().splitlines()
        settings = read_settings(
            dict(shlex.split(line)[1].split("=", 1) for line in lines) | {"DOLL_TASKS": ENTRYPOINT}
        )
        innocent = Cluster(settings, tmp_path, "innocent", 40)
        spec = counting_job("dying", 8, 0.0)
        dying = CountingJob(
            spec.model_copy(
                update={
                    "max_failures": 1,
                    "task": spec.task.model_copy(update={"entrypoint": task}),
                }
            ),
            settings,
            innocent.log,
            partitions=1,
        )
        with closing(innocent.log.writer()) as writer:
            for value in codec_of(spec.records).encode({"id": np.arange(8)}):
                writer.append("dying-a", value, partition=0)
            assert writer.flush(END_S)
        await_condition(lambda: len(dying.audit().quarantined) == 1, "the batch is quarantined")
        innocent.produce(40)
        await_condition(innocent.drained, "the other job is trained")
        assert innocent.audit().trained == 40
        innocent.close()
        assert "worker-1 ended" not in said.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0, said.read_text()


def test_dead_redis_is_restarted_and_dead_built_in_kafka_ends_the_stack(
    tmp_path: Path, temporary: Path
) -> None:
    said = tmp_path / "said"
    arguments = ["up", "--workers", "0", "--kafka-built-in"]
    with running(arguments, temporary, said) as process:
        await_condition(lambda: "Ctrl-C stops everything" in said.read_text(), "everything is up")
        os.kill(server_of(process.pid, "redis-server"), signal.SIGKILL)
        await_condition(
            lambda: "Redis was killed by SIGKILL" in said.read_text(),
            "the restart of Redis is reported",
        )
        await_condition(
            lambda: server_of(process.pid, "redis-server") > 0, "Redis is running again"
        )
        assert process.poll() is None

        os.kill(server_of(process.pid, "mock_broker"), signal.SIGKILL)
        assert process.wait(END_S) == exits.FAILED
    assert "the built-in Kafka ended, and all records with it" in said.read_text()


def server_of(pid: int, name: str) -> int:
    """Return a process below another one whose command line has a name, or 0."""
    for each in descendants(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended just now
            if name.encode() in Path(f"/proc/{each}/cmdline").read_bytes():
                return each
    return 0


def test_kafka_real_without_java_is_refused_with_what_to_install(
    tmp_path: Path, temporary: Path
) -> None:
    said = tmp_path / "said"
    with running(["up", "--kafka-real"], temporary, said, path=str(tmp_path)) as process:
        assert process.wait(END_S) == exits.REFUSED
    assert "error: no Java here: install a JRE of version 17 or later" in said.read_text()
