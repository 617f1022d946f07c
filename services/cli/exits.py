"""Exit statuses of `doll`; scripts may rely on them."""

from __future__ import annotations

from typing import Final

OK: Final = 0
# An internal error: the traceback is for a bug report.
FAILED: Final = 1
# An invalid command line, reported by the parser.
USAGE: Final = 2
# An invalid request: a job file, a name or a topic.
REFUSED: Final = 3
# Kafka, Redis or storage did not answer or refused.
UNAVAILABLE: Final = 4
# The audit found a gap, an overlap or a batch used twice.
AUDIT_BROKEN: Final = 5
# The audit found no error, but some records that it needs are gone.
AUDIT_INCOMPLETE: Final = 6
