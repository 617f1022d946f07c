"""The dashboard of learning: what the model is worth, and whether its data change."""

from __future__ import annotations

from deploy.grafana.panel import Annotation, ColourThreshold, Dashboard, Panel, Query
from deploy.grafana.queries import lately, newest, per_s, quantile

_LOSS = ('metric="loss"',)
_OTHERS = ('metric!="loss"',)

_NOW = (
    Panel(
        "Loss",
        "Of the newest update, on records that the model had not seen. Normal: falls, then stays."
        " Rises for long: the data changed, or the learning rate is too high.",
        "none",
        (Query(newest("doll_loss"), "loss"),),
        "stat",
    ),
    Panel(
        "On the test set",
        "What the evaluator measured last. Without a line: the job names no test set"
        " (evaluation.stream), or no evaluator runs.",
        "none",
        (Query(newest("doll_test_metric", "metric"), "{{metric}}"),),
        "stat",
    ),
    Panel(
        "Version",
        "J, updates of the model. Normal: grows as long as records arrive.",
        "none",
        (Query(newest("doll_model_version"), "version"),),
        "stat",
    ),
    Panel(
        "Evaluated",
        "How many updates the version evaluated last is behind. Normal: up to twice"
        " evaluation.every_updates. More: alert DollEvaluatorBehind.",
        "suffix: updates behind",
        (Query(f"{newest('doll_model_version')} - {newest('doll_evaluated_version')}", "behind"),),
        "stat",
    ),
    Panel(
        "Age of the checkpoint",
        "Since the newest one in object storage was made. Normal: below checkpoint.every_s. Older:"
        " nothing new to keep, or it cannot be written (alert DollCheckpointFails).",
        "s",
        (Query(newest("doll_checkpoint_age_seconds"), "age"),),
        "stat",
        (
            ColourThreshold(None, "green"),
            ColourThreshold(900, "orange"),
            ColourThreshold(1800, "red"),
        ),
    ),
    Panel(
        "Drifts in an hour",
        "Streams whose errors changed for the worse or the better, as ADWIN sees it. Normal: 0."
        " Else look at the metrics by stream below (alert DollDrift).",
        "none",
        (Query(lately("doll_drifts_total", window="1h"), "drifts"),),
        "stat",
        (ColourThreshold(None, "green"), ColourThreshold(1, "orange")),
    ),
)

_COURSE = (
    Panel(
        "Loss: training and test",
        "Training: of each update before it was made. Normal: both fall together. Test far above"
        " training: what arrives is unlike the test set, or the same records come again and again.",
        "none",
        (
            Query(newest("doll_loss"), "training"),
            Query(newest("doll_test_metric", where=_LOSS), "test"),
        ),
    ),
    Panel(
        "Metrics in training",
        "The task's own, of the newest update, before it was made. They jump from update to update;"
        " the trend counts.",
        "none",
        (Query(newest("doll_training_metric", "metric"), "{{metric}}"),),
    ),
    Panel(
        "Metrics on the test set",
        "Of each version that was evaluated. Normal: rises, then stays. Falls while training does"
        " not: the streams have moved away from the test set.",
        "none",
        (Query(newest("doll_test_metric", "metric", where=_OTHERS), "{{metric}}"),),
    ),
    Panel(
        "Metrics by stream, before learning (prequential)",
        "Of records of each stream just before the model learned from them. Normal: alike for all."
        " One stream falls: its data changed; marks are drifts.",
        "none",
        (
            Query(
                newest("doll_prequential_metric", "stream", "metric", where=_OTHERS),
                "{{stream}} {{metric}}",
            ),
        ),
    ),
    Panel(
        "Versions",
        "The newest, and the one evaluated last. Normal: both grow side by side. A step back: a"
        " leader was lost, and the next one began at its last snapshot.",
        "suffix: updates",
        (
            Query(newest("doll_model_version"), "newest"),
            Query(newest("doll_evaluated_version"), "evaluated"),
        ),
    ),
    Panel(
        "Updates per second",
        "How fast the model learns. Normal: steady while records arrive.",
        "suffix: updates/s",
        (Query(per_s("doll_updates_total"), "updates"),),
    ),
    Panel(
        "An evaluation",
        "How long it takes. Normal: less than evaluation.every_updates updates take; else versions"
        " are skipped.",
        "s",
        (
            Query(quantile(0.5, "doll_evaluation_seconds"), "p50"),
            Query(quantile(0.95, "doll_evaluation_seconds"), "p95"),
        ),
    ),
    Panel(
        "Evaluations in 5 minutes",
        "Normal: all done. skipped: a newer one came meanwhile, or a leader took the version back;"
        " where most are, ask for fewer (evaluation.every_updates) or for fewer test records.",
        "none",
        (Query(lately("doll_evaluations_total", "outcome"), "{{outcome}}"),),
    ),
    Panel(
        "Checkpoints that failed in 5 minutes",
        "Normal: none. Training goes on without, but a leader that starts without Redis begins"
        " farther back (alert DollCheckpointFails).",
        "none",
        (Query(lately("doll_checkpoint_failures_total"), "attempts"),),
    ),
)

LEARNING = Dashboard(
    "learning",
    "DOLL: learning",
    "What the model is worth: loss and metrics in training, on a test set and by stream.",
    (*_NOW, *_COURSE),
    (
        Annotation(
            "Drifts",
            f"{lately('doll_drifts_total', 'stream', window='1m')} > 0",
            "{{stream}} drifts",
            "orange",
        ),
    ),
)
