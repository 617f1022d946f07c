"""The file that `init` names: where it may come from, how much of it is read, and version 0."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

from common.config.settings import Settings
from common.errors import UnavailableError, UserError
from common.jobs.build import parts_of
from common.jobs.job_file import parse_job
from common.jobs.spec import InitSpec
from common.learning.checkpoint import model_in, weights_in
from common.learning.parameters import FlatModel
from common.learning.pretrained import take
from common.learning.tasks import build_model, task_of
from common.learning.trainer import Trainer
from common.storage.memory import MemoryBlobs
from common.storage.store import CheckpointStore
from services.coordinator import initial_weights
from services.coordinator.initial_weights import SourceFile
from tests.unit.cli.test_job import JOB
from tests.unit.services.replicas import MemoryReplica, until
from tests.unit.services.test_coordinator_jobs import TASKS, Bench

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.jobs.store import JobRecord

DATA = bytes(range(256)) * 40
MOST = 1 << 14
HOST = "127.0.0.1"
Handler = Callable[[socket.socket, str], None]


class RawServer:
    """An HTTP server that answers each connection with a function, for answers of any kind."""

    def __init__(self) -> None:
        self._socket = socket.create_server((HOST, 0))
        self.url = f"http://{HOST}:{self._socket.getsockname()[1]}"
        self.handle: Handler = lambda peer, _: peer.sendall(answer(DATA))
        # Requested paths.
        self.asked = list[str]()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        # The client closes the connection once it has seen enough.
        with closing(peer), suppress(OSError):
            path = peer.recv(1 << 16).split()[1].decode()
            self.asked.append(path)
            self.handle(peer, path)

    def close(self) -> None:
        """Accept no more connections."""
        # Otherwise, the thread that waits in `accept` would get one more connection.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def answer(body: bytes, status: str = "200 OK", **headers: object) -> bytes:
    """Return a complete HTTP answer; the connection is closed after it."""
    fields = {"Content-Length": len(body), "Connection": "close"} | headers
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_weights, "MOST_BYTES", MOST)


@pytest.fixture
def server() -> Iterator[RawServer]:
    with closing(RawServer()) as server:
        yield server


def source(address: str, **settings: Any) -> SourceFile:  # noqa: ANN401 -- any settings
    """Return the file at an address, which should hold these bytes."""
    init = InitSpec.model_validate({"from": address, "sha256": hashlib.sha256(DATA).hexdigest()})
    return SourceFile(init, Settings(**settings))


def read(address: str, **options: Any) -> bytes:  # noqa: ANN401 -- as above
    """Read the file at an address."""
    file = source(address, **options)
    file.begin()
    with closing(file):
        file.done.result(60.0)
        return file.path.read_bytes()


# --- paths ---------------------------------------------------------------------------------------


def test_path_below_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "models" / "nets").mkdir(parents=True)
    (tmp_path / "models" / "nets" / "a?.bin").write_bytes(DATA)
    assert read("nets/a?.bin", models=str(tmp_path / "models")) == DATA


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("link", "cannot be read, or is a symbolic link: "),
        ("inside", "cannot be read, or is a symbolic link: "),
        ("folder/secret", "Not a directory"),
        ("none", "No such file"),
        ("pipe", "not a file"),
        ("nets", "not a file"),
        ("file/x", "Not a directory"),
    ],
)
def test_path_that_leaves_the_folder_or_is_no_file_is_refused(
    tmp_path: Path, path: str, problem: str
) -> None:
    folder = tmp_path / "models"
    (folder / "nets").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(DATA)
    (folder / "file").write_bytes(DATA)
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "inside").symlink_to(folder / "file")
    (folder / "folder").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    with pytest.raises(UserError, match=f"init.from: {path} below DOLL_MODELS .*{problem}"):
        read(path, models=str(folder))


def test_path_is_tried_again_if_this_process_has_no_descriptor_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = os.open

    def exhausted(path: str, *rest: int, **others: int) -> int:
        if path == str(tmp_path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opens(path, *rest, **others)

    monkeypatch.setattr(os, "open", exhausted)
    with pytest.raises(UnavailableError, match="Too many open files"):
        read("model.bin", models=str(tmp_path))


def test_path_without_the_setting_is_refused() -> None:
    with pytest.raises(UserError, match="DOLL_MODELS of coordinators is not set"):
        read("model.bin")


def test_file_with_another_checksum_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(DATA + b"!")
    with pytest.raises(UserError, match=r"init\.sha256: the file a has the SHA-256 .*, expected"):
        read("a", models=str(tmp_path))


def test_file_above_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(MOST + 1))
    with pytest.raises(UserError, match="a has more than 16,384 bytes"):
        read("a", models=str(tmp_path))


# --- servers -------------------------------------------------------------------------------------


def test_file_of_a_listed_host_is_read(server: RawServer) -> None:
    assert read(f"{server.url}/a?token=1", init_hosts=(HOST,)) == DATA
    assert server.asked == ["/a?token=1"]


def test_host_that_is_not_listed_is_never_asked(server: RawServer) -> None:
    with pytest.raises(UserError, match=r"127\.0\.0\.1 is not listed in the setting DOLL_INIT_HO"):
        read(f"{server.url}/a", init_hosts=("other",))
    assert server.asked == []


def test_redirect_to_a_listed_host_is_followed(server: RawServer) -> None:
    def handle(peer: socket.socket, path: str) -> None:
        moved = answer(b"moved", "302 Found", Location="/there")
        peer.sendall(answer(DATA) if path == "/there" else moved)

    server.handle = handle
    assert read(f"{server.url}/a", init_hosts=(HOST,)) == DATA


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("https://evil.example/a?secret", "redirects to 'evil.example', which is not listed in"),
        ("//169.254.169.254/a", r"redirects to '169\.254\.169\.254', which is not listed"),
        ("http://user@localhost/a", "redirects to 'localhost', which is not listed"),
        ("http://[", "redirects to '', which is not listed"),
        ("file:///etc/passwd", "redirects to '', which is not listed"),
        ("s3://bucket/key", "redirects to 'bucket', which is not listed"),
        ("/again", "redirects more than 4 times"),
    ],
)
def test_redirect_to_another_host_or_in_circles_is_refused(
    server: RawServer, location: str, problem: str
) -> None:
    server.handle = lambda peer, _: peer.sendall(answer(b"", "307 Moved", Location=location))
    with pytest.raises(UserError, match=problem) as refused:
        read(f"{server.url}/a", init_hosts=(HOST, "s3://bucket"))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("404 Not Found", UserError),
        ("403 Forbidden", UserError),
        ("206 Partial Content", UserError),
        ("503 Busy", UnavailableError),
        ("500 Oops", UnavailableError),
        ("429 Slow down", UnavailableError),
        ("408 Late", UnavailableError),
    ],
)
def test_status_decides_whether_another_attempt_may_help(
    server: RawServer, status: str, error: type[Exception]
) -> None:
    server.handle = lambda peer, _: peer.sendall(answer(DATA, status))
    with pytest.raises(error, match=f"/a returned status {status[:3]}"):
        read(f"{server.url}/a", init_hosts=(HOST,))


def test_endless_body_is_read_up_to_the_limit(server: RawServer) -> None:
    def handle(peer: socket.socket, _: str) -> None:
        peer.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while True:
            peer.sendall(DATA)

    server.handle = handle
    with pytest.raises(UserError, match="more than 16,384 bytes"):
        read(f"{server.url}/a", init_hosts=(HOST,))


@pytest.mark.parametrize("drips", ["headers", "body", "nothing"])
def test_dripping_server_is_given_up_at_the_deadline(
    server: RawServer, drips: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_weights, "READ_S", 0.2)
    begin = b"" if drips == "headers" else answer(DATA)[: -len(DATA)]
    closed = threading.Event()

    def handle(peer: socket.socket, _: str) -> None:
        peer.sendall(begin)
        try:
            while not closed.wait(0.01):
                if drips != "nothing":
                    peer.sendall(b"H")
        except OSError:
            closed.set()

    server.handle = handle
    with pytest.raises(UnavailableError, match=r"did not answer in|could not be read in time"):
        read(f"{server.url}/a", init_hosts=(HOST,))
    closed.set()


@pytest.mark.parametrize("length", [len(DATA) + 1, len(DATA) - 1])
def test_body_of_another_length_than_stated_is_not_used(server: RawServer, length: int) -> None:
    server.handle = lambda peer, _: peer.sendall(answer(DATA, Content_Length=length))
    with pytest.raises((UnavailableError, UserError), match=r"cannot be reached|SHA-256"):
        read(f"{server.url}/a", init_hosts=(HOST,))


def test_server_that_cannot_be_reached_may_be_asked_again(server: RawServer) -> None:
    server.close()
    with pytest.raises(UnavailableError, match="cannot be reached"):
        read(f"{server.url}/a", init_hosts=(HOST,))


def test_plain_http_is_for_this_machine_alone() -> None:
    with pytest.raises(UserError, match=r"init\.from: must begin with https://"):
        parse_job(f"{JOB}\ninit: {{from: http://example.org/a, sha256: {'0' * 64}}}\n")


def test_closed_file_is_deleted_although_the_server_still_sends(server: RawServer) -> None:
    gone = threading.Event()

    def handle(peer: socket.socket, _: str) -> None:
        peer.sendall(answer(DATA)[: -len(DATA)])
        try:
            while not gone.wait(0.01):
                peer.sendall(b"H")
        except OSError:
            gone.set()

    server.handle = handle
    file = source(f"{server.url}/a", init_hosts=(HOST,))
    file.begin()
    until(lambda: file.size > 0, "some bytes have come")
    file.close()
    until(lambda: not file.path.exists(), "the file is deleted")
    assert gone.wait(60.0)


# --- the first leader ----------------------------------------------------------------------------


def tensors() -> dict[str, torch.Tensor]:
    """Return tensors for the task `Frozen`, without its bias."""
    return {"1.weight": torch.full((10, 64), 0.5), "frozen": torch.tensor([7.0, 8.0])}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(initial_weights, "SEARCH_AGAIN_S", 0.01)
    bench = Bench(monkeypatch)
    yield bench
    bench.close()


def submit(bench: Bench, address: str, data: bytes, new: str = "1.bias") -> JobRecord:
    """Submit a job that starts with a file."""
    init = f"init: {{from: {address}, sha256: {hashlib.sha256(data).hexdigest()}, new: ['{new}']}}"
    text = JOB.replace("name: digits", "name: tuned")
    text = text.replace("name: image-classifier", f'entrypoint: "{TASKS}:Frozen"')
    return bench.job_store.submit(parse_job(f"{text}\n{init}\n"))


def replica(
    bench: Bench,
    blobs: MemoryBlobs | None,
    name: str = "c1",
    **more: Any,  # noqa: ANN401 -- as above
) -> MemoryReplica:
    """Start a replica."""
    settings = bench.settings(("Frozen",)).model_copy(update=more)
    bench.replicas.append(MemoryReplica(bench.log, bench.redis, name, settings, blobs))
    return bench.replicas[-1]


def test_first_leader_stores_the_weights_and_later_ones_read_the_stored_ones(
    bench: Bench, server: RawServer
) -> None:
    data, blobs = safetensors.torch.save(tensors()), MemoryBlobs()
    server.handle = lambda peer, _: peer.sendall(answer(data))
    job = submit(bench, f"{server.url}/net", data)
    first = replica(bench, blobs, init_hosts=(HOST,))
    first.look_until(lambda: first.leads("tuned"), "the replica leads")

    store = CheckpointStore(blobs, "tuned")
    weights, kind = weights_in(store.origin(store.init()))
    model = FlatModel(build_model(task_of(job.spec, first.replica.settings.tasks), job.spec.seed))
    assert weights[:640].tolist() == [0.5] * 640
    assert weights[640:].tolist() == model.vector[640:].tolist(), "the bias is the task's own"
    base = safetensors.torch.load(store.base(kind.base))
    assert torch.equal(base["frozen"], tensors()["frozen"])
    [noted] = [
        each for each in bench.job_store.get("tuned").changes if each.action == "initialised"
    ]
    assert noted.by == "coordinator"
    assert noted.reason == (
        f"with the weights of {server.url}/net: 2 taken ('1.weight', 'frozen'), 0 left in the file,"
        " 1 new ('1.bias')"
    )
    first.close()
    bench.replicas.remove(first)
    # Redis loses the snapshot, and the server has no file any more.
    bench.board("tuned").wipe()
    server.close()
    second = replica(bench, blobs, "c2")
    second.look_until(lambda: second.leads("tuned"), "the next replica leads")
    assert server.asked == ["/net"]


def test_job_waits_and_says_why_while_the_server_fails(bench: Bench, server: RawServer) -> None:
    data, fails = safetensors.torch.save(tensors()), threading.Event()
    server.handle = lambda peer, _: peer.sendall(
        answer(data) if fails.is_set() else answer(b"", "503 Busy")
    )
    submit(bench, f"{server.url}/net", data)
    leader = replica(bench, MemoryBlobs(), init_hosts=(HOST,))
    leader.look()
    why = f"init: {server.url}/net returned status 503"
    until(lambda: bench.board("tuned").unable().get("c1") == why, "the replica says why it waits")
    assert bench.job_store.get("tuned").wanted == "running"
    fails.set()
    until(lambda: leader.leads("tuned"), "the replica leads")


def test_waiting_candidate_leads_with_weights_that_another_replica_has_stored(
    bench: Bench, server: RawServer, tmp_path: Path
) -> None:
    data, blobs = safetensors.torch.save(tensors()), MemoryBlobs()
    server.handle = lambda peer, _: peer.sendall(answer(b"", "503 Busy"))
    job = submit(bench, f"{server.url}/net", data)
    waits = replica(bench, blobs, init_hosts=(HOST,))
    waits.look()
    until(lambda: "c1" in bench.board("tuned").unable(), "the replica waits, and has a model")
    path, store = tmp_path / "net", CheckpointStore(blobs, "tuned")
    path.write_bytes(data)
    tasks = waits.replica.settings.tasks
    parts = parts_of(job.spec, tasks, store, lambda module: take(module, path, ["1.bias"]))
    store.put_init(model_in(Trainer(*parts).snapshot()))
    until(lambda: waits.leads("tuned"), "the replica leads")
    assert not bench.job_store.get("tuned").held


@pytest.fixture
def dripping(server: RawServer) -> Iterator[RawServer]:
    """A server that sends a byte now and then."""
    closed = threading.Event()

    def handle(peer: socket.socket, _: str) -> None:
        peer.sendall(answer(DATA)[: -len(DATA)])
        while not closed.wait(0.01):
            peer.sendall(b"H")

    server.handle = handle
    yield server
    closed.set()


def test_replica_that_ends_leaves_no_copy_of_the_file(
    bench: Bench, dripping: RawServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    submit(bench, f"{dripping.url}/net", b"")
    reads = replica(bench, MemoryBlobs(), init_hosts=(HOST,))
    reads.look()
    until(lambda: "c1" in bench.board("tuned").unable(), "the replica says what it reads")
    assert bench.board("tuned").unable()["c1"] == (
        f"reads the initial weights from {dripping.url}/net: 0 MiB so far"
    )
    assert len(list(tmp_path.iterdir())) == 1
    reads.close()
    bench.replicas.remove(reads)
    until(lambda: not list(tmp_path.iterdir()), "the file is deleted")


def test_file_that_no_search_uses_any_more_is_dropped(
    bench: Bench, dripping: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_weights, "UNUSED_S", -1.0)
    submit(bench, f"{dripping.url}/net", b"")
    reads = replica(bench, MemoryBlobs(), init_hosts=(HOST,))
    reads.look()
    until(lambda: len(dripping.asked) > 1, "the next search begins again")


@pytest.mark.parametrize(
    ("address", "data", "new", "why"),
    [
        ("{url}/a", b"other", "1.bias", "init.sha256: the file"),
        ("{url}/a", None, "nothing", "'1.bias' is not in the file"),
        ("https://evil.example/a", None, "1.bias", "evil.example is not listed in the setting"),
        ("s3://evil/a", None, "1.bias", "s3://evil is not listed in the setting"),
        ("models/a", None, "1.bias", "DOLL_MODELS of coordinators is not set"),
    ],
)
def test_job_whose_file_cannot_be_used_is_held(
    bench: Bench, server: RawServer, address: str, data: bytes | None, new: str, why: str
) -> None:
    whole, blobs = safetensors.torch.save(tensors()), MemoryBlobs()
    server.handle = lambda peer, _: peer.sendall(answer(whole))
    submit(bench, address.format(url=server.url), data or whole, new)
    leader = replica(bench, blobs, init_hosts=(HOST,))
    leader.look_until(lambda: bench.job_store.get("tuned").held, "the job is held")
    assert why in bench.job_store.get("tuned").reason
    assert not [name for name in blobs.content if name.startswith("tuned/")]
    until(lambda: leader.leads("innocent"), "the other job is led")


def test_job_without_object_storage_is_held(bench: Bench) -> None:
    submit(bench, "a", b"")
    leader = replica(bench, None)
    leader.look_until(lambda: bench.job_store.get("tuned").held, "the job is held")
    assert "init: requires object storage; set DOLL_BLOBS" in bench.job_store.get("tuned").reason


def test_file_is_not_read_again_once_the_job_has_been_led(bench: Bench, server: RawServer) -> None:
    data, blobs = safetensors.torch.save(tensors()), MemoryBlobs()
    server.handle = lambda peer, _: peer.sendall(answer(data))
    submit(bench, f"{server.url}/net", data)
    first = replica(bench, blobs, init_hosts=(HOST,))
    first.look_until(lambda: first.leads("tuned"), "the replica leads")
    first.close()
    bench.replicas.remove(first)
    bench.board("tuned").wipe()
    blobs.content.clear()
    second = replica(bench, blobs, "c2", init_hosts=(HOST,))
    second.look_until(lambda: bench.job_store.get("tuned").held, "the job is held")
    assert "are not in" in bench.job_store.get("tuned").reason
    assert server.asked == ["/net"]


def test_stopped_job_ends_although_its_file_never_comes(bench: Bench, server: RawServer) -> None:
    server.handle = lambda peer, _: peer.sendall(answer(b"", "503 Busy"))
    submit(bench, f"{server.url}/net", b"")
    leader = replica(bench, MemoryBlobs(), init_hosts=(HOST,))
    leader.look()
    until(lambda: "c1" in bench.board("tuned").unable(), "the replica says why it waits")
    bench.job_store.patch("tuned", "", wanted="stopped")
    leader.look_until(lambda: not leader.takes_part_in("tuned"), "the job ends")
