"""Every metric of the product, in one place: name, kind, unit, labels, meaning, and who tells it.

The classes beside this file make their instruments from these lines and from nothing else; so do
`docs/reference/metrics.md` and the tests that ask whether what a dashboard or an alert names
exists. A job is labelled `job_name`, as `job` is Prometheus's own word for what it scrapes.
"""

from __future__ import annotations

from common.telemetry.metrics.metric import AGES_S, SECONDS, VERSIONS, Metric, counter, gauge

_JOB = ("job_name",)
_STREAM = ("job_name", "stream")

# --- every process ---------------------------------------------------------------------------

BUILD = gauge(
    "doll_build_info",
    "1",
    ("service", "version"),
    "Always 1: which service and version answers.",
    *("worker", "coordinator", "provisioner", "evaluator", "joiner", "admin", "serve"),
)

# --- processes that have many jobs: what is said of each, whatever becomes of it ---------------

JOB_FAULTS = counter(
    "doll_job_faults_total",
    "faults",
    ("job_name", "kind"),
    "That ended this process's part in a job, which it then began anew: an exception (fault), or a"
    " server that was away (unavailable).",
    *("coordinator", "worker", "provisioner", "evaluator"),
)
SLOW_TURNS = counter(
    "doll_slow_turns_total",
    "turns",
    _JOB,
    "In which a job had one of the process's few threads for longer than it should.",
    *("coordinator", "provisioner", "evaluator"),
)
LONGEST_TURN = gauge(
    "doll_longest_turn_seconds",
    "seconds",
    _JOB,
    "The longest of these turns since the process began with the job.",
    *("coordinator", "provisioner", "evaluator"),
)

# --- workers: records to batches, batches to gradients ---------------------------------------

RECORDS_READ = counter(
    "doll_records_read_total", "records", _STREAM, "Decoded and put into a batch.", "worker"
)
RECORDS_SKIPPED = counter(
    "doll_records_skipped_total", "records", _STREAM, "Did not decode.", "worker"
)
RECORDS_EXPIRED = counter(
    "doll_records_expired_total",
    "records",
    _STREAM,
    "Deleted by retention before anybody read them: lost to training.",
    "worker",
)
BATCHES_ANNOUNCED = counter(
    "doll_batches_announced_total", "batches", _JOB, "Claimed in the control topic.", "worker"
)
BATCHES_READ_BACK = counter(
    "doll_batches_read_back_total",
    "batches",
    _JOB,
    "Not in the memory of who computed them, so read from Kafka by their address.",
    "worker",
)
WORKER_READING = gauge(
    "doll_worker_reading",
    "0 or 1",
    _JOB,
    "1: polls its streams; 0: paused, as enough of its batches wait or nobody leads.",
    "worker",
)
STREAM_BEHIND = gauge(
    "doll_stream_behind_seconds",
    "seconds",
    _STREAM,
    "How much older than the median of the worker's other partitions the newest record is that was"
    " read of the partition furthest behind; 0 where nothing waits.",
    "worker",
)
WORKER_STAGE = Metric(
    "doll_worker_stage_seconds",
    "histogram",
    "seconds",
    ("job_name", "stage"),
    "indicator: a claim, until Kafka has it; fetch: a model; gradient: of one order, computing"
    " alone; push: a gradient to the leader.",
    ("worker",),
    SECONDS,
)
GRADIENTS_SENT = counter(
    "doll_gradients_sent_total", "messages", _JOB, "Gradients, one for each order.", "worker"
)
GRADIENTS_FAILED = counter(
    "doll_gradients_failed_total",
    "messages",
    ("job_name", "reason"),
    "Orders that gave none: model_missing, unreadable, expired, raised, not_finite or task.",
    "worker",
)

# --- the coordinator: told by the replica that leads the job, by no other --------------------

