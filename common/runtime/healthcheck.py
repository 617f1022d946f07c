"""Health check of a container: `python -m common.runtime.healthcheck` exits with 0 if healthy.

Requests http://127.0.0.1:$DOLL_METRICS_PORT/healthz, or DOLL_METRICS_HOST if that is one address.
Every container runs it every few seconds, so it imports neither pydantic nor urllib. It takes
20 ms, as Python alone does.
"""

from __future__ import annotations

import os
import socket
import sys
from time import monotonic

# Time for the complete answer. A frozen process accepts the connection and sends nothing.
TIMEOUT_S = 3.0
ANSWER_BYTES = 65536
HEALTHY, UNHEALTHY, USAGE = 0, 1, 2
EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 -- only compared, not listened on
HELP = """\
usage: python -m common.runtime.healthcheck

Asks the process that serves metrics at DOLL_METRICS_HOST and DOLL_METRICS_PORT. Exits with 0 if it
is healthy, else with 1 and one line why.

example: DOLL_METRICS_PORT=9102 python -m common.runtime.healthcheck || echo unhealthy
"""


def main(arguments: list[str]) -> int:
    """Run the check and return the exit status."""
    if arguments:
        asked = arguments in (["-h"], ["--help"])
        print(HELP, end="", file=sys.stdout if asked else sys.stderr)
        return HEALTHY if asked else USAGE
    host = os.environ.get("DOLL_METRICS_HOST", "")
    port = os.environ.get("DOLL_METRICS_PORT", "")
    complaint = find_problem("127.0.0.1" if host in EVERYWHERE else host, port)
    if complaint:
        print(f"unhealthy: {complaint}", file=sys.stderr)  # noqa: T201 -- output of a command
    return UNHEALTHY if complaint else HEALTHY


def find_problem(host: str, port: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return the problem in one line; empty if the process is healthy."""
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return f"DOLL_METRICS_PORT: must be the port of the process's metrics, got {port!r}"
    try:
        status, reason = _asked(host, int(port), timeout_s)
    except TimeoutError:
        return f"no answer from {host}:{port} within {timeout_s:g} s"
    except OSError as error:
        return f"{host}:{port}: {error}"
    return "" if status == "200" else reason or f"{host}:{port} answers with status {status!r}"


def _asked(host: str, port: int, timeout_s: float) -> tuple[str, str]:
    """Return the HTTP status and the first line of the body."""
    until = monotonic() + timeout_s
    answer = b""
    with socket.create_connection((host, port), timeout_s) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        while len(answer) < ANSWER_BYTES:
            # A timeout of 0 would make the socket non-blocking.
            connection.settimeout(max(until - monotonic(), 0.001))
            part = connection.recv(ANSWER_BYTES)
            if not part:
                break
            answer += part
    head, _, body = answer.decode(errors="replace").partition("\r\n\r\n")
    words = head.split(maxsplit=2)
    return words[1] if len(words) > 1 else "", body.partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
