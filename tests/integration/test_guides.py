"""What the guides say is so: every command of docs/api.md is run, every example can be read.

In a `console` block a line that begins with `$` is a command, and what follows is its answer, in
which `...` stands for anything and white space for nothing. `sh` blocks are run without looking.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

import msgspec
import numpy as np
import pytest

from common.config import Settings
from common.connections import open_log
from common.datasets.digits import load_digits
from common.embedded.redis import free_port
from common.embedded.services import Service, environment_of
from common.embedded.stack import EmbeddedStack
from common.job_file import as_json, load_text
from common.job_parts import ProvisioningSpec
from common.market import Market
from common.provisioning.codec import decode_plan
from common.provisioning.records import PlanRecord
from services.admin.app import create_app
from services.cli import sources

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[2] / "docs"
RECORDS = 15_000  # of each stream: more than are trained while the commands run
LONG_S = 60.0
MARK = "--- answer of command %d ---"


class Command(NamedTuple):
    """What is to be run, and what it shall answer; None: whatever it does."""

    text: str
    answer: str | None


def blocks(guide: str, *kinds: str) -> list[tuple[str, str]]:
    """The fenced blocks of a guide, each with its kind."""
    text = (DOCS / guide).read_text()
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(kind, block) for kind, block in found if kind in kinds]


def commands(guide: str) -> Iterator[Command]:
    """All that a reader would paste, in order."""
    for kind, block in blocks(guide, "sh", "console"):
        if kind == "sh":
            yield Command(block, None)
            continue
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            # A command goes on where a line is indented, as a shell shows it.
            own = 1 + sum(1 for _ in re.finditer(r"\n    ", part))
            yield Command("\n".join(lines[:own]), "\n".join(lines[own:]))


def answers(answer: str, expected: str) -> bool:
    """Whether an answer is as the text says."""
    parts = ["".join(part.split()) for part in expected.split("...")]
    pattern = ".*".join(map(re.escape, parts))
    return re.fullmatch(pattern, "".join(answer.split()), re.DOTALL) is not None


@pytest.fixture
def place(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment for the commands: servers, two streams, somebody who trains on them."""
    with EmbeddedStack(Settings(threads=1), blobs=tmp_path / "blobs") as stack:
        settings, logs = stack.settings, tmp_path / "logs"
        logs.mkdir()
        others = [
            Service("coordinator", "coordinator-1", settings, logs),
            Service("worker", "worker-1", settings, logs),
        ]
        try:
            log = open_log(settings)
            digits, writer = load_digits().train, log.writer()
            values = list(
                sources.stream(digits, "tensor", np.random.default_rng(0), repeat=False, warp=False)
            )
            for stream in ("clinic-a", "clinic-b"):
                log.create_topic(stream, 1)
                for value in islice(cycle(values), RECORDS):
                    writer.append(stream, value, partition=0)
            assert writer.flush(LONG_S)
            writer.close()
            programs = tmp_path / "bin"
            programs.mkdir()
            doll = programs / "doll"
            doll.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m services.cli "$@"\n')
            doll.chmod(0o755)
            path = f"{programs}{os.pathsep}{os.environ['PATH']}"
            yield environment_of(settings) | {"PATH": path}
        finally:
            for service in others:
                service.kill()


def test_every_command_of_the_guide_to_the_api_answers_as_the_text_says(
    place: dict[str, str], tmp_path: Path
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    given, port = list(commands("api.md")), free_port()
    script = "".join(
        f"{command.text}\necho\necho '{MARK % number}'\n" for number, command in enumerate(given)
    ).replace(":8080", f":{port}")
    shell = subprocess.Popen(
        ["bash", "-s"],  # noqa: S607 -- whichever shell the reader has
        cwd=tmp_path,
        env=place | {"DOLL_API_PORT": str(port)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that the service which it starts can be ended with it
    )
    try:
        # The service holds the pipe open as long as it lives.
        said, _ = shell.communicate(f"{script}\nkill -KILL %1\nwait\n", timeout=LONG_S)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
    wrong, rest = list[str](), said
    for number, command in enumerate(given):
        answer, mark, rest = rest.partition(MARK % number + "\n")
        assert mark, f"the shell ended at {command.text}\n{answer}"
        if command.answer is not None and not answers(answer, command.answer):
            wrong.append(f"$ {command.text}\n{answer}is not\n{command.answer}")
    assert not wrong, "\n\n".join(wrong)


def test_the_guide_to_the_api_has_an_example_of_every_route() -> None:
    asked = "\n".join(command.text for command in commands("api.md"))
    document = create_app().openapi()
    for path in document["paths"]:
        shape = re.escape(path).replace(r"\{job\}", "[a-z]+")
        if not path.startswith(("/docs", "/openapi")):
            assert re.search(rf'\$URL{shape}["?\s]|\$URL{shape}$', asked, re.MULTILINE), path


def test_every_record_that_the_guide_to_provisioning_shows_is_one_and_none_is_left_out() -> None:
    [(_, block)] = blocks("provisioning.md", "json")
    shown = block.replace("\n  ", " ").splitlines()  # a line that is indented goes on
    kinds = {type(decode_plan(line.encode())) for line in shown}
    assert kinds == set(get_args(PlanRecord))


def test_job_file_and_market_file_of_the_guide_to_provisioning_make_sense() -> None:
    (_, job), (_, market) = blocks("provisioning.md", "yaml")
    asked = msgspec.json.decode(as_json(load_text(job)))
    assert ProvisioningSpec.model_validate_json(msgspec.json.encode(asked["provisioning"]))
    assert Market.model_validate_json(as_json(load_text(market))).fleet == "ec2"


@pytest.mark.parametrize("guide", ["api.md", "provisioning.md"])
def test_whatever_a_guide_points_to_is_there(guide: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (DOCS / guide).read_text())
    assert links
    assert [link for link in links if not (DOCS / link).exists()] == []