LEADING = gauge(
    "doll_leading", "0 or 1", _JOB, "1: this replica leads the job; told by all.", "coordinator"
)
EPOCH = gauge("doll_epoch", "number", _JOB, "Of the leader: each has a higher one.", "coordinator")
VERSION = gauge("doll_model_version", "updates", _JOB, "J, updates of the model.", "coordinator")
UPDATES = counter("doll_updates_total", "updates", _JOB, "Applied.", "coordinator")
UPDATE_BATCHES = counter(
    "doll_update_batches_total", "batches", _JOB, "In updates applied.", "coordinator"
)
UPDATE_RECORDS = counter(
    "doll_update_records_total", "records", _JOB, "In updates applied.", "coordinator"
)
SHORT_UPDATES = counter(
    "doll_short_updates_total",
    "updates",
    ("job_name", "why"),
    "Of fewer than K batches: linger, missing or quarantined.",
    "coordinator",
)
LOSS = gauge(
    "doll_loss",
    "loss per record",
    _JOB,
    "Of the newest update, at the weights before it (prequential).",
    "coordinator",
)
TRAINING_METRIC = gauge(
    "doll_training_metric",
    "mean per record",
    ("job_name", "metric"),
    "The task's metrics of the newest update, likewise: accuracy and the like; auc,"
    " calibration_error, f1, precision and recall are of the records of the last minute.",
    "coordinator",
)
LEARNING_RATE = gauge(
    "doll_learning_rate",
    "1",
    _JOB,
    "Of the newest update, by the job's rate, its schedule and its synchronisation.",
    "coordinator",
)
ROUND_STAGE = Metric(
    "doll_round_seconds",
    "histogram",
    "seconds",
    ("job_name", "stage"),
    "wait: from an update until the next round begins, for K batches; gradients: from its trigger"
    " to its last gradient; apply: the optimizer's step until the new model is published.",
    ("coordinator",),
    SECONDS,
)
STALENESS = Metric(
    "doll_gradient_staleness_versions",
    "histogram",
    "updates",
    ("job_name", "counted"),
    "How many updates older than the model a gradient was when it came; counted: yes or no.",
    ("coordinator",),
    VERSIONS,
)
SYNCHRONISATION = gauge(
    "doll_synchronisation",
    "always 1",
    ("job_name", "mode"),
    "How the newest update was made: synchronous, stale, asynchronous or averaging.",
    "coordinator",
)
SWITCHES = counter(
    "doll_synchronisation_switches_total",
    "updates",
    _JOB,
    "Made in another mode than the one before, by a rule or by a change of the job.",
    "coordinator",
)
GROUP_SIZE = gauge(
    "doll_group_size", "batches", _JOB, "K that the newest update was made with.", "coordinator"
)
MEMBERS = gauge(
    "doll_group_members",
    "workers",
    _JOB,
    "That hold the weights and add gradients up among themselves (`aggregation.mode: group`).",
    "coordinator",
)
LEFT_OUT = gauge(
    "doll_group_left_out",
    "workers",
    _JOB,
    "That live and cannot be members: they and some members do not reach each other.",
    "coordinator",
)
MEMBERSHIPS = counter(
    "doll_group_membership_changes_total",
    "memberships",
    _JOB,
    "Of other members than the one before.",
    "coordinator",
)
ATTEMPTS_BROKEN = counter(
    "doll_group_attempts_broken_total",
    "attempts",
    _JOB,
    "At an update that came to nothing: a member died, hung, or lacked what it was to add.",
    "coordinator",
)
COLLECTIVE = Metric(
    "doll_group_collective_seconds",
    "histogram",
    "seconds",
    _JOB,
    "From when members are told to add up until enough of them have the result.",
    ("coordinator",),
    SECONDS,
)
REPAIR = Metric(
    "doll_group_repair_seconds",
    "histogram",
    "seconds",
    _JOB,
    "From when an attempt is given up until enough members have the result of a later one.",
    ("coordinator",),
    SECONDS,
)
BYTES_COPIED = counter(
    "doll_group_copied_bytes_total",
    "bytes",
    _JOB,
    "Of weights and optimizer state that a worker took over from another, or from storage.",
    "worker",
)
BYTES_MOVED = counter(
    "doll_worker_moved_bytes_total",
    "bytes",
    ("job_name", "direction"),
    "Weights and gradients that a worker has sent or received: through Redis as they are there,"
    " among members by what each collective takes on a ring; storage is not among them.",
    "worker",
)
UPDATE_STALENESS = gauge(
    "doll_update_staleness_versions",
    "updates",
    _JOB,
    "Between the oldest gradient of the newest update and itself.",
    "coordinator",
)
WORKERS_BUSY = gauge(
    "doll_workers_busy_ratio",
    "1",
    _JOB,
    "Share of their time that workers computed, by the last 20 updates of this mode; 1 until there"
    " are so many.",
    "coordinator",
)
WORKER_SPEED = gauge(
    "doll_worker_batches_per_second",
    "batches/s",
    ("job_name", "worker"),
    "While it computes, by the last 1,000 gradients, of the 100 workers with most batches.",
    "coordinator",
)
WORKER_SHARE = gauge(
    "doll_worker_batches_ratio",
    "1",
    ("job_name", "worker"),
    "Share of the batches of these gradients, likewise.",
    "coordinator",
)
RECORD_AGE = Metric(
    "doll_record_age_seconds",
    "histogram",
    "seconds",
    _JOB,
    "From the arrival of a batch's newest record in Kafka until its update is applied.",
    ("coordinator",),
    AGES_S,
)
CLAIMS_ACCEPTED = counter(
    "doll_claims_accepted_total", "batches", _JOB, "Batches that count.", "coordinator"
)
CLAIMS_REFUSED = counter(
    "doll_claims_refused_total",
    "claims",
    _JOB,
    "Twice, late, of a ghost or unreadable: without effect.",
    "coordinator",
)
REPLIES_REFUSED = counter(
    "doll_replies_refused_total",
    "messages",
    ("job_name", "kind"),
    "gradient, failed, farewell: of another round or counted already; malformed: not readable.",
    "coordinator",
)
REDISPATCHED = counter(
    "doll_batches_redispatched_total",
    "batches",
    _JOB,
    "Asked of somebody else: their worker left, died, failed or was late.",
    "coordinator",
)
QUARANTINED = counter(
    "doll_batches_quarantined_total",
    "batches",
    ("job_name", "reason"),
    "Given up for ever: poison or expired.",
    "coordinator",
)
DEAD_LETTERS = counter(
    "doll_dead_letters_total", "records", _JOB, "Written to dead-letter topics.", "coordinator"
)
BATCHES_WAITING = gauge(
    "doll_batches_waiting", "batches", _JOB, "Accepted and in no update yet.", "coordinator"
)
WORKERS_LIVE = gauge("doll_workers_live", "workers", _JOB, "That the leader sees.", "coordinator")
JOB_HELD = gauge(
    "doll_job_held", "0 or 1", _JOB, "1: waits for a person; the reason is logged.", "coordinator"
)
JOB_PAUSED = gauge(
    "doll_job_paused", "0 or 1", _JOB, "1: a person lets it rest: no updates.", "coordinator"
)
CHECKPOINT_AGE = gauge(
    "doll_checkpoint_age_seconds",
    "seconds",
    _JOB,
    "Since the newest checkpoint was made.",
    "coordinator",
)
CHECKPOINT_FAILURES = counter(
    "doll_checkpoint_failures_total",
    "attempts",
    _JOB,
    "To write one that failed; each is repeated, unless a newer one comes meanwhile.",
    "coordinator",
)
TAKEOVERS = counter(
    "doll_takeovers_total", "leaderships", _JOB, "That this replica began.", "coordinator"
)
STREAM_RECORDS = gauge(
    "doll_stream_records",
    "records",
    _STREAM,
    "Arrived in Kafka since the job's first position; its rate is that of arrivals.",
    "coordinator",
)
STREAM_LAG = gauge(
    "doll_stream_lag_records",
    "records",
    _STREAM,
    "Arrived and claimed by nobody yet; what waits is in doll_batches_waiting.",
    "coordinator",
)
ARRIVAL_RATE = gauge(
    "doll_arrival_rate",
    "records/s",
    _JOB,
    "Of all streams, over the last minute.",
    "coordinator",
)
STABILITY = gauge(
    "doll_stability_ratio",
    "1",
    ("job_name", "bound"),
    "Work that arrives over work that can be done (Proposition 1). sufficient: below 1 it is stable"
    " however unevenly batches lie; necessary: from 1 on nothing helps but more or faster workers.",
    "coordinator",
)

