"""The guides are right: their commands run, and their examples can be read.

The guides that every user starts with run on every change. The others run when they, or the
commands that they show, are changed. Tests in tests/unit/cli check each command by itself.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import chain, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from common.config.settings import Settings
from common.data.digits import load_digits
from common.embedded.process import free_port
from common.embedded.services import EmbeddedService, environment_of
from common.embedded.stack import EmbeddedStack
from common.jobs.spec import ProvisioningSpec, job_from_json
from common.kafka.opening import open_log
from common.kafka.port import NewTopic
from common.kafka.settings import embedded_settings
from common.spot.market.market_file import (
    Ec2Provider,
    Market,
    OnDemandPool,
    ProcessProvider,
    SpotPool,
)
from common.spot.plans import decode_plan
from common.spot.provisioning.records import PlanRecord
from doll.yaml_file import as_json, load_text
from services.admin.app import create_app
from services.cli.commands import sources
from tests.changes import marks_of
from tests.integration.cluster import served
from tests.integration.guides import DOCS, blocks, commands, programs, what_goes_wrong

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.mark.structures import ParameterSet

pytest_plugins = ["tests.forked_doll"]

# Records of each stream. The commands end before all of them are trained.
RECORDS = 15_000
LONG_S = 180.0
VERY_LONG_S = 400.0
# Guides whose commands need no server.
ALONE = ("howto/choosing.md",)
WITH_SERVERS = ("start/your-task.md",)  # the reader starts the services
WITH_TRANSFORMERS = ("howto/finetuning.md",)  # several processes import peft for 20 s each
WITH_CONTAINERS = ("start/compose.md",)  # tested in test_compose.py
# The reader has a running stack. The guides of a line share it, in this order.
WITH_A_STACK = (
    ("howto/evaluation.md", "howto/serving.md"),
    ("howto/operating.md", "howto/alerts.md"),
    ("howto/security.md",),
    ("reference/api.md", "examples/follow.ipynb"),
    ("start/your-topics.md",),
)
ALWAYS = {"howto/security.md", "start/your-task.md", "start/your-topics.md"}
COMMANDS = (
    "services/cli/",
    "common/api/",
    "common/spot/planning/",
    "common/public/",
    "docs/examples/",
)


def case(*guides: str) -> ParameterSet:
    """Guides that run in sequence: at night, unless they or commands changed."""
    marks = marks_of(*COMMANDS, *(f"docs/{guide}" for guide in guides))
    return pytest.param(guides, id=guides[0], marks=marks if ALWAYS.isdisjoint(guides) else ())


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[EmbeddedStack]:
    with EmbeddedStack(Settings(threads=1), blobs=tmp_path / "blobs") as servers:
        yield servers


@pytest.fixture
def reader(stack: EmbeddedStack, doll_program: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return a reader's environment, with servers and a port for an admin service."""
    bootstrap = embedded_settings(stack.settings.embedded_kafka).bootstrap
    logs = tmp_path / "logs"
    logs.mkdir()
    with served(stack.settings, logs) as settings:
        yield environment_of(settings) | {
            "PATH": programs(tmp_path / "bin", doll_program),
            "BOOTSTRAP": bootstrap,
            "DOLL_API_PORT": str(free_port()),
        }


@pytest.fixture
def services(stack: EmbeddedStack, reader: dict[str, str], tmp_path: Path) -> Iterator[None]:  # noqa: ARG001 -- it makes the folder of logs
    """Run two streams of digits and a trainer that serves every job."""
    settings, logs = stack.settings, tmp_path / "logs"
    others = [
        EmbeddedService("coordinator", "coordinator-1", settings, logs, forks=True),
        EmbeddedService("worker", "worker-1", settings, logs, forks=True),
    ]
    try:
        log = open_log(settings)
        digits, writer = load_digits().train, log.writer()
        values = list(
            sources.stream(digits, "tensor", np.random.default_rng(0), repeat=False, warp=False)
        )
        for stream in ("clinic-a", "clinic-b"):
            log.create_topics([NewTopic(stream)])
            for value in islice(cycle(values), RECORDS):
                writer.append(stream, value, partition=0)
        assert writer.flush(LONG_S)
        writer.close()
        yield
    finally:
        for service in others:
            service.kill()


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """Return a working directory with the examples of docs/, at their usual paths."""
    folder = tmp_path / "workdir"
    shutil.copytree(DOCS / "examples", folder / "docs" / "examples")
    return folder


@pytest.mark.parametrize("guides", [case(guide) for guide in ALONE])
def test_commands_without_server_answer_as_the_guide_says(
    guides: tuple[str, ...], workdir: Path, doll_program: Path, tmp_path: Path
) -> None:
    environment = environment_of(Settings()) | {"PATH": programs(tmp_path / "bin", doll_program)}
    wrong = what_goes_wrong(guides, workdir, environment, LONG_S)
    assert not wrong, wrong


