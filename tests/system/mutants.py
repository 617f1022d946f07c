"""Rules of the protocol, each removed by an edit of the source, which the simulation must detect.

The package is copied, one rule is edited out of the copy, and the simulation runs there. It must
fail within `seeds`, which is several times the measured number. Two kinds of rules have no mutant:
those whose loss costs work, not truth, and those that need more seeds than a test has time for.
docs/explain/simulation.md names both.
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
        "added partitions are opened",
        100,
        (Edit(CORE + "leader.py", "if self.ledger.generation(partition) is None:", "if False:"),),
    ),
    Mutant(
        "a partition is opened once",
        100,
        (Edit(CORE + "ledger.py", "if opened.after != self.generation(place):", "if False:"),),
    ),
    # --- forged triggers ------------------------------------------------------------------------
    Mutant(
        "workers read the trigger stream that the leader status names",
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
        "orders of one trigger stream do not count in another",
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
        "snapshots name the ids of their topics",
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
        "a leader records the leader epochs that it read in the control topic",
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
        "a leader records the leader epochs that it read in the updates topic",
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
        "a snapshot with lost records in a topic is no base",
        100,
        (Edit(CORE + "snapshot_search.py", "if not why[each.rank]]", "]"),),
    ),
    Mutant(
        "a candidate continues in the topics that it read",
        100,
        (
            Edit(
                CORE + "snapshot_search.py", "_in_topics_of(each, found) for each", "each for each"
            ),
        ),
    ),
    Mutant(
        "an epoch is a number that is never used again",
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
        "a quarantine identifies a batch by value",
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
        "a worker gives up lost claims after a timeout",
        200,
        (Edit(CORE + "worker_reading.py", "UNDECIDED_S = 30.0", "UNDECIDED_S = 1e9"),),
    ),
    Mutant(
        "an older leader status that is repeated is believed",
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
        "a worker starts at the log position in the leader status",
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
        "lost batches expire and are not read back from another log",
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
        "a request to resume after a loss opens the streams that lost records",
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
        "an open batch above the new b closes",
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
        "the bound and the K of a worker follow those of the job",
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
        "a claim does not start after the end of the last accepted one",
        400,
        (Edit(CORE + "ledger.py", "if claimed != span.start:", "if claimed > span.start:"),),
    ),
    Mutant(
        "a claim does not start before the end of the last accepted one",
        100,
        (Edit(CORE + "ledger.py", "if claimed != span.start:", "if claimed < span.start:"),),
    ),
    Mutant(
        "a claim counts with all of its spans or not at all",
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
        "records that retention deleted are claimed as expired",
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
        "a worker detects that it lost its place",
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
        "a worker announces no more batches than its bound",
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
        "batches that may have been refused do not fill the bound",
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
        "a worker forgets settled batches",
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
                # Otherwise the numbers would void most of them.
                "return True",
            ),
        ),
    ),
    Mutant(
        "versions and the record numbers of a leader increase by one",
        100,
        (
            Edit(CORE + "history.py", "or update.version != self.head.version + 1", ""),
            Edit(CORE + "history.py", " and record.number in (0, self.number + 1)", ""),
        ),
    ),
    Mutant(
        "a Lead takes back the updates above its base",
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
        "a leader stops when another one leads",
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
        "a snapshot waits until its audit was read back",
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
        "a snapshot that a later Lead took back is not used",
        2000,
        (Edit(CORE + "snapshots.py", "if not history.base_lost or", "if True or"),),
    ),
    Mutant(
        "a snapshot counts the batches of the round in flight as waiting",
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
        "a round waits while too many audit records are unread",
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
        "a gradient must match the epoch and the version of its round",
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
        "a gradient has all the samples of its batches",
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
        "a missing model is published again",
        600,
        (
            Edit(CORE + "leader.py", 'if failed.reason == "model_missing":', "if False:"),
            Edit(CORE + "leader.py", "if any(r.asked_again and", "if any(False and"),
        ),
    ),
    Mutant(
        "overdue orders are assigned again",
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
        "changed weights are applied only to their base model",
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
        "a round starts only if all rounds can still be applied in time",
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
        "a round is applied only if all others can still be applied in time",
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
        "a gradient of older weights counts only if all rounds can still be applied in time",
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
        "a gradient reports the rate of its local steps",
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
        "a round keeps the synchrony that it started with",
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
        "a round keeps the learning rate of the rule that it started with",
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
        "a round that starts while a rule holds uses its mode",
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
        "the learning rate of another K is scaled by K'/K",
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
        "an update counts in units of the job's own K",
        100,
        (
            Edit(
                CORE + "job_completion.py", "self.progress = update.progress", "self.progress += 1"
            ),
        ),
    ),
    Mutant(
        "the learning rate follows the progress of the model",
        100,
        (Edit(CORE + "rounds.py", "schedule.share(before)", "schedule.share(0.0)"),),
    ),
    Mutant(
        "a snapshot records the progress of the model in units of the job's own K",
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
        "K is set by the rule, not by the tuner, while a rule holds",
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
        "a snapshot counts the batches of all rounds in flight as waiting",
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
        "batches of a dead worker become suspects",
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
        "poison is quarantined after enough failures",
        100,
        (Edit(CORE + "poison.py", "return self._failures[offset] > self._limit", "return False"),),
    ),
    Mutant(
        "a suspect travels alone, and only then counts a failure",
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
        "quarantined batches are not trained after a takeover",
        2000,
        (Edit(CORE + "replay.py", "(used or self._is_quarantined(batch))", "used"),),
    ),
    Mutant(
        "batches quarantined after a snapshot are not trained",
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
        "a quarantine remains when updates are taken back",
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
        "only a quarantined batch is requeued, by value",
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
        "a leader does not wait for records of an operator",
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
        "too much poison in a row holds the job",
        300,
        (Edit(CORE + "leader.py", "        if too_many:", "        if False:"),),
    ),
)

GROUP = CORE + "members/"

# Members that hold the weights; `common.simulation.faults.scenario.grouped` makes their worlds.
GROUP_MUTANTS = (
    Mutant(
        "the holder of the weights changes only once they are in storage",
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
        "the previous holder stores the weights before a hand-over",
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
        "gradients of a member are lost with the member",
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
        "a batch used since the snapshot is not trained when its claim is replayed",
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
        "a batch used since the snapshot no longer waits",
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
        "a member with another version does not take part",
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
        "a leader that falls back suspects the batches that killed all members",
        80,
        (Edit(CORE + "leader.py", "self._suspects.restore(failure_counts)", "pass"),),
    ),
    Mutant(
        "updates above a snapshot are not believed after claims were lost",
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
        "a member applies the result of the attempt that the audit names",
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
        "gradients are dropped with the version that they were computed at",
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
        "a worker of another model gets no order",
        5,
        (Edit(CORE + "liveness.py", "if own and beat.digest != own", "if False"),),
    ),
)

SLICES_MUTANTS = (
    Mutant(
        "only a holder of the optimizer state of a slice owns it",
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
        "a member that stepped a slice holds only the optimizer state of that slice",
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
        "a slice without a holder means a lost version",
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
