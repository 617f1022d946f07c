"""Properties of the images that need no build: pinned, one user, no secrets, small."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from common.config.settings import read_settings
from tests.dockerfiles import DOCKERFILE, Instruction, chain, needed, read

ROOT = Path(__file__).parents[3]
STAGES = read(DOCKERFILE.read_text())
TARGETS = ("service", "worker")
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|CREDENTIAL|(?<!E)KEY", re.IGNORECASE)
PINNED = re.compile(r"[a-z]+:\d+\.\d+\.\d+-[a-z-]+")


def instructions(*words: str) -> list[Instruction]:
    return [i for stage in STAGES.values() for i in stage.instructions if i.word in words]


def of_target(target: str, word: str) -> list[Instruction]:
    return [i for stage in chain(STAGES, target) for i in stage.instructions if i.word == word]


def extras(target: str) -> set[str]:
    """Return the extras whose requirements are installed for a target."""
    texts = [i.text for s in needed(STAGES, target) for i in s.instructions if i.word == "RUN"]
    return {
        e
        for text in texts
        for found in re.findall(r"\[([a-z,]+)\]", text)
        for e in found.split(",")
    }


def test_base_images_are_pinned_to_a_patch_version() -> None:
    begun_with = {stage.parent for stage in STAGES.values()} - STAGES.keys()
    # Compiled files of one stage run in the other.
    assert len(begun_with) == 1
    for image in begun_with:
        assert PINNED.fullmatch(image), image


def test_packages_are_installed_under_constraints() -> None:
    for run in instructions("RUN"):
        for step in re.split(r"&&|;", run.text):
            if " install " in step:
                ours = "--no-deps --force-reinstall /wheels/code/" in step
                assert ours or "--constraint constraints.txt" in step, step
            assert "apt" not in step.split(), f"{step}: unpinned, and may bring a compiler"


def test_copied_modules_exist_and_are_in_the_build_context() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    # Only named files are sent to the engine.
    assert "*" in lines
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    wanted = set[str]()
    for copy in instructions("COPY"):
        stage, sources, _ = copy.copied()
        if stage is None:
            wanted |= {source.removesuffix("/public/pyproject.toml") for source in sources}
        else:
            assert stage in STAGES, copy
    assert wanted == sent
    assert all((ROOT / name).exists() for name in wanted)


@pytest.mark.parametrize("target", TARGETS)
def test_target_ends_with_a_numeric_non_root_user(target: str) -> None:
    last = STAGES[target].instructions[-1]
    # Kubernetes can tell from a number that the user is not root.
    assert last == Instruction("USER", "10001:10001")


@pytest.mark.parametrize("target", TARGETS)
def test_target_has_entrypoint_health_check_and_stop_signal(target: str) -> None:
    (health,) = of_target(target, "HEALTHCHECK")
    _, command = health.health()
    module = command[-1]
    assert command == ["python", "-m", module]
    assert (ROOT / f"{module.replace('.', '/')}.py").exists()
    (entry,) = of_target(target, "ENTRYPOINT")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert entry.listed()[0] in scripts
    assert [i.text for i in of_target(target, "STOPSIGNAL")] == ["SIGTERM"]


@pytest.mark.parametrize("target", TARGETS)
def test_image_settings_are_known_and_their_ports_exposed(
    target: str,
) -> None:
    variables = {n: v for i in of_target(target, "ENV") for n, v in i.pairs().items()}
    ours = {name: value for name, value in variables.items() if name.startswith("DOLL_")}
    settings = read_settings(ours)
    # No misspelt name and no default value.
    assert ours.keys() == settings.environ().keys()
    exposed = {int(port) for i in of_target(target, "EXPOSE") for port in i.text.split()}
    assert exposed == {settings.api_port, settings.metrics_port}


def test_image_contains_no_secrets() -> None:
    names = {name for i in instructions("ARG", "ENV", "LABEL") for name in i.pairs()}
    assert "DOLL_METRICS_PORT" in names
    assert not [name for name in names if SECRET.search(name)]


def test_dockerfile_names_no_host_and_needs_no_buildkit() -> None:
    text = DOCKERFILE.read_text()
    # Each site chooses its own package index.
    assert "://" not in text
    assert "--mount" not in text
    assert not [i for i in instructions("COPY") if i.text.startswith(("--link", "--chown"))]


def test_image_contains_the_extras_of_its_services_and_service_no_torch() -> None:
    known: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras("service") == {"admin", "cli", "provisioner", "registry", "tracing"}
    trained = {"coordinator", "evaluator", "provisioner", "registry", "serve", "tracing", "worker"}
    # A provisioner in this image may run workers as processes of its own.
    assert extras("worker") == trained
    assert not [extra for extra in extras("service") if "torch" in known[extra]]
    packages = [s for s in needed(STAGES, "service") for i in s.instructions if " torch" in i.text]
    assert packages == []


def test_code_change_does_not_reinstall_requirements() -> None:
    for target in TARGETS:
        packages = STAGES[f"{target}-packages"].instructions
        ours = next(i for i, step in enumerate(packages) if "--from=code" in step.text)
        later = [step.text for step in packages[ours + 1 :]]
        assert later == [
            "pip --python /opt/doll install --no-deps --force-reinstall /wheels/code/*.whl"
        ]


@pytest.mark.parametrize(
    ("torch", "index", "installed"),
    [
        ("cuda", "", ["--constraint constraints.txt torch"]),
        ("cuda", "there", ["--constraint constraints.txt torch"]),
        ("cpu", "", ["--constraint constraints.txt torch"]),
        (
            *("cpu", "there"),
            [
                "--no-deps --index-url there --constraint constraints.txt torch",
                # The dependencies of torch come from another index.
                "--constraint constraints.txt torch",
            ],
        ),
        ("gpu", "", []),
    ],
)
def test_torch_comes_from_the_index_in_the_build_arguments(
    torch: str, index: str, installed: list[str], tmp_path: Path
) -> None:
    (step,) = [
        i.text
        for i in STAGES["worker-packages"].instructions
        if " torch" in i.text and i.word == "RUN"
    ]
    pip = tmp_path / "pip"
    pip.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    pip.chmod(0o755)
    done = subprocess.run(  # noqa: S603 -- a step of our own Dockerfile
        ["/bin/sh", "-c", step],
        env={"PATH": f"{tmp_path}:{os.defpath}", "TORCH": torch, "TORCH_INDEX": index},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == bool(installed), done.stderr
    asked = (tmp_path / "asked").read_text().splitlines() if installed else []
    assert asked == [f"--python /opt/doll install {arguments}" for arguments in installed]


@pytest.mark.parametrize(
    "text",
    [
        "FROM python:3.11.1-slim AS one\nADD https://example.org/x /x\n",
        "FROM python:latest\n",
        "FROM --platform=linux/amd64 python:3.11.1-slim AS one\n",
        "FROM python:3.11.1-slim AS one\nONBUILD RUN true\n",
    ],
    ids=["ADD", "no name", "options", "ONBUILD"],
)
def test_dockerfile_reader_rejects_unknown_instructions(text: str) -> None:
    with pytest.raises(AssertionError):
        read(text)


def test_dockerfile_reader_joins_continued_lines() -> None:
    text = "RUN this \\\n # not that\n && \\\n   that\nENV A=1 \\\n B='2 3'\n"
    run, env = read(f"FROM a:1.0.0-slim AS one\n{text}")["one"].instructions
    assert run.text == "this && that"
    assert env.pairs() == {"A": "1", "B": "2 3"}
