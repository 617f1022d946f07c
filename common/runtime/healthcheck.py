"""Whether this container's process is healthy: `python -m common.runtime.healthcheck`; 0 if so.

Asks http://127.0.0.1:$DOLL_METRICS_PORT/healthz, or DOLL_METRICS_HOST where that is one address. It
runs every few seconds in every container, so it imports next to nothing: no pydantic, not even
urllib. It takes 20 ms, as Python alone does.
"""

from __future__ import annotations

import os
import socket
import sys
from time import monotonic

TIMEOUT_S = 3.0  # for all of it: a process that is frozen takes the connection and says nothing
ANSWER_BYTES = 65536
HEALTHY, UNHEALTHY, USAGE = 0, 1, 2
EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 -- to be recognised, not to listen on
HELP = """\
usage: python -m common.runtime.healthcheck

Asks the process that serves metrics at DOLL_METRICS_HOST and DOLL_METRICS_PORT. Exits with 0 if it
is healthy, else with 1 and one line why.

example: DOLL_METRICS_PORT=9102 python -m common.runtime.healthcheck || echo unhealthy
"""


def main(arguments: list[str]) -> int:
    """Ask; returns the exit status."""
    if arguments:
        asked = arguments in (["-h"], ["--help"])
        print(HELP, end="", file=sys.stdout if asked else sys.stderr)
        return HEALTHY if asked else USAGE
    host = os.environ.get("DOLL_METRICS_HOST", "")
    port = os.environ.get("DOLL_METRICS_PORT", "")
    complaint = find_problem("127.0.0.1" if host in EVERYWHERE else host, port)
    if complaint:
        print(f"unhealthy: {complaint}", file=sys.stderr)  # noqa: T201 -- to whoever asked
    return UNHEALTHY if complaint else HEALTHY


def find_problem(host: str, port: str, timeout_s: float = TIMEOUT_S) -> str:
    """Say in one line what is wrong, empty if nothing is."""
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return f"DOLL_METRICS_PORT must be the port of the process's metrics, got {port!r}"
    try:
        status, reason = _asked(host, int(port), timeout_s)
    except TimeoutError:
        return f"no answer from {host}:{port} within {timeout_s:g} s"
    except OSError as error:
        return f"{host}:{port}: {error}"
    return "" if status == "200" else reason or f"{host}:{port} answers with status {status!r}"


def _asked(host: str, port: int, timeout_s: float) -> tuple[str, str]:
    """Status, and the first line of what was answered."""
    until = monotonic() + timeout_s
    answer = b""
    with socket.create_connection((host, port), timeout_s) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        while len(answer) < ANSWER_BYTES:
            connection.settimeout(max(until - monotonic(), 0.001))  # 0 would not wait at all
            part = connection.recv(ANSWER_BYTES)
            if not part:
                break
            answer += part
    head, _, body = answer.decode(errors="replace").partition("\r\n\r\n")
    words = head.split(maxsplit=2)
    return words[1] if len(words) > 1 else "", body.partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
