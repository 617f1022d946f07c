"""Simulations in separate processes, with limits on their number and time."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from common.config.program import command_of, search_path
from common.errors import GivenError, UserError
from common.spot.planning.simulation import REPORT
from common.telemetry.logging import event_logger

if TYPE_CHECKING:
    from common.spot.planning.simulation import SimulateRequest

# Most simulations at a time. Each keeps a core busy.
AT_ONCE = 2
RETRY_S = 5
# Maximum number of characters of stderr that are logged.
_SAID = 2000
# Each library would start one thread per core, and they would wait for each other.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

_log = event_logger(__name__)


class Simulations:
    """Runs simulations; belongs to the event loop.

    Attributes:
        running: Number of running simulations.

    Args:
        longest_s: Time after which a simulation is killed.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self.running = 0

    async def run(self, asked: SimulateRequest) -> bytes:
        """Simulate, and return the results as JSON.

        Raises:
            HTTPException: 429 if `AT_ONCE` simulations are running.
            GivenError: If it takes too long; the message says what to change.
            UserError: If a number is invalid.
        """
        if self.running >= AT_ONCE:
            headers = {"Retry-After": str(RETRY_S)}
            raise HTTPException(429, f"{AT_ONCE} simulations are running already", headers)
        self.running += 1
        try:
            return await self._run(asked)
        finally:
            self.running -= 1

    async def _run(self, asked: SimulateRequest) -> bytes:
        # The process needs no settings, which contain secrets.
        environment = {name: v for name, v in os.environ.items() if not name.startswith("DOLL_")}
        process = await asyncio.create_subprocess_exec(
            *command_of("common.spot.planning.simulation_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**environment, **_ONE_THREAD, "PYTHONPATH": search_path(sys.path)},
        )
        try:
            async with asyncio.timeout(self._longest_s):
                answer, said = await _converse(process, asked.model_dump_json().encode() + b"\n")
        except TimeoutError:
            problem = (
                f"took longer than {self._longest_s:g} s; request fewer runs, policies or updates,"
                " or run `doll simulate` without --api"
            )
            raise GivenError(("experiment.updates", "runs"), problem) from None
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        if process.returncode:
            _log.error("simulation_failed", status=process.returncode, said=said[-_SAID:].decode())
            raise RuntimeError("a simulation failed; the log has its last output")
        report = REPORT.decode(answer)
        if report.refused:
            raise UserError(report.refused)
        return bytes(report.results)


async def _converse(process: asyncio.subprocess.Process, order: bytes) -> tuple[bytes, bytes]:
    """Send the request and return stdout and stderr; stdin stays open, or the process would end."""
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    if stdin is None or stdout is None or stderr is None:
        raise RuntimeError("a process without pipes")
    output = asyncio.gather(stdout.read(), stderr.read())
    try:
        stdin.write(order)
        await stdin.drain()
    except ConnectionError:
        # The process has ended; stderr explains why.
        pass
    answer, said = await output
    await process.wait()
    return answer, said