# --- the provisioner: told by the replica in charge, by no other -----------------------------

PROVISIONING = gauge(
    "doll_provisioning", "0 or 1", _JOB, "1: this replica rents; told by all.", "provisioner"
)
MACHINES_RUNNING = gauge(
    "doll_machines_running", "machines", ("job_name", "pool"), "Paid for now.", "provisioner"
)
MACHINES_WANTED = gauge(
    "doll_machines_wanted",
    "machines",
    ("job_name", "kind"),
    "By the plan that stands: spot or on_demand.",
    "provisioner",
)
MACHINES_ENDED = counter(
    "doll_machines_ended_total",
    "machines",
    ("job_name", "cause"),
    "preempted, released, failed, refused or lost.",
    "provisioner",
)
PLANS = counter(
    "doll_plans_total", "plans", ("job_name", "feasible"), "Made: yes or no.", "provisioner"
)
PRICE = gauge(
    "doll_price_usd_per_hour",
    "USD/h",
    ("job_name", "pool"),
    "Of one machine, now.",
    "provisioner",
)
COST_PER_HOUR = gauge(
    "doll_cost_usd_per_hour", "USD/h", _JOB, "Of all machines that run.", "provisioner"
)
SPENT = gauge("doll_spent_usd", "USD", _JOB, "Since the job began.", "provisioner")
ON_DEMAND_ONLY = gauge(
    "doll_on_demand_only_usd",
    "USD",
    _JOB,
    "What the updates made so far would have cost on demand alone.",
    "provisioner",
)
COST_PER_UPDATE = gauge(
    "doll_cost_usd_per_update", "USD", _JOB, "Spent over updates made.", "provisioner"
)
COST_PER_MILLION = gauge(
    "doll_cost_usd_per_million_records",
    "USD",
    _JOB,
    "Spent over records in updates.",
    "provisioner",
)
ESTIMATE = gauge(
    "doll_estimate",
    "as its name says",
    ("job_name", "quantity", "bound"),
    "What is believed: arrivals_per_s (lambda_A of one worker), gradient_s (mu_C), update_mb (of"
    " transfer), availability by pool (alpha) and the like; bound: value, low or high (it lies"
    " between them with 90 %).",
    "provisioner",
)
CAPACITY = gauge(
    "doll_fleet_capacity_ratio",
    "1",
    _JOB,
    "What the machines can do over what arrives; below 1 they cannot keep up (Proposition 1).",
    "provisioner",
)
DEADLINE_LEFT = gauge(
    "doll_deadline_left_seconds", "seconds", _JOB, "Until the job's deadline.", "provisioner"
)
PLANNED_LEFT = gauge(
    "doll_planned_time_left_seconds",
    "seconds",
    _JOB,
    "That the job takes yet, by the plan that stands.",
    "provisioner",
)

