"""Programs of a plain image, run as an engine runs them: its variables and its user, no others."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.integration.plain_image import may_enter, python_for_everybody

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.integration.plain_image import PlainImage


@dataclass(frozen=True)
class PlainContainer:
    """An image, and the variables that somebody gives to it.

    Args:
        image: It is built.
        given: Variables besides the image's own.
        own_user: As whoever runs the test, who reaches embedded servers; else as the image's user
            wherever that can be.
    """

    image: PlainImage
    given: Mapping[str, str]
    own_user: bool = False

    @property
    def user(self) -> int:
        """Who its processes are."""
        torch = self.image.packages / "torch"  # linked from where only we may read, perhaps
        readable = not torch.exists() or may_enter(torch.resolve() / "__init__.py")
        able = os.getuid() == 0 and python_for_everybody() is not None and readable
        return self.image.user if able and not self.own_user else os.getuid()

    @contextmanager
    def running(self, arguments: Sequence[str], said: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Start the entry point; it is killed in the end if it still runs.

        Args:
            arguments: The container's command.
            said: Where its output goes.
        """
        nobody = self.user == self.image.user
        with (
            said.open("wb") as output,
            subprocess.Popen(  # noqa: S603 -- the entry point of our own image
                self._found([*self.image.entrypoint, *arguments]),
                env=self._variables(),
                cwd=self.image.root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                user=self.image.user if nobody else None,
                group=self.image.group if nobody else None,
                extra_groups=[] if nobody else None,
            ) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    def ran(self, *command: str) -> str:
        """Run a program to its end, as `docker exec` would; gives its standard output.

        Raises:
            AssertionError: If it does not end with 0; says what it said.
        """
        done = subprocess.run(  # noqa: S603 -- programs of our own image
            self._found(command),
            env=self._variables(),
            cwd=self.image.root,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _variables(self) -> dict[str, str]:
        return self.image.environment | dict(self.given)

    def _found(self, command: Sequence[str]) -> list[str]:
        program = shutil.which(command[0], path=self.image.environment["PATH"])
        assert program is not None, f"{command[0]}: not in the image"
        return [program, *command[1:]]
