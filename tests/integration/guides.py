"""Reads the guides of docs/ as a shell would, and runs all their commands in order.

In a `console` block, a line that begins with `$` is a command, and the lines below are its answer.
In an answer, `...` stands for anything, and white space is ignored. `sh` blocks run as they are,
and `python` blocks run as programs. Both must succeed. Other blocks are for readers only. The cells
of a notebook form one program.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

DOCS = Path(__file__).parents[2] / "docs"
MARK = "--- answer of command {} ended with "
END = " ---"


class Command(NamedTuple):
    """A command, and the answer that the guide shows. None if it only has to succeed."""

    text: str
    answer: str | None


def blocks(guide: str, *kinds: str) -> list[tuple[str, str]]:
    """Yield the fenced blocks of a guide, each with its kind."""
    text = (DOCS / guide).read_text()
    if guide.endswith(".ipynb"):
        cells = [each["source"] for each in json.loads(text)["cells"] if "outputs" in each]
        return [("python", "\n\n".join("".join(source) for source in cells) + "\n")]
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(kind, block) for kind, block in found if kind in kinds]


def commands(guide: str) -> Iterator[Command]:
    """Yield everything that a reader would paste, in order."""
    for kind, block in blocks(guide, "sh", "console", "python"):
        if kind == "sh":
            yield Command(block, None)
        elif kind == "python":
            yield Command(f"python - <<'PROGRAM'\n{block}PROGRAM", None)
        else:
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                lines = part.splitlines()
                # Indented lines continue a command, as a shell shows them.
                own = 1 + sum(1 for _ in re.finditer(r"\n    ", part))
                yield Command("\n".join(lines[:own]), "\n".join(lines[own:]))


def answers(answer: str, expected: str) -> bool:
    """Return True if an answer matches the text."""
    parts = ["".join(part.split()) for part in expected.split("...")]
    pattern = ".*".join(map(re.escape, parts))
    return re.fullmatch(pattern, "".join(answer.split()), re.DOTALL) is not None


def programs(folder: Path, doll: Path) -> str:
    """Return a PATH with this program as `doll`, and our `python`."""
    folder.mkdir()
    for name, program in (("doll", doll), ("python", Path(sys.executable))):
        (folder / name).write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def what_goes_wrong(
    guides: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    port: str = "8080",
) -> str:
    """Run guides in one shell. Returns failures and wrong answers; empty if all is well.

    Args:
        guides: The guides' files in docs/, in reading order.
        folder: The reader's working directory.
        environment: The reader's environment variables.
        timeout_s: Time for all commands together.
        port: Port of the admin service. The guides say 8080.
    """
    given = [command for guide in guides for command in commands(guide)]
    assert given, f"{guides} have no command"
    script = "".join(
        # Each command has a line of its own, so that one syntax error does not break the others.
        # Its exit status is reported.
        f"{command.text}\n_status=$?\n"
        f"echo; echo {shlex.quote(MARK.format(number))}$_status{shlex.quote(END)}\n"
        for number, command in enumerate(given)
    ).replace(":8080", f":{port}")
    shell = subprocess.Popen(
        ["bash", "-s"],  # noqa: S607 -- whichever shell the reader has
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A new session, so that services that the shell starts can be stopped with it.
        start_new_session=True,
    )
    try:
        # A service in the background holds the pipe open until it ends.
        ending = "kill -KILL $(jobs -p) 2>/dev/null\nwait 2>/dev/null\n"
        said, _ = shell.communicate(f"{script}\n{ending}", timeout=timeout_s)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
    wrong, rest = list[str](), said
    for number, command in enumerate(given):
        answer, mark, rest = rest.partition(MARK.format(number))
        if not mark:
            return "\n\n".join([*wrong, f"the shell ended at {command.text}\n{answer}"])
        status, _, rest = rest.partition(END + "\n")
        if command.answer is None:
            if status != "0":
                wrong.append(f"{command.text}ended with {status}:\n{answer}")
        elif not answers(answer, command.answer):
            wrong.append(f"$ {command.text}\n{answer}is not\n{command.answer}")
    return "\n\n".join(wrong)
