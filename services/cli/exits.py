"""What the exit status of `doll` means; scripts may rely on it."""

from __future__ import annotations

from typing import Final

OK: Final = 0
FAILED: Final = 1  # a fault of ours: the traceback is for a bug report
USAGE: Final = 2  # the command line itself, said by the parser
REFUSED: Final = 3  # what was asked makes no sense: a job file, a name, a topic
UNAVAILABLE: Final = 4  # Kafka, Redis or the blob store did not answer or did not do it
AUDIT_BROKEN: Final = 5  # the audit found a gap, an overlap or a batch used twice
AUDIT_INCOMPLETE: Final = 6  # the audit found nothing wrong, but records it needs are gone