# --- the evaluator ---------------------------------------------------------------------------

TEST_METRIC = gauge(
    "doll_test_metric",
    "mean per record",
    ("job_name", "metric"),
    "On the test set, of the version evaluated last: loss, accuracy and the like.",
    "evaluator",
)
EVALUATED_VERSION = gauge(
    "doll_evaluated_version", "updates", _JOB, "J of the version evaluated last.", "evaluator"
)
EVALUATIONS = counter(
    "doll_evaluations_total",
    "versions",
    ("job_name", "outcome"),
    "done, or skipped: a newer one came meanwhile, or a leader took it back.",
    "evaluator",
)
EVALUATION_SECONDS = Metric(
    "doll_evaluation_seconds",
    "histogram",
    "seconds",
    _JOB,
    "Of one version, on the test set.",
    ("evaluator",),
    SECONDS,
)
PREQUENTIAL = gauge(
    "doll_prequential_metric",
    "mean per record",
    ("job_name", "stream", "metric"),
    "Of a stream's records just before the model learned from them.",
    "evaluator",
)
DRIFTS = counter(
    "doll_drifts_total", "drifts", _STREAM, "Detected by ADWIN in a stream's errors.", "evaluator"
)

TRACKING_SENT = counter(
    "doll_tracking_sent_total",
    "points",
    _JOB,
    "Of curves, that an MLflow server took.",
    "evaluator",
)
TRACKING_FAILED = counter(
    "doll_tracking_failed_total",
    "attempts",
    _JOB,
    "To tell an MLflow server; what they were of is told later.",
    "evaluator",
)
TRACKING_WAITING = gauge(
    "doll_tracking_waiting",
    "records",
    _JOB,
    "Of the updates topic, of which an MLflow server was not told yet.",
    "evaluator",
)

