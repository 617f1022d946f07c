"""Rules of the protocol, each removed by an edit of the source, which the simulation must detect.

The package is copied, one rule is edited out of the copy, and the simulation runs there. It must
fail within `seeds` seeds, several times the number that was measured. Two kinds of rules have no
mutant: rules whose loss only costs work, and rules that need more seeds than a test has time for.
docs/explain/simulation.md describes both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.changes import changed_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from _pytest.mark.structures import ParameterSet


class Edit(NamedTuple):
    """Replace a text that occurs exactly once in a file."""

    path: str
    before: str
    after: str


class Mutant(NamedTuple):
    """The protocol without one of its rules."""

    rule: str
    seeds: int
    edits: tuple[Edit, ...]

    def write(self, folder: Path) -> None:
        """Edit the rule out of a copy of the sources.

        Raises:
            AssertionError: If the text is not there, or not once.
        """
        for path, before, after in self.edits:
            text = (folder / path).read_text()
            assert text.count(before) == 1, f"{path} reads otherwise now: {before}"
            (folder / path).write_text(text.replace(before, after))


def cases(mutants: Sequence[Mutant]) -> list[ParameterSet]:
    """Return the tests of mutants; those of unchanged files wait for the night."""
    changed = changed_files()
    found = []
    for mutant in mutants:
        waits = changed is not None and not changed & {edit.path for edit in mutant.edits}
        found.append(pytest.param(mutant, id=mutant.rule, marks=[pytest.mark.nightly] * waits))
    return found


CORE, SIMULATION = "common/core/", "common/simulation/faults/"

MUTANTS = (
    # --- streams that change ------------------------------------------------------------------
    Mutant(
        "the leader opens added partitions",
        100,
        (Edit(CORE + "leader.py", "if self.ledger.generation(partition) is None:", "if False:"),),
    ),
    Mutant(
        "a partition is opened only once",
        100,
        (Edit(CORE + "ledger.py", "if opened.after != self.generation(place):", "if False:"),),
    ),
    # --- forged triggers ------------------------------------------------------------------------
    Mutant(
        "workers read the trigger stream that the leader's status names",
        20,
        (
            Edit(
                CORE + "worker_reading.py",
                "TriggerStream(seen.triggers, seen.epoch)",
                "TriggerStream()",
            ),
        ),
    ),
    Mutant(
        "trigger ids of one trigger stream do not count for another",
        20,
        (
            Edit(
                CORE + "order_queue.py",
                "if stream.name != self._stream.name or (",
                "if False and (",
            ),
        ),
    ),
    # --- the control and the updates topic lose records -----------------------------------------
    Mutant(
        "a snapshot names the topics that it belongs to",
        100,
        (
            Edit(
                CORE + "snapshots.py",
                "LogPosition(self.updates_position, self.updates_topic_id, self.updates_epoch)",
                "LogPosition(self.updates_position)",
            ),
            Edit(
                CORE + "snapshots.py",
                "LogPosition(self.control_position, self.control_topic_id, self.control_epoch)",
                "LogPosition(self.control_position)",
            ),
        ),
    ),
    Mutant(
        "a leader tracks the Kafka leader epoch of the control topic",
        200,
        (
            Edit(
                CORE + "leader.py",
                "LogPosition(self.ledger.position, self._control.topic_id, epoch)",
                "LogPosition(self.ledger.position, *self._control[1:])",
            ),
        ),
    ),
    Mutant(
        "a leader tracks the Kafka leader epoch of the updates topic",
        300,
        (
            Edit(
                CORE + "history.py",
                "self.log = self.log._replace(offset=offset + 1, epoch=epoch)",
                "self.log = self.log._replace(offset=offset + 1)",
            ),
        ),
    ),
    Mutant(
        "a snapshot whose topics lost records is not a base",
        100,
        (Edit(CORE + "snapshot_search.py", "if not why[each.rank]]", "]"),),
    ),
    Mutant(
        "a candidate continues in the topics that it checked",
        100,
        (
            Edit(
                CORE + "snapshot_search.py", "_in_topics_of(each, found) for each", "each for each"
            ),
        ),
    ),
    Mutant(
        "an epoch number is never used again",
        800,
        (
            Edit(
                CORE + "coordinator.py",
                "max(number, max(after, chosen.above) + 1 + number % CHANCES),",
                "after + 1,",
            ),
        ),
    ),
    Mutant(
        "a quarantine identifies a batch by value, not by offset",
        600,
        (
            Edit(
                CORE + "replay.py",
                "return self._quarantined.get(batch.offset) == batch",
                "return batch.offset in self._quarantined",
            ),
            Edit(
                CORE + "replay.py",
                "if quarantined is not None and quarantined != batch:",
                "if quarantined is not None and batch is None:",
            ),
        ),
    ),
    Mutant(
        "workers wait for lost claims for a limited time",
        200,
        (Edit(CORE + "worker_reading.py", "UNDECIDED_S = 30.0", "UNDECIDED_S = 1e9"),),
    ),
    Mutant(
        "a worker accepts an older leader status if it persists",
        100,
        (
            Edit(
                CORE + "worker_reading.py",
                "if older and now < self._seen_at + OLDER_S:",
                "if older:",
            ),
        ),
    ),
    # --- streams whose logs changed -----------------------------------------------------------
    Mutant(
        "a worker takes its log position from the leader status",
        1000,
        (
            Edit(
                CORE + "messages.py",
                "return known if whole else LogPosition(claimed, known.topic_id)",
                "return LogPosition(claimed)",
            ),
        ),
    ),
    Mutant(
        "batches whose records are gone expire and are not read from another log",
        1000,
        (
            Edit(
                CORE + "leader.py",
                "if not any(map(self.ledger.is_gone, batch.address)):",
                "if True:",
            ),
            Edit(
                SIMULATION + "workers.py",
                "return any(map(self._is_another, address)) or any(",
                "return any(",
            ),
        ),
    ),
    Mutant(
        "--after-loss opens the streams that lost records",
        100,
        (
            Edit(
                CORE + "losses.py",
                "if not self.after_loss or (divergence.recreated and not self.read_from):",
                "if True:",
            ),
        ),
    ),
    # --- changes of the job -------------------------------------------------------------------
    Mutant(
        "a round in flight keeps its learning rate",
        100,
        (
            Edit(
                CORE + "leader.py",
                "yield from self._aggregation.apply(round_, update, measured=measured)",
                "round_.mode = (self._changed or self._settings).mode\n"
                "        yield from self._aggregation.apply(round_, update, measured=measured)",
            ),
        ),
    ),
    Mutant(
        "an open batch that already has the new b records closes",
        400,
        (
            Edit(
                CORE + "batching.py",
                "return self._close() if self.samples >= batch_size else None",
                "return None",
            ),
        ),
    ),
    Mutant(
        "a worker's bound and K follow changes of the job",
        100,
        (
            Edit(
                CORE + "worker_reading.py",
                "self._settings, batch_size=batch_size, bound=bound, group_size=group_size",
                "self._settings, batch_size=batch_size",
            ),
        ),
    ),
    # --- claims -------------------------------------------------------------------------------
    Mutant(
        "a claim does not begin after the end of the last accepted one",
        400,
        (Edit(CORE + "ledger.py", "if claimed != span.start:", "if claimed > span.start:"),),
    ),
    Mutant(
        "a claim does not begin before the end of the last accepted one",
        100,
        (Edit(CORE + "ledger.py", "if claimed != span.start:", "if claimed < span.start:"),),
    ),
    Mutant(
        "a claim is accepted with all of its spans or with none",
        300,
        (
            Edit(
                CORE + "ledger.py",
                "        for span, place in spans:\n            if reason",
                "        for span, place in spans[:1]:\n            if reason",
            ),
        ),
    ),
    Mutant(
        "workers claim records that retention deleted as expired",
        100,
        (
            Edit(
                CORE + "worker_reading.py",
                "            yield from self._expire(partition, start, now)",
                "            pass",
            ),
        ),
    ),
    Mutant(
        "a worker drops a position that the leader's status contradicts",
        100,
        (
            Edit(
                CORE + "worker_reading.py",
                "            if sure == stands:",
                "            if sure is not None:",
            ),
        ),
    ),
    Mutant(
        "a worker claims no more batches than its bound",
        100,
        (
            Edit(
                CORE + "worker_reading.py",
                "if len(self._held) >= enough and self._waiting >= enough:",
                "if False:",
            ),
        ),
    ),
    Mutant(
        "batches that may have been rejected do not count for the bound",
        1000,
        (
            Edit(
                CORE + "worker_reading.py",
                "return min(len(self._held), waiting + len(self._undecided))",
                "return len(self._held)",
            ),
        ),
    ),
    Mutant(
        "a worker drops settled batches",
        100,
        (
            Edit(
                CORE + "worker_reading.py",
                "        if not gone:\n",
                "        if True:\n",
            ),
        ),
    ),
    # --- leadership ---------------------------------------------------------------------------
    Mutant(
        "only the current leader adds updates",
        400,
        (
            Edit(
                CORE + "history.py",
                "return record.epoch == self.epoch and record.number in (0, self.number + 1)",
                # Keeping the check of numbers would refuse most updates of former leaders.
                "return True",
            ),
        ),
    ),
    Mutant(
        "versions and a leader's record numbers increase by one",
        100,
        (
            Edit(CORE + "history.py", "or update.version != self.head.version + 1", ""),
            Edit(CORE + "history.py", " and record.number in (0, self.number + 1)", ""),
        ),
    ),
    Mutant(
        "a Lead rolls back updates above its base",
        100,
        (
            Edit(
                CORE + "history.py",
                "while len(self._path) > 1 and self._path[-1].version > lead.base.version:",
                "while False:",
            ),
        ),
    ),
    Mutant(
        "a leader stops when another Lead counts",
        500,
        (
            Edit(
                CORE + "coordinator.py",
                "if self.leader is not None and counts:",
                "if False:",
            ),
        ),
    ),
    # --- snapshots ----------------------------------------------------------------------------
    Mutant(
        "a snapshot is published only after its audit was read back",
        300,
        (
            Edit(
                CORE + "snapshot_publishing.py",
                "if pending is None or self._history.number < pending.after:",
                "if pending is None:",
            ),
        ),
    ),
    Mutant(
        "a snapshot that a later Lead rolled back is not used",
        2000,
        (Edit(CORE + "snapshots.py", "if not history.base_lost or", "if True or"),),
    ),
    Mutant(
        "a snapshot contains the batches of the round in flight as waiting",
        100,
        (
            Edit(
                CORE + "leader.py",
                "unsettled = self._grouper.batches + self.rounds.batches",
                "unsettled = self._grouper.batches"
                " + tuple(b for r in self.rounds for b in r.todo.values())",
            ),
        ),
    ),
    Mutant(
        "a round waits while too many audit records are not read back",
        1200,
        (
            Edit(
                CORE + "leader.py",
                " or self._publisher.unread > self._aggregation.unread_audits:",
                ":",
            ),
        ),
    ),
    # --- rounds -------------------------------------------------------------------------------
    Mutant(
        "a gradient must match the round's epoch, not only its version",
        1000,
        (
            Edit(
                CORE + "leader.py",
                "if reply.model.epoch != self._epoch or version > newest",
                "if version > newest",
            ),
            Edit(SIMULATION + "world.py", "setdefault(reply.model.epoch", "setdefault(0"),
            Edit(
                SIMULATION + "coordinators.py", "replies.get(leader.model.epoch,", "replies.get(0,"
            ),
        ),
    ),
    Mutant(
        "a model is cached by epoch and version",
        300,
        (
            Edit(
                SIMULATION + "workers.py",
                "self._model[0] != compute.model:",
                "self._model[0].version != compute.model.version:",
            ),
        ),
    ),
    Mutant(
        "a gradient counts completely or not at all",
        100,
        (
            Edit(
                CORE + "gradient_counting.py",
                "todo = {} if round_ is None else round_.todo",
                "todo = {} if round_ is None else {**round_.todo, **round_.counted}",
            ),
            Edit(
                CORE + "rounds.py",
                "self.counted[offset] = self.todo.pop(offset)",
                "self.counted[offset] = self.todo.pop(offset, None) or self.counted[offset]",
            ),
        ),
    ),
    Mutant(
        "a gradient must include all samples of its batches",
        100,
        (
            Edit(
                CORE + "gradient_counting.py",
                "if round_ is None or gradient.samples != samples:",
                "if round_ is None:",
            ),
        ),
    ),
    Mutant(
        "the leader publishes a missing model again",
        600,
        (
            Edit(CORE + "leader.py", 'if failed.reason == "model_missing":', "if False:"),
            Edit(CORE + "leader.py", "if any(r.asked_again and", "if any(False and"),
        ),
    ),
    Mutant(
        "overdue batches are assigned again",
        100,
        (
            Edit(
                CORE + "leader.py",
                "late, rounds = self.rounds.assigner.overdue(now)",
                "late, rounds = (), ()",
            ),
        ),
    ),
    Mutant(
        "a model difference is applied only to its base model",
        100,
        (
            Edit(
                CORE + "messages.py",
                "return model is not None and self.since == model",
                "return model is not None and self.since is not UNSET",
            ),
        ),
    ),
    # --- several rounds in flight -------------------------------------------------------------
    Mutant(
        "a round begins only if all rounds can meet their staleness limit",
        100,
        (
            Edit(
                CORE + "leader.py",
                "if not self.rounds.may_begin(synchrony.staleness, self._made.version):",
                "if len(self.rounds) > 9:",
            ),
        ),
    ),
    Mutant(
        "a round is applied only if all others can meet their staleness limit",
        100,
        (
            Edit(
                CORE + "leader.py",
                "if whole and self.rounds.may_apply(round_, self._made.version):",
                "if whole:",
            ),
        ),
    ),
    Mutant(
        "a gradient of older weights counts only if all rounds can meet their limit",
        100,
        (
            Edit(
                CORE + "gradient_counting.py",
                'return "" if fits(deadlines.values(), version) else',
                'return "" if True else',
            ),
        ),
    ),
    Mutant(
        "the base of an update is the oldest version of its gradients",
        300,
        (
            Edit(
                CORE + "rounds.py",
                "self.base = version if self.base is None else min(self.base, version)",
                "self.base = version if self.base is None else max(self.base, version)",
            ),
        ),
    ),
    Mutant(
        "a gradient message belongs to one round",
        100,
        (
            Edit(
                CORE + "gradient_counting.py",
                "if offset not in todo:",
                "if self.of(offset) is None:",
            ),
            Edit(
                CORE + "gradient_counting.py",
                "samples += todo[offset].samples",
                "samples = gradient.samples",
            ),
            Edit(
                CORE + "rounds.py",
                "self.counted[offset] = self.todo.pop(offset)",
                "self.counted.update({offset: b} if (b := self.todo.pop(offset, None)) else {})",
            ),
        ),
    ),
    Mutant(
        "a gradient says if its worker took local steps",
        2000,
        (
            Edit(
                CORE + "gradient_counting.py",
                "if (local_rate := gradient.local_rate or 0.0) != round_.synchrony.local_rate:",
                "if (local_rate := 0.0) and False:",
            ),
        ),
    ),
    Mutant(
        "a round keeps the synchronisation that it began with",
        100,
        (
            Edit(
                CORE + "leader.py",
                "update = self._aggregation.sign(self._draft(round_))",
                "round_.synchrony = (self._changed or self._settings).mode.synchrony()\n"
                "        update = self._aggregation.sign(self._draft(round_))",
            ),
        ),
    ),
    Mutant(
        "a round keeps the learning rate of its rule",
        100,
        (
            Edit(
                CORE + "leader.py",
                "update = self._aggregation.sign(self._draft(round_))",
                "round_.mode = self.mode\n"
                "        update = self._aggregation.sign(self._draft(round_))",
            ),
        ),
    ),
    Mutant(
        "a round that begins while a rule holds uses the rule's mode",
        100,
        (
            Edit(
                CORE + "leader.py",
                "self.rounds.begin(mode, workers, settings, group, worker)",
                "self.rounds.begin(settings.mode, workers, settings, group, worker)",
            ),
        ),
    ),
    Mutant(
        "the learning rate is scaled by K'/K if K' differs from the job's K",
        100,
        (
            Edit(
                CORE + "rounds.py",
                "elif self.mode.learning_rate is None and self.settings.rate_by_group:",
                "elif False:",
            ),
        ),
    ),
    Mutant(
        "progress counts in updates of the job's own K",
        100,
        (
            Edit(
                CORE + "job_completion.py", "self.progress = update.progress", "self.progress += 1"
            ),
        ),
    ),
    Mutant(
        "the learning rate schedule follows the progress of the model",
        100,
        (Edit(CORE + "rounds.py", "schedule.share(before)", "schedule.share(0.0)"),),
    ),
    Mutant(
        "a snapshot stores the progress in updates of the job's own K",
        100,
        (
            Edit(
                CORE + "leader.py",
                "equivalent=None if progress == self._made.version else progress,",
                "equivalent=None,",
            ),
        ),
    ),
    Mutant(
        "K is tuned within its bounds",
        100,
        (
            Edit(
                CORE + "modes.py",
                "wanted = max(ceil(min(noise, most)), least)",
                "wanted = max(ceil(min(noise, 2 * most)), 1)",
            ),
        ),
    ),
    Mutant(
        "while a rule holds, K comes from the rule and not from the tuner",
        100,
        (
            Edit(
                CORE + "modes.py",
                "            return rule.mode\n        if tuner is None or",
                "            own = rule.mode\n        if tuner is None or",
            ),
        ),
    ),
    Mutant(
        "a change of K or of its bounds restarts the tuner",
        100,
        (Edit(CORE + "modes.py", "if _tuned(settings) != _tuned(self._settings):", "if False:"),),
    ),
    Mutant(
        "a new leader continues with the K of the last update",
        600,
        (Edit(CORE + "modes.py", "_tuner(settings, synchrony)", "_tuner(settings)"),),
    ),
    Mutant(
        "a snapshot contains the batches of all rounds in flight as waiting",
        100,
        (
            Edit(
                CORE + "leader.py",
                "unsettled = self._grouper.batches + self.rounds.batches",
                "unsettled = self._grouper.batches + next((r.batches for r in self.rounds), ())",
            ),
        ),
    ),
    # --- bad data -----------------------------------------------------------------------------
    Mutant(
        "batches of dead workers are suspects",
        100,
        (
            Edit(
                CORE + "leader.py",
                "for worker in sorted(departures.lost):",
                "for worker in ():",
            ),
        ),
    ),
    Mutant(
        "a batch that fails too often is quarantined",
        100,
        (Edit(CORE + "poison.py", "return self._failures[offset] > self._limit", "return False"),),
    ),
    Mutant(
        "a suspect is assigned alone, and failures count only then",
        400,
        (
            Edit(
                CORE + "batch_assignment.py",
                "suspect = batch.offset in suspects",
                "suspect = False",
            ),
            Edit(
                CORE + "batch_assignment.py",
                "            if not suspects.isdisjoint(hand.offsets):",
                "            if False:",
            ),
            Edit(
                CORE + "poison.py",
                "self._failures.get(offset, 0) + alone",
                "self._failures.get(offset, 0) + 1",
            ),
        ),
    ),
    Mutant(
        "a quarantined batch is not trained after a takeover",
        2000,
        (Edit(CORE + "replay.py", "(used or self._is_quarantined(batch))", "used"),),
    ),
    Mutant(
        "a batch quarantined after a snapshot is not trained from it",
        1000,
        (
            Edit(
                CORE + "replay.py",
                "b for b in waiting.values() if not self._is_quarantined(b)",
                "b for b in waiting.values()",
            ),
        ),
    ),
    Mutant(
        "a quarantine stays when updates are rolled back",
        200,
        (
            Edit(
                CORE + "history.py",
                "        self.epoch, self.number = lead.epoch, 0\n",
                "        self.epoch, self.number = lead.epoch, 0\n        self._quarantined = {}\n",
            ),
        ),
    ),
    Mutant(
        "a new leader writes dead letters again",
        2000,
        (
            Edit(
                CORE + "leader.py",
                "for record in history.quarantined.values():",
                "for record in ():",
            ),
        ),
    ),
    # --- requeued batches ---------------------------------------------------------------------
    Mutant(
        "only quarantined batches are requeued, and by value",
        4000,
        (
            Edit(
                CORE + "history.py",
                "if self._poison.get(batch.offset) != batch:",
                "if batch.offset not in self._poison:",
            ),
        ),
    ),
    Mutant(
        "a replayed batch is not requeued",
        500,
        (
            Edit(
                CORE + "history.py",
                "return self._finalise(record.batch)",
                "return self._poison.get(record.batch.offset) == record.batch",
            ),
        ),
    ),
    Mutant(
        "a requeued batch is not replayed",
        500,
        (
            Edit(
                CORE + "history.py",
                "        if not self._finalise(batch):\n            return False\n",
                "        if self._poison.get(batch.offset) != batch:\n            return False\n",
            ),
        ),
    ),
    Mutant(
        "a leader learns of requeued batches",
        300,
        (
            Edit(
                CORE + "leader.py",
                "            yield from self._requeue(record.batch, now)",
                "            pass",
            ),
        ),
    ),
    Mutant(
        "a new leader knows the batches requeued since its snapshot",
        1000,
        (
            Edit(
                CORE + "replay.py",
                "waiting |= {o: b for o, b in self.requeued.items() if o <",
                "waiting |= {o: b for o, b in self.requeued.items() if o < 0 *",
            ),
        ),
    ),
    Mutant(
        "a snapshot names the batches that may be requeued",
        1000,
        (Edit(CORE + "snapshot_publishing.py", "poison=self._history.poison,", "poison=(),"),),
    ),
    Mutant(
        "an operator's record does not count as a leader's record",
        1000,
        (
            Edit(
                CORE + "history.py",
                "        self._requeued[batch.offset] = batch\n",
                "        self._requeued[batch.offset] = batch\n        self.number += 1\n",
            ),
        ),
    ),
    Mutant(
        "too many quarantines in a row hold the job",
        300,
        (Edit(CORE + "leader.py", "        if too_many:", "        if False:"),),
    ),
)

GROUP = CORE + "members/"

# Members that hold the weights; `common.simulation.faults.scenario.grouped` makes their worlds.
GROUP_MUTANTS = (
    Mutant(
        "the weights move to other processes only after they are in storage",
        100,
        (
            Edit(
                CORE + "coordinator.py",
                "wanted == known or (there and newest)",
                "True",
            ),
        ),
    ),
    Mutant(
        "a leader stores the weights before it hands them over",
        40,
        (
            Edit(
                CORE + "leader.py",
                "elif self._made not in self._aggregation.stored:",
                "elif False:",
            ),
        ),
    ),
    Mutant(
        "a member's gradients are lost with the member",
        20,
        (
            Edit(
                GROUP + "leading.py",
                "Member(gradient.worker, gradient.life) not in members",
                "False",
            ),
        ),
    ),
    Mutant(
        "batches used since a snapshot are not trained when their claims are replayed",
        40,
        (
            Edit(
                CORE + "replay.py",
                "(used or self._is_quarantined(batch))",
                "self._is_quarantined(batch)",
            ),
        ),
    ),
    Mutant(
        "batches used since a snapshot do not wait again",
        60,
        (
            Edit(
                CORE + "snapshots.py",
                "tuple(batch for batch in snapshot.waiting if batch.offset not in used)",
                "snapshot.waiting",
            ),
        ),
    ),
    Mutant(
        "a member with another version takes no part",
        20,
        (
            Edit(
                GROUP + "state_reports.py",
                "for member, held in found if (held.made, held.origin) == name",
                "for member, held in found",
            ),
            Edit(
                GROUP + "replica.py",
                "if not able or not there.issuperset(mine)",
                "if not there.issuperset(mine)",
            ),
        ),
    ),
    Mutant(
        "a leader that falls back keeps its suspects",
        80,
        (Edit(CORE + "leader.py", "self._suspects.restore(failure_counts)", "pass"),),
    ),
    Mutant(
        "after lost claims, only batches in the snapshot count",
        80,
        (
            Edit(
                CORE + "coordinator.py",
                "if self._limit is None and self._request.after_loss > history.after_loss:",
                "if False:",
            ),
        ),
    ),
    Mutant(
        "a member applies the attempt that the audit names",
        80,
        (
            Edit(
                GROUP + "replica.py",
                "self._prepared == orders.by and",
                "self._prepared.version == orders.made.version and",
            ),
        ),
    ),
    Mutant(
        "a member drops its gradients when its version changes",
        40,
        (
            Edit(
                GROUP + "replica.py",
                "            self._gradients = {}\n        self.made",
                "            pass\n        self.made",
            ),
        ),
    ),
)

# A store that lies; `common.simulation.faults.scenario.lying` makes its worlds.
STORE_MUTANTS = (
    Mutant(
        "a job whose history names a checkpoint does not start below it",
        20,
        (
            Edit(
                CORE + "snapshot_search.py", "missing = self._missing(*choice, now)", 'missing = ""'
            ),
        ),
    ),
)

# Slices with owners; `common.simulation.faults.scenario.sliced` makes their worlds.
BUILDS_MUTANTS = (
    Mutant(
        "a worker with another model gets no orders",
        5,
        (Edit(CORE + "liveness.py", "if own and beat.digest != own", "if False"),),
    ),
)

SLICES_MUTANTS = (
    Mutant(
        "only a member with the optimizer state of a slice owns it",
        80,
        (
            Edit(
                GROUP + "leading.py",
                "first = [member for member in should if member in holders]",
                "first = list(should)",
            ),
            Edit(
                GROUP + "replica.py",
                "able = self.whole and self._holds(self._owned)",
                "able = self.whole",
            ),
            Edit(
                GROUP + "leading.py",
                "self._owned.stranded or self._waits(now)",
                "self._owned.stranded",
            ),
        ),
    ),
    Mutant(
        "a member that stepped a slice has the optimizer state of only that slice",
        20,
        (
            Edit(
                GROUP + "replica.py",
                "self._hold(orders.made, 0, self._owned)",
                "self._hold(orders.made, 0, UNSET)",
            ),
        ),
    ),
    Mutant(
        "a version is lost if no member holds one of its slices",
        20,
        (
            Edit(
                GROUP + "leading.py",
                "found = bool(whole) and not lost",
                "found = bool(whole)",
            ),
        ),
    ),
)
