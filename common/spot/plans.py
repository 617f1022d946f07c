"""Convert records of the plans topic to JSON and back.

Decisions stay in Kafka for future programs. `common.wire.messages` says how formats grow.
"""

from __future__ import annotations

import msgspec

from common.spot.provisioning.records import Planned, PlanRecord, Priced
from common.wire.messages import MessageCodec, need


def _check_plan(record: PlanRecord) -> None:
    if isinstance(record, Priced):
        need(bool(record.usd_per_hour or record.offers), "usd_per_hour", {}, "at least one pool")
    if not isinstance(record, Planned):
        return
    pools, machines = record.pools, record.machines
    for place in record.places:
        need(place < len(pools), "places", place, f"-1 or the index of one of {len(pools)} pools")
    for machine in machines:
        need(machine.pool in pools, "machines", machine, "one of the plan's pools")
    need(not (record.places and machines), "machines", machines, "none beside places")


_PLAN = MessageCodec("plan", msgspec.json.Decoder(PlanRecord), _check_plan)

encode_plan, decode_plan = _PLAN.encode, _PLAN.decode
