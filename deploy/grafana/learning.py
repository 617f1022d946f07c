"""The dashboard of learning: the quality of the model, and changes of its data."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Lines, Query, Stat, annotation
from deploy.grafana.queries import lately, newest, per_s, quantile

_LOSS = ('metric="loss"',)
_OTHERS = ('metric!="loss"',)

LEARNING = Dashboard(
    "learning",
    "Quality of the model: loss and metrics in training, on a test set and by stream.",
    # Now.
    Stat(
        "Loss",
        "Mean loss per record of the newest update, on records that the model had not seen before."
        " Normal: it falls, then stays constant. If it rises for long, the data changed or the"
        " learning rate is too high.",
        Query(newest("doll_loss"), "loss"),
    ),
    Stat(
        "On the test set",
        "Loss and metrics that the evaluator measured last. Empty if the job has no test set"
        " (evaluation.stream) or no evaluator runs.",
        Query(newest("doll_test_metric", "metric"), "{{metric}}"),
    ),
    Stat(
        "Version",
        "Number of updates (J) that the model contains. Normal: it grows as long as records"
        " arrive.",
        Query(newest("doll_model_version"), "version"),
    ),
    Stat(
        "Evaluation delay",
        "How many updates the version evaluated last is behind the newest. Normal: at most twice"
        " evaluation.every_updates. More: alert DollEvaluatorBehind.",
        Query(f"{newest('doll_model_version')} - {newest('doll_evaluated_version')}", "behind"),
        unit="suffix: updates behind",
    ),
    Stat(
        "Age of the checkpoint",
        "Age of the newest checkpoint in object storage. Normal: below checkpoint.every_s. It is"
        " older if there were no new updates or if checkpoints cannot be written (alert"
        " DollCheckpointFails).",
        Query(newest("doll_checkpoint_age_seconds"), "age"),
        unit="s",
        steps={None: "green", 900: "orange", 1800: "red"},
    ),
    Stat(
        "Drifts (1 h)",
        "Number of changes, in either direction, of the model's errors on a stream that the ADWIN"
        " algorithm detected in the last hour. Normal: 0. Otherwise see the metrics by stream"
        " below (alert DollDrift).",
        Query(lately("doll_drifts_total", window="1h"), "drifts"),
        steps={None: "green", 1: "orange"},
    ),
    # Over time.
    Lines(
        "Loss: training and test",
        "Training loss of each update (computed before the update), and loss on the test set."
        " Normal: both fall together. If the test loss is far higher, arriving records differ from"
        " the test set, or the same records arrive repeatedly.",
        Query(newest("doll_loss"), "training"),
        Query(newest("doll_test_metric", where=_LOSS), "test"),
    ),
    Lines(
        "Metrics in training",
        "The task's metrics for the newest update, computed before the update. They vary from"
        " update to update; watch the trend.",
        Query(newest("doll_training_metric", "metric"), "{{metric}}"),
    ),
    Lines(
        "Metrics on the test set",
        "The task's metrics on the test set, for each evaluated version. Normal: they improve,"
        " then stay constant. If they get worse while training metrics do not, the streams no"
        " longer resemble the test set.",
        Query(newest("doll_test_metric", "metric", where=_OTHERS), "{{metric}}"),
    ),
    Lines(
        "Metrics by stream, before learning (prequential)",
        "The task's metrics on the records of each stream, computed just before the model was"
        " trained on them. Normal: similar for all streams. If one stream gets worse, its data"
        " changed. Vertical marks show detected drifts.",
        Query(
            newest("doll_prequential_metric", "stream", "metric", where=_OTHERS),
            "{{stream}} {{metric}}",
        ),
    ),
    Lines(
        "Versions",
        "The newest version, and the version evaluated last. Normal: both grow at the same rate."
        " It drops if a leader was lost and its successor continued from an older snapshot.",
        Query(newest("doll_model_version"), "newest"),
        Query(newest("doll_evaluated_version"), "evaluated"),
        unit="suffix: updates",
    ),
    Lines(
        "Updates per second",
        "Updates of the model per second. Normal: constant while records arrive at a constant"
        " rate.",
        Query(per_s("doll_updates_total"), "updates"),
        unit="suffix: updates/s",
    ),
    Lines(
        "Evaluation time",
        "Time to evaluate one version. Normal: less than the time of evaluation.every_updates"
        " updates; otherwise versions are skipped.",
        Query(quantile(0.5, "doll_evaluation_seconds"), "p50"),
        Query(quantile(0.95, "doll_evaluation_seconds"), "p95"),
        unit="s",
    ),
    Lines(
        "Evaluations (5 min)",
        "Versions offered for evaluation in the last 5 minutes, by outcome. Normal: all done. A"
        " version is skipped if a newer one was offered or a new leader rolled it back. If most"
        " are skipped, evaluate less often (evaluation.every_updates) or use fewer test records.",
        Query(lately("doll_evaluations_total", "outcome"), "{{outcome}}"),
    ),
    Lines(
        "Failed checkpoints (5 min)",
        "Failed attempts to write a checkpoint in the last 5 minutes. Normal: none. Training"
        " continues, but a leader that starts with an empty Redis continues from an older version"
        " (alert DollCheckpointFails).",
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
