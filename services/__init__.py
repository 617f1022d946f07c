"""Makes the services import this project's `common`, not a user's folder of the same name.

Such a folder may be in the working directory of `python -m services.worker`, or on PYTHONPATH.
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
