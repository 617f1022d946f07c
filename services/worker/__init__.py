"""Workers, which read the streams of jobs and compute gradients."""

import os

# A process with threads cannot be forked safely, and OpenBLAS starts some as NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
