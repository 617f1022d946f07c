"""Report what a process of the fork server sees of itself. Runs as a module in its own process."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import torch

if __name__ == "__main__":
    ones = torch.ones(1000, 1000, requires_grad=True)
    found = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "path": sys.path,
        "session": os.getsid(0),
        "group": os.getpgid(0),
        "threads": threading.active_count(),
        "chance": float(np.random.rand()),  # noqa: NPY002 -- the one that everybody shares
        "files": sorted(int(each.name) for each in Path("/proc/self/fd").iterdir()),
        "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        # Works only if the threads of torch's gradients were not started before the fork.
        "gradient": torch.autograd.grad(torch.sum(ones), ones)[0].sum().item(),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    if sys.argv[1] == "wait":
        # Otherwise a core file would be left in the working directory.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pause()
    sys.exit(int(sys.argv[1]))
