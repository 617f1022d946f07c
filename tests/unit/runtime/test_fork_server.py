"""Before a service is forked, the server loads the modules that this kind of service needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

OTHERS = ("sklearn", "scipy", "river", "fastapi", "uvicorn")
PEEK = f"""
import sys
from common.data.digits import load_digits
from common.runtime.fork_server import load
load("coordinator", "worker")
load_digits()
print("torch" in sys.modules, [name for name in {OTHERS!r} if name in sys.modules])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="services are forked on Linux only")
def test_fork_server_of_a_demo_does_not_load_code_of_other_services() -> None:
    result = subprocess.run(  # noqa: S603 -- our own interpreter and program
        [sys.executable, "-c", PEEK],
        env={"OPENBLAS_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "True []"
