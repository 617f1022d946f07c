"""The contents of an image start as in a container: unprivileged, on read-only files."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx2
import pytest

from common.embedded.process import free_port
from common.kafka.opening import open_log
from common.kafka.port import NewTopic
from services.admin.routes.requests import JOB
from tests.dockerfiles import DOCKERFILE
from tests.integration.cluster import await_condition
from tests.integration.plain_container import PlainContainer
from tests.integration.plain_image import PlainImage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.config.settings import Settings

pytestmark = pytest.mark.nightly  # images are built first
pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

EXAMPLES = DOCKERFILE.parent.parent / "docs" / "examples"
NOWHERE = {"DOLL_KAFKA": "127.0.0.1:1", "DOLL_REDIS": "redis://127.0.0.1:1"}
SERVICES = {
    "service": ("admin", "provisioner"),
    "worker": ("worker", "coordinator", "evaluator", "provisioner"),
}
TRAINING = ("torch", "triton", "nvidia", "cuda")
# Target service, without Python (deploy/README.md).
MEGABYTES = 500


@pytest.fixture(scope="module")
def images() -> Iterator[dict[str, PlainImage]]:
    """Both targets, built at the same time because that is slow."""
    roots = {target: Path(tempfile.mkdtemp(prefix=f"doll-{target}-")) for target in SERVICES}
    try:
        made = {target: PlainImage(root, target) for target, root in roots.items()}
        for root in roots.values():
            root.chmod(0o755)  # the image's user comes in too
        with ThreadPoolExecutor() as builders:
            list(builders.map(PlainImage.build, made.values()))
        yield made
    finally:
        for root in roots.values():
            shutil.rmtree(root)


@pytest.fixture
def service(images: dict[str, PlainImage]) -> PlainImage:
    return images["service"]


def status(url: str) -> int:
    """Return the status of the answer. 0 if no server listens."""
    try:
        return httpx2.get(url).status_code
    except httpx2.TransportError:
        return 0


class Begun(NamedTuple):
    """A running service, and its address."""

    container: PlainContainer
    process: subprocess.Popen[bytes]
    url: str
    said: Path

    def well(self) -> bool:
        """Return True if the health check passes. Fails if the process has ended."""
        assert self.process.poll() is None, self.said.read_text()
        return status(f"{self.url}/healthz") == 200


@pytest.mark.parametrize("target", SERVICES)
def test_services_start_without_servers_are_healthy_and_stop_on_signal(
    target: str, images: dict[str, PlainImage], tmp_path: Path
) -> None:
    image = images[target]
    begun = dict[str, Begun]()
    with ExitStack() as ending:
        for name in SERVICES[target]:
            port, said = free_port(), tmp_path / f"{name}.log"
            given = {"DOLL_METRICS_PORT": str(port), "DOLL_API_PORT": str(free_port())}
            market = {"DOLL_MARKET": str(EXAMPLES / "market.yaml")}
            container = PlainContainer(image, NOWHERE | given | market)
            process = ending.enter_context(container.running([name], said))
            begun[name] = Begun(container, process, f"http://127.0.0.1:{port}", said)
        for name, one in begun.items():
            await_condition(one.well, f"{name} is well")
            one.container.ran(*image.health)  # the engine does the same
            assert status(f"{one.url}/metrics") == 200
            one.process.send_signal(signal.Signals[image.stop_signal])
        for one in begun.values():
            assert one.process.wait(60) == 0, one.said.read_text()
            lines = one.said.read_text().splitlines()
            assert all("event" in json.loads(line) for line in lines), lines
    user = container.user
    if user != image.user:
        sys.stderr.write(f"\nAS USER {user}, WHO MAY WRITE: {image.user} cannot be had here\n")


@pytest.mark.parametrize("target", SERVICES)
def test_installed_packages_are_consistent_and_compiled(
    target: str, images: dict[str, PlainImage]
) -> None:
    image = images[target]
    check = [sys.executable, "-m", "pip", "--python", str(image.root / "opt/doll"), "check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)  # noqa: S603 -- pip
    assert done.returncode == 0, done.stdout
    # Python could not cache the bytecode on a read-only file system, and would compile at each
    # start.
    assert list((image.packages / "common" / "__pycache__").glob("errors.cpython-*.pyc"))
    assert not (image.packages / "pip").exists()
    assert not (image.root / "src").exists()


def test_service_image_is_small_and_has_neither_torch_nor_cuda(service: PlainImage) -> None:
    peek = f"import importlib.util as u; print([n for n in {TRAINING} if u.find_spec(n)])"
    assert PlainContainer(service, {}).ran("python", "-c", peek).strip() == "[]"
    sizes = (p.lstat().st_size for p in service.packages.rglob("*") if p.is_file())
    megabytes = sum(sizes) / 1e6
    sys.stderr.write(f"\nservice: {megabytes:.0f} MB of packages, bytecode included\n")
    assert 100 < megabytes < MEGABYTES


def test_service_image_accepts_jobs_and_serves_its_page_without_torch(
    service: PlainImage, embedded: Settings, tmp_path: Path
) -> None:
    log, port = open_log(embedded), free_port()
    for stream in JOB["streams"]:
        log.create_topics([NewTopic(stream, 2)])
    given = {"DOLL_METRICS_PORT": str(free_port()), "DOLL_API_PORT": str(port)}
    ours = PlainContainer(service, {**embedded.environ(), **given}, own_user=True)
    key = ours.ran("doll", "key", "create", "ada", "--role", "operator").strip()
    url, said = f"http://127.0.0.1:{port}", tmp_path / "admin.log"
    with (
        ours.running(["admin"], said) as process,
        httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}) as client,
    ):

        def ready() -> bool:
            assert process.poll() is None, said.read_text()
            return status(f"{url}/readyz") == 200

        await_condition(ready, "the admin service is ready")
        assert client.post("/v1/jobs", json=JOB).status_code == 201
        assert JOB["name"] in ours.ran("doll", "job", "list")
        by_api = PlainContainer(service, {"DOLL_API": url, "DOLL_API_KEY": key})
        assert JOB["name"] in by_api.ran("doll", "job", "list")
        for path in ("/", "/docs", "/openapi.json", "/metrics", "/v1/jobs"):
            assert client.get(path).status_code == 200, path
        page = client.get("/").text
        scripts = [part.partition('"')[0] for part in page.split('src="')[1:]]
        assert scripts
        for script in scripts:
            assert client.get(script).status_code == 200, script
