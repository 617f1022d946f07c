"""How late things are in the simulated world, as measured with a real Kafka and a real Redis."""

from __future__ import annotations

from dataclasses import dataclass

LOOK_S = 0.1  # between looks at the standing of who waits for room (`WorkerSettings.standing_s`)


@dataclass(frozen=True, slots=True)
class Delays:
    """Of one machine that runs everything."""

    control_s: float = 0.003  # from a record's append to its reader, if that one waits for it
    board_s: float = 0.0005  # a trigger or a gradient through Redis
    death_s: float = 0.1  # until a preempted machine's work is given to others
