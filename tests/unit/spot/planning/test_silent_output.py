"""What libraries print stays out of a command's output."""

from __future__ import annotations

import subprocess
import sys

CHATTER = """
import ctypes
from common.spot.planning.compare import silent_output

print("before")
with silent_output():
    ctypes.CDLL(None).puts(b"a line that nobody asked for")
print("after")
"""


def test_what_a_library_prints_is_discarded_and_what_we_print_is_not() -> None:
    answer = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", CHATTER], capture_output=True, text=True, check=True
    )

    assert answer.stdout == "before\nafter\n"
