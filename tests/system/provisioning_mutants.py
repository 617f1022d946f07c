"""Rules of provisioning, each removed by an edit of the source, which the worlds must detect.

One rule has no mutant: a Lead names the one before it. Without it, a late candidate replaces the
provisioner in charge. That only costs work, because the candidate has read all decisions by then.
"""

from __future__ import annotations

from tests.system.mutants import Edit, Mutant

HERE = "common/spot/provisioning/"

PROVISIONING_MUTANTS = (
    Mutant(
        "an order is recorded and read back before it is sent",
        10,
        (
            Edit(
                HERE + "term.py",
                "            yield do.AppendPlan(record)\n",
                "            yield do.AppendPlan(record)\n"
                "            if isinstance(record, LaunchRequested):\n"
                "                from common.spot.provisioning.records import client_token\n"
                "                from common.spot.machines import LaunchRequest\n"
                "                token = client_token(self._known.settings.job, record.launch)\n"
                "                place = (record.slot, record.pool, record.worker)\n"
                "                yield do.Launch((LaunchRequest(record.launch, token, *place),))\n",
            ),
        ),
    ),
    Mutant(
        "each launch has a token of its own",
        10,
        (Edit(HERE + "records.py", "f'{job}/{launch}'", "f'{job}'"),),
    ),
    Mutant(
        "a launch has the same token in every request",
        100,
        (
            Edit(
                HERE + "fleet_watch.py",
                "client_token(self.settings.job, instance.launch)",
                "client_token(self.settings.job, instance.launch) + str(now_s)",
            ),
        ),
    ),
    Mutant(
        "records of a former provisioner do not count",
        100,
        (Edit(HERE + "fleet_ledger.py", "record.term != self.term or ", ""),),
    ),
    Mutant(
        "a slot's machine ends before its successor is ordered",
        50,
        (Edit(HERE + "fleet_diff.py", "desired.slot not in leaving", "desired.slot >= 0"),),
    ),
    Mutant(
        "machines whose order has ended are released",
        100,
        (
            Edit(
                HERE + "fleet_watch.py",
                "            elif not instance.open or instance.machine",
                "            elif instance.machine",
            ),
        ),
    ),
    Mutant(
        "a machine is lost only after several missed polls",
        50,
        (Edit(HERE + "fleet_watch.py", "missed.looks < LOOKS or", "missed.looks < 1 and"),),
    ),
    Mutant(
        "a job is settled when all of its machines have ended",
        20,
        (Edit(HERE + "term.py", "not ledger.open and ", ""),),
    ),
    Mutant(
        "a new provisioner sends its predecessor's orders again",
        100,
        (
            Edit(
                HERE + "fleet_watch.py",
                "            and instance.launch not in self._answered_s\n",
                "            and instance.launch not in self._answered_s\n"
                "            and instance.ordered_s >= self._began_s\n",
            ),
            Edit(
                HERE + "fleet_watch.py",
                "    looked: bool = False\n",
                "    looked: bool = False\n    _began_s: float = 0.0\n",
            ),
            Edit(
                HERE + "term.py",
                "        self._begun_s = now_s\n",
                "        self._begun_s = self._watch._began_s = now_s\n",
            ),
        ),
    ),
    Mutant(
        "a released machine costs at least its pool's minimum time",
        50,
        (Edit(HERE + "bill.py", "started_s + paid_s", "ended_s"),),
    ),
    Mutant(
        "a machine costs the price of its own type",
        50,
        (
            Edit(
                HERE + "fleet_ledger.py",
                "Offer(self.pool, self.type, self.zone)",
                "Offer(self.pool)",
            ),
        ),
    ),
    Mutant(
        "a slot is assigned again only after its machine has ended",
        60,
        (
            Edit(
                HERE + "fleet_ledger.py",
                "        if any(other.slot == assigned.slot and other.has_slot "
                "for other in self._open.values()):\n"
                "            return False\n",
                "",
            ),
            Edit(
                HERE + "slots.py",
                "{instance.slot for instance in there if instance.has_slot}",
                "set[int | None]()",
            ),
        ),
    ),
    Mutant(
        "a machine keeps one slot's stream while it runs",
        60,
        (
            Edit(HERE + "fleet_ledger.py", " or instance.slot is not None:", ":"),
            Edit(HERE + "slots.py", "if instance.slot is None and ready", "if ready"),
        ),
    ),
    Mutant(
        "a slot is assigned only to a machine that has started up",
        60,
        (Edit(HERE + "slots.py", " + start_up_s.get(instance.pool, 0.0)", ""),),
    ),
    Mutant(
        "a start-up is timed only if the provisioner polled when the machine started",
        60,
        (
            Edit(
                HERE + "startup_times.py", "self._since_s <= started_s <= by_s", "started_s <= by_s"
            ),
        ),
    ),
    Mutant(
        "a machine that is starting is not ordered again",
        60,
        (
            Edit(
                HERE + "fleet_diff.py",
                "count - len(there.get(offer, ()))",
                "count - sum(each.running for each in there.get(offer, ()))",
            ),
        ),
    ),
    Mutant(
        "machines beyond the plan are released",
        60,
        (
            Edit(
                HERE + "fleet_diff.py",
                "for machine in machines[wanted.get(offer, 0) :]",
                "for machine in machines[wanted.get(offer, len(machines)) :]",
            ),
        ),
    ),
    Mutant(
        "a worker without a heartbeat yet has not left",
        60,
        (
            Edit(HERE + "fleet_watch.py", "elif instance.launch in self._silent:", "else:"),
            Edit(
                HERE + "fleet_watch.py",
                "self._silent[instance.launch] or _Missed",
                "self._silent.get(instance.launch) or _Missed",
            ),
            Edit(HERE + "fleet_watch.py", " or missed.looks < LOOKS:", ":"),
            Edit(
                HERE + "fleet_watch.py",
                "self.settings.grace_s:\n                yield Left",
                "0:\n                yield Left",
            ),
        ),
    ),
    Mutant(
        "a machine is given up only if its worker never reported",
        60,
        (
            Edit(
                HERE + "startup_times.py",
                "if instance.launch in self.reported or spare:",
                "if spare:",
            ),
        ),
    ),
    Mutant(
        "a plan bids only once for a machine",
        60,
        (Edit(HERE + "fleet_diff.py", " - gone_bids.get(offer, 0)", ""),),
    ),
    Mutant(
        "an order contains its bid",
        60,
        (Edit(HERE + "fleet_watch.py", "*instance.asked[1:],", "*instance.asked[1:3],"),),
    ),
    Mutant(
        "the hour of an eviction is refunded",
        60,
        (Edit("common/spot/theory/billing.py", "np.floor(paid_s / self", "np.ceil(paid_s / self"),),
    ),
)
