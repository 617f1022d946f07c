"""Reads the instructions that our Dockerfile uses, and refuses all others."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCKERFILE = Path(__file__).parent.parent / "deploy" / "Dockerfile"

_WORDS = frozenset(
    (
        *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL"),
        *("RUN", "STOPSIGNAL", "USER", "WORKDIR"),
    )
)
_FROM = re.compile(r"(\S+) AS ([a-z-]+)")
_COPY = re.compile(r"(?:--from=([a-z-]+) )?([^-].*)")
_HEALTH = re.compile(r"((?:--[a-z-]+=\S+ )*)CMD (\[.*\])")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its continued lines joined by single spaces."""

    word: str
    text: str

    def words(self) -> list[str]:
        """Split the text as a shell would."""
        return shlex.split(self.text)

    def pairs(self) -> dict[str, str]:
        """Return names and values of ENV, LABEL or ARG. An ARG without a default has none."""
        return {name: value for name, _, value in (w.partition("=") for w in self.words())}

    def listed(self) -> list[str]:
        """Return program and arguments of ENTRYPOINT or CMD, which must not use a shell."""
        found = json.loads(self.text)
        assert isinstance(found, list), f"{self}: not a list"
        return [str(word) for word in found]

    def copied(self) -> tuple[str | None, list[str], str]:
        """Return stage, sources and destination of COPY. The stage is None for the checkout."""
        match = _COPY.fullmatch(self.text)
        assert match, f"{self}: not known"
        *sources, target = match[2].split()
        return match[1], sources, target

    def health(self) -> tuple[dict[str, str], list[str]]:
        """Return the options of HEALTHCHECK, and its command."""
        match = _HEALTH.fullmatch(self.text)
        assert match, f"{self}: not known"
        options = (tuple(option.removeprefix("--").split("=", 1)) for option in match[1].split())
        return dict(options), Instruction("CMD", match[2]).listed()


@dataclass(frozen=True, slots=True)
class Stage:
    """One FROM and what follows it."""

    name: str
    parent: str  # a stage above, or an image
    instructions: tuple[Instruction, ...]


def read(text: str) -> dict[str, Stage]:
    """Return the stages by name, in their order.

    Raises:
        AssertionError: If an instruction is unknown.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    parents = dict[str, str]()
    bodies = dict[str, list[Instruction]]()
    # Instructions of the current stage.
    body = list[Instruction]()
    for line in filter(None, joined.splitlines()):
        word, _, rest = line.partition(" ")
        assert word in _WORDS, f"{word}: no test knows this instruction"
        instruction = Instruction(word, re.sub(r" {2,}", " ", rest.strip()))
        if word == "FROM":
            match = _FROM.fullmatch(instruction.text)
            assert match, f"{line}: each stage has a name, and nothing but that"
            parents[match[2]] = match[1]
            body = bodies.setdefault(match[2], [])
        else:
            body.append(instruction)
    return {name: Stage(name, parents[name], tuple(bodies[name])) for name in parents}


def chain(stages: Mapping[str, Stage], target: str) -> list[Stage]:
    """Return the stages that a target consists of, the first one first."""
    found = list[Stage]()
    name = target
    while name in stages:
        found.insert(0, stages[name])
        name = stages[name].parent
    return found


def needed(stages: Mapping[str, Stage], target: str) -> list[Stage]:
    """Return the stages to build for a target, in order. The target itself is the last."""
    todo, found = [target], set[str]()
    while todo:
        for stage in chain(stages, todo.pop()):
            found.add(stage.name)
            copies = [i.copied()[0] for i in stage.instructions if i.word == "COPY"]
            todo += [source for source in copies if source and source not in found]
    return [stage for stage in stages.values() if stage.name in found]
