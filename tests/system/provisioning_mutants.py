"""Rules of provisioning, each removed by an edit of the source, which the worlds must detect.

One rule has no mutant: a Lead names the one before it. Without it, a late candidate replaces the
provisioner in charge. That costs work, not truth, because the candidate has read all decisions by
then.
"""

from __future__ import annotations

from tests.system.mutants import Edit, Mutant

HERE = "common/spot/provisioning/"

PROVISIONING_MUTANTS = (
    Mutant(
        "an order is written and read back before it is sent",
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
        "a launch always has the same token",
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
        "machines of an ended order are released",
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
        "a machine is lost only after several missed reports",
        50,
        (Edit(HERE + "fleet_watch.py", "missed.looks < LOOKS or", "missed.looks < 1 and"),),
    ),
    Mutant(
        "a job is settled when all of its machines have ended",
        20,
        (Edit(HERE + "term.py", "not ledger.open and ", ""),),
    ),
    Mutant(
        "orders of a predecessor are sent again",
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
        "a released machine costs the minimum billing time of its pool",
        50,
        (Edit(HERE + "bill.py", "started_s + paid_s", "ended_s"),),
    ),
    Mutant(
        "a machine costs what its own type costs",
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
        "a slot gets another machine only after its machine has ended",
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
        "a machine has one slot's stream for as long as it runs",
        60,
        (
            Edit(HERE + "fleet_ledger.py", " or instance.slot is not None:", ":"),
            Edit(HERE + "slots.py", "if instance.slot is None and ready", "if ready"),
        ),
    ),
    Mutant(
        "a slot is assigned to a machine that has started up",
        60,
        (Edit(HERE + "slots.py", " + start_up_s.get(instance.pool, 0.0)", ""),),
    ),
    Mutant(
        "a start-up is timed only if it was observed from the start",
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
        "surplus machines are released",
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
        "a machine that was not reported yet has not left",
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
        "a plan bids for a machine once",
        60,
        (Edit(HERE + "fleet_diff.py", " - gone_bids.get(offer, 0)", ""),),
    ),
    Mutant(
        "an order states its bid",
        60,
        (Edit(HERE + "fleet_watch.py", "*instance.asked[1:],", "*instance.asked[1:3],"),),
    ),
    Mutant(
        "the hour of an eviction is refunded",
        60,
        (Edit("common/spot/theory/billing.py", "np.floor(paid_s / self", "np.ceil(paid_s / self"),),
    ),
)