@pytest.mark.parametrize("guide", WITH_SERVERS)
def test_commands_that_start_services_answer_as_the_guide_says(
    guide: str, workdir: Path, reader: dict[str, str]
) -> None:
    wrong = what_goes_wrong([guide], workdir, reader, LONG_S, reader["DOLL_API_PORT"])
    assert not wrong, wrong


@pytest.mark.parametrize("guides", [case(guide) for guide in WITH_TRANSFORMERS])
@pytest.mark.timeout(2 * VERY_LONG_S)
def test_fine_tuning_guide_trains_and_stores_adapters_and_head_only(
    guides: tuple[str, ...],
    workdir: Path,
    reader: dict[str, str],
    stack: EmbeddedStack,
    doll_program: Path,
) -> None:
    wrong = what_goes_wrong(guides, workdir, reader, VERY_LONG_S, reader["DOLL_API_PORT"])
    assert not wrong, wrong
    # Two layers with adapters of rank 8 at query and value, and a head for two classes.
    trained = 2 * 2 * 2 * 8 * 64 + 2 * 64 + 2
    adapter = load_file(workdir / "adapter" / "adapter_model.safetensors")
    assert sum(each.size for each in adapter.values()) == trained
    # A checkpoint has the weights and both moments of adamw. The frozen tensors alone are larger.
    blobs = Path(stack.settings.blobs.removeprefix("file://"))
    checkpoints = [path.stat().st_size for path in blobs.rglob("trainer.safetensors")]
    assert 4 * trained < max(checkpoints) < 4 * 3 * trained + 16_384
    command = [str(doll_program), "audit", "reviews", "--json"]
    audit = subprocess.run(command, env=reader, stdout=subprocess.PIPE, check=True)  # noqa: S603 -- our own command line
    found = json.loads(audit.stdout)
    assert found["whole"]
    losses = [each["loss"] for each in found["versions"]]
    assert sum(losses[:5]) / 5 > 0.6
    assert sum(losses[-5:]) / 5 < 0.2


@pytest.mark.usefixtures("services")
@pytest.mark.parametrize("guides", [case(*guides) for guides in WITH_A_STACK])
def test_commands_on_a_running_stack_answer_as_the_guide_says(
    guides: tuple[str, ...], workdir: Path, reader: dict[str, str]
) -> None:
    texts = "".join((DOCS / guide).read_text() for guide in guides)
    if "curl " in texts and not shutil.which("curl"):
        pytest.skip("there is no curl here")
    if "$ DOLL_API_KEY_FILE=" in texts:  # its reader has no other key
        del reader["DOLL_API_KEY"]
    wrong = what_goes_wrong(guides, workdir, reader, LONG_S, reader["DOLL_API_PORT"])
    assert not wrong, wrong


def test_every_guide_with_commands_is_run() -> None:
    alone = {*ALONE, *WITH_SERVERS, *WITH_TRANSFORMERS, *WITH_CONTAINERS}
    run = {*alone, *chain.from_iterable(WITH_A_STACK)}
    files = chain(DOCS.rglob("*.md"), DOCS.rglob("*.ipynb"))
    guides = {path.relative_to(DOCS).as_posix() for path in files}
    assert {guide for guide in guides if blocks(guide, "sh", "console", "python")} == run


def test_api_guide_has_an_example_of_every_route() -> None:
    asked = "\n".join(command.text for command in commands("reference/api.md"))
    document = create_app().openapi()
    for path in document["paths"]:
        shape = re.escape(path).replace(r"\{job\}", "[a-z]+")
        if not path.startswith(("/docs", "/openapi")):
            assert re.search(rf'\$URL{shape}["?\s]|\$URL{shape}$', asked, re.MULTILINE), path


def test_provisioning_guide_shows_every_kind_of_plan_record() -> None:
    [(_, block)] = blocks("explain/provisioning.md", "json")
    shown = block.replace("\n  ", " ").splitlines()  # joins indented lines
    kinds = {type(decode_plan(line.encode())) for line in shown}
    assert kinds == set(get_args(PlanRecord))


def test_readme_job_is_valid() -> None:
    [(_, job)] = blocks("../README.md", "yaml")
    assert job_from_json(as_json(load_text(job))).name == "digits"


def test_provisioning_guide_job_is_valid() -> None:
    [(_, job)] = blocks("explain/provisioning.md", "yaml")
    asked = msgspec.json.decode(as_json(load_text(job)))
    assert ProvisioningSpec.model_validate_json(msgspec.json.encode(asked["provisioning"]))


def test_market_reference_files_are_valid_and_every_field_is_named() -> None:
    shown = [text for _, text in blocks("reference/market.md", "yaml")]
    fleets = [Market.model_validate_json(as_json(load_text(text))).fleet for text in shown]
    assert fleets == ["ec2", "process"]
    text = (DOCS / "reference/market.md").read_text()
    for part in (Market, OnDemandPool, SpotPool, ProcessProvider, Ec2Provider):
        assert [name for name in part.model_fields if f"`{name}" not in text] == [], part