# --- joiners ---------------------------------------------------------------------------------

JOIN_PARTITIONS = gauge(
    "doll_join_partitions", "partitions", ("to",), "That this process joins.", "joiner"
)
JOIN_SAMPLES = counter(
    "doll_join_samples_total",
    "samples",
    ("to", "outcome"),
    "Written: joined, or alone as no right record came in time.",
    "joiner",
)
JOIN_RECORDS = counter(
    "doll_join_records_total",
    "records",
    ("to", "outcome"),
    "Right records that joined nothing: late (older than the grace allows), double (another one"
    " came before it) or unmatched; late_left: left ones whose right ones may have been forgotten;"
    " dead_letter: could not be read.",
    "joiner",
)
JOIN_WAITING = gauge(
    "doll_join_waiting_records", "records", ("to", "side"), "In open windows.", "joiner"
)

# --- model servers ---------------------------------------------------------------------------

SERVED_VERSION = gauge(
    "doll_served_version", "updates", _JOB, "J of the version that answers; -1: none yet.", "serve"
)
SERVED_BEHIND = gauge(
    "doll_served_behind_seconds",
    "seconds",
    _JOB,
    "How long there may have been a newer one: since it was last seen to be what is wanted.",
    "serve",
)
PREDICTIONS = counter(
    "doll_predictions_total",
    "requests",
    ("job_name", "status"),
    "Requests for predictions, by the status of the answer.",
    "serve",
)
PREDICTION_SECONDS = Metric(
    "doll_prediction_seconds",
    "histogram",
    "seconds",
    _JOB,
    "From a request's arrival to its answer.",
    ("serve",),
    SECONDS,
)
PREDICTION_BATCH = Metric(
    "doll_prediction_batch_records",
    "histogram",
    "records",
    _JOB,
    "Answered in one pass of the network.",
    ("serve",),
    (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0),
)
SHADOW_DIFFERENCE = gauge(
    "doll_shadow_difference",
    "mean per output",
    _JOB,
    "Absolute difference between the answers of the last batch and the shadow's.",
    "serve",
)
PREDICTIONS_NOT_WRITTEN = counter(
    "doll_predictions_not_written_total",
    "records",
    _JOB,
    "Answered, and not written to the topic of predictions: Kafka was unavailable.",
    "serve",
)

# --- the admin service -----------------------------------------------------------------------

API_REQUESTS = counter(
    "doll_api_requests_total",
    "requests",
    ("route", "method", "status"),
    "Answered; route `none`: there is no such.",
    "admin",
)
API_SECONDS = Metric(
    "doll_api_request_seconds",
    "histogram",
    "seconds",
    ("route", "method"),
    "Until the answer began; streams of events apart.",
    ("admin",),
    SECONDS[:-1],
)
API_STREAMS = gauge("doll_api_streams_open", "streams", (), "Of events, open now.", "admin")
JOB_STATE = gauge(
    "doll_job_state",
    "always 1",
    ("job_name", "state"),
    "The job's state (job-states.md says what each means); a job that is not stopped has one.",
    "admin",
)
JOB_LAG = gauge(
    "doll_job_lag_records",
    "records",
    _JOB,
    "In the job's streams and in no update yet, whether it is led or not.",
    "admin",
)
JOB_SKIPPED = gauge(
    "doll_job_skipped_records", "records", _JOB, "Did not decode, since the job began.", "admin"
)
JOB_QUARANTINED = gauge(
    "doll_job_quarantined_batches",
    "batches",
    _JOB,
    "Given up since the job began, and not taken back by an operator.",
    "admin",
)
JOB_EXPIRED = gauge(
    "doll_job_expired_records",
    "records",
    _JOB,
    "Deleted from Kafka before they were trained, read or not, since the job began.",
    "admin",
)
JOB_LOST = gauge(
    "doll_job_lost_records",
    "records",
    _JOB,
    "Trained, and lost by Kafka afterwards, since the job began.",
    "admin",
)

CATALOGUE: tuple[Metric, ...] = tuple(
    value for value in dict(globals()).values() if isinstance(value, Metric)
)
