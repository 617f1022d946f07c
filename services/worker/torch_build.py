"""Asks a throw-away process what the installed PyTorch supports: this process never loads it."""

from __future__ import annotations

import socket
import subprocess
import sys

import msgspec

from common.config.program import command_of
from common.runtime.fork_server import Adopted, fork_child
from services.worker.gpus import TorchBuild

_BUILD = msgspec.json.Decoder(tuple[tuple[str, ...], str | None])


def torch_build() -> TorchBuild:
    """Return the architectures and the CUDA version that the installed PyTorch was built for.

    Raises:
        OSError: If no process can be started.
        DecodeError: If the process fails; its error is on standard error.
    """
    ours, theirs = socket.socketpair()
    with ours, ours.makefile("rb") as answer:
        process: Adopted | subprocess.Popen[bytes]
        with theirs:
            if sys.platform == "linux":
                process = fork_child(__name__, (), 2, theirs)
            else:
                process = subprocess.Popen(  # noqa: S603 -- our own command line, no shell
                    command_of(__name__, str(theirs.fileno())), pass_fds=[theirs.fileno()]
                )
        architectures, cuda = _BUILD.decode(answer.read())
        process.wait()
    return TorchBuild(architectures, cuda)


def main() -> None:
    """Write what PyTorch supports to the socket of the last argument."""
    import torch  # noqa: PLC0415 -- the caller must not load it

    answer = msgspec.json.encode((torch.cuda.get_arch_list(), torch.version.cuda))
    with socket.socket(fileno=int(sys.argv[-1])) as asked:
        asked.sendall(answer)


if __name__ == "__main__":
    main()
