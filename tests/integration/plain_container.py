"""Programs of a plain image, run with the variables and the user that an engine would set."""

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
    """A process in an image's directory, with the variables that a user sets.

    Args:
        image: An image that is built already.
        given: Variables besides the image's own.
        own_user: True: run as the user of the test, who can connect to embedded servers. False: run
            as the image's user if possible.
    """

    image: PlainImage
    given: Mapping[str, str]
    own_user: bool = False

    @property
    def user(self) -> int:
        """Return the user id of the processes."""
        # Perhaps a link to a folder that only our user may read.
        torch = self.image.packages / "torch"
        readable = not torch.exists() or may_enter(torch.resolve() / "__init__.py")
        able = os.getuid() == 0 and python_for_everybody() is not None and readable
        return self.image.user if able and not self.own_user else os.getuid()

    @contextmanager
    def running(self, arguments: Sequence[str], said: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run the entry point. It is killed at the end of the context.

        Args:
            arguments: The container's command.
            said: Destination of its output.
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
        """Run a program as `docker exec` would. Returns its standard output.

        Raises:
            AssertionError: If it exits with another status than 0. Contains its output.
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
