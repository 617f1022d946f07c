"""A child of `fork_child` for tests. Its arguments are what it does, and its inherited socket."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys

if __name__ == "__main__":
    action, descriptor = sys.argv[1:]
    channel = socket.socket(fileno=int(descriptor))
    if action.isdigit():
        sys.exit(int(action))
    if action.startswith("SIG"):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), signal.Signals[action])
    if action == "echo":
        os.write(1, b"output\n")
        os.write(2, b"error\n")
        channel.sendall(channel.recv(100))
    if action == "group":
        os.fork()
    if action in ("daemon", "tree") and os.fork() == 0:
        os.setsid()
        # The kernel gives the daemon to another parent when this process ends.
        if os.fork():
            os._exit(0)
        if action == "tree" and os.fork() == 0:
            os.setsid()
    if action in ("group", "daemon", "tree"):
        channel.sendall(b"%d\n" % os.getpid())
    signal.pause()
