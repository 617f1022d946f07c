"""The dashboard of learning: the quality of the model, and changes of its data."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Lines, Query, Stat, annotation
from deploy.grafana.queries import lately, newest, per_s, quantile

_LOSS = ('metric="loss"',)
_OTHERS = ('metric!="loss"',)

LEARNING = Dashboard(
    "learning",
    "What the model is worth: loss and metrics in training, on a test set and by stream.",
    # Now.
    Stat(
        "Loss",
        "Of the newest update, on records that the model had not seen. Normal: falls, then stays."
        " Rises for long: the data changed, or the learning rate is too high.",
        Query(newest("doll_loss"), "loss"),
    ),
    Stat(
        "On the test set",
        "What the evaluator measured last. Without a line: the job names no test set"
        " (evaluation.stream), or no evaluator runs.",
        Query(newest("doll_test_metric", "metric"), "{{metric}}"),
    ),
    Stat(
        "Version",
        "J, updates of the model. Normal: grows as long as records arrive.",
        Query(newest("doll_model_version"), "version"),
    ),
    Stat(
        "Evaluated",
        "How many updates the version evaluated last is behind. Normal: up to twice"
        " evaluation.every_updates. More: alert DollEvaluatorBehind.",
        Query(f"{newest('doll_model_version')} - {newest('doll_evaluated_version')}", "behind"),
        unit="suffix: updates behind",
    ),
    Stat(
        "Age of the checkpoint",
        "Since the newest one in object storage was made. Normal: below checkpoint.every_s. Older:"
        " nothing new to keep, or it cannot be written (alert DollCheckpointFails).",
        Query(newest("doll_checkpoint_age_seconds"), "age"),
        unit="s",
        steps={None: "green", 900: "orange", 1800: "red"},
    ),
    Stat(
        "Drifts in an hour",
        "Streams whose errors changed for the worse or the better, as ADWIN sees it. Normal: 0."
        " Else look at the metrics by stream below (alert DollDrift).",
        Query(lately("doll_drifts_total", window="1h"), "drifts"),
        steps={None: "green", 1: "orange"},
    ),
    # Over time.
    Lines(
        "Loss: training and test",
        "Training: of each update before it was made. Normal: both fall together. Test far above"
        " training: what arrives is unlike the test set, or the same records come again and again.",
        Query(newest("doll_loss"), "training"),
        Query(newest("doll_test_metric", where=_LOSS), "test"),
    ),
    Lines(
        "Metrics in training",
        "The task's own, of the newest update, before it was made. They jump from update to update;"
        " the trend counts.",
        Query(newest("doll_training_metric", "metric"), "{{metric}}"),
    ),
    Lines(
        "Metrics on the test set",
        "Of each version that was evaluated. Normal: rises, then stays. Falls while training does"
        " not: the streams have moved away from the test set.",
        Query(newest("doll_test_metric", "metric", where=_OTHERS), "{{metric}}"),
    ),
    Lines(
        "Metrics by stream, before learning (prequential)",
        "Of records of each stream just before the model learned from them. Normal: alike for all."
        " One stream falls: its data changed; marks are drifts.",
        Query(
            newest("doll_prequential_metric", "stream", "metric", where=_OTHERS),
            "{{stream}} {{metric}}",
        ),
    ),
    Lines(
        "Versions",
        "The newest, and the one evaluated last. Normal: both grow side by side. A step back: a"
        " leader was lost, and the next one began at its last snapshot.",
        Query(newest("doll_model_version"), "newest"),
        Query(newest("doll_evaluated_version"), "evaluated"),
        unit="suffix: updates",
    ),
    Lines(
        "Updates per second",
        "How fast the model learns. Normal: steady while records arrive.",
        Query(per_s("doll_updates_total"), "updates"),
        unit="suffix: updates/s",
    ),
    Lines(
        "An evaluation",
        "How long it takes. Normal: less than evaluation.every_updates updates take; else versions"
        " are skipped.",
        Query(quantile(0.5, "doll_evaluation_seconds"), "p50"),
        Query(quantile(0.95, "doll_evaluation_seconds"), "p95"),
        unit="s",
    ),
    Lines(
        "Evaluations in 5 minutes",
        "Normal: all done. skipped: a newer one came meanwhile, or a leader took the version back;"
        " where most are, ask for fewer (evaluation.every_updates) or for fewer test records.",
        Query(lately("doll_evaluations_total", "outcome"), "{{outcome}}"),
    ),
    Lines(
        "Checkpoints that failed in 5 minutes",
        "Normal: none. Training goes on without, but a leader that starts without Redis begins"
        " farther back (alert DollCheckpointFails).",
        Query(lately("doll_checkpoint_failures_total"), "attempts"),
    ),
    annotations=(
        annotation(
            "Drifts",
            f"{lately('doll_drifts_total', 'stream', window='1m')} > 0",
            "{{stream}} drifts",
            "orange",
        ),
    ),
)
