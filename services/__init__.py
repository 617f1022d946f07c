"""Our services load our `common`: a folder of a user's may lie before it, by the same name.

It lies in the working directory of `python -m services.worker`, say, or on PYTHONPATH.
"""

import sys
from importlib import import_module
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])

sys.path.insert(0, _ROOT)
try:
    import_module("common")
finally:
    sys.path.remove(_ROOT)
