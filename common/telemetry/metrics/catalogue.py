"""Every metric of the product, in one place: name, kind, unit, labels, meaning, and who tells it.

The classes beside this file make their instruments from these lines and from nothing else; so do
`docs/reference/metrics.md` and the tests that ask whether what a dashboard or an alert names
exists. A job is labelled `job_name`, as `job` is Prometheus's own word for what it scrapes.
"""

from __future__ import annotations

from common.telemetry.metrics.metric import AGES_S, SECONDS, VERSIONS, Lines, Metric

_worker = Lines("worker")
_coordinator = Lines("coordinator")
_provisioner = Lines("provisioner")
_evaluator = Lines("evaluator")
_supervised = Lines("coordinator", "provisioner", "evaluator")
_with_jobs = Lines("coordinator", "worker", "provisioner", "evaluator")
_server = Lines("serve")
_admin = Lines("admin")
_api = Lines("admin", each=())

# --- every process ---------------------------------------------------------------------------

BUILD = Metric(
    "doll_build_info",
    "gauge",
    "1",
    ("service", "version"),
    "Always 1: which service and version answers.",
    ("worker", "coordinator", "provisioner", "evaluator", "admin", "serve"),
)

OUTAGE = Metric(
    "doll_outage_seconds",
    "gauge",
    "seconds",
    ("server",),
    "For how long this process has not been able to use a server: kafka, redis, storage,"
    " schema_registry, tracking, fleet, prices or notices; 0: it can.",
    BUILD.told_by,
)

# --- processes that have many jobs: what is said of each, whatever becomes of it ---------------

JOB_FAULTS = _with_jobs.counter(
    "doll_job_faults_total",
    "faults",
    "That ended this process's part in a job, which it then began anew: an exception (fault), or a"
    " server that was away (unavailable).",
    "kind",
)
SLOW_TURNS = _supervised.counter(
    "doll_slow_turns_total",
    "turns",
    "In which a job had one of the process's few threads for longer than it should.",
)
LONGEST_TURN = _supervised.gauge(
    "doll_longest_turn_seconds",
    "seconds",
    "The longest of these turns since the process began with the job.",
)

# --- workers: records to batches, batches to gradients ---------------------------------------

RECORDS_READ = _worker.counter(
    "doll_records_read_total", "records", "Decoded and put into a batch.", "stream"
)
RECORDS_SKIPPED = _worker.counter(
    "doll_records_skipped_total", "records", "Did not decode.", "stream"
)
RECORDS_EXPIRED = _worker.counter(
    "doll_records_expired_total",
    "records",
    "Deleted by retention before anybody read them: lost to training.",
    "stream",
)
BATCHES_ANNOUNCED = _worker.counter(
    "doll_batches_announced_total", "batches", "Claimed in the control topic."
)
BATCHES_READ_BACK = _worker.counter(
    "doll_batches_read_back_total",
    "batches",
    "Not in the memory of who computed them, so read from Kafka by their address.",
)
WORKER_READING = _worker.gauge(
    "doll_worker_reading",
    "0 or 1",
    "1: polls its streams; 0: paused, as enough of its batches wait or nobody leads.",
)
STREAM_BEHIND = _worker.gauge(
    "doll_stream_behind_seconds",
    "seconds",
    "How much older than the median of the worker's other partitions the newest record is that was"
    " read of the partition furthest behind; 0 where nothing waits.",
    "stream",
)
WORKER_STAGE = _worker.histogram(
    "doll_worker_stage_seconds",
    "seconds",
    "indicator: a claim, until Kafka has it; fetch: a model; gradient: of one order, computing"
    " alone; push: a gradient to the leader.",
    "stage",
)
GRADIENTS_SENT = _worker.counter(
    "doll_gradients_sent_total", "messages", "Gradients, one for each order."
)
GRADIENTS_FAILED = _worker.counter(
    "doll_gradients_failed_total",
    "messages",
    "Orders that gave none: model_missing, unreadable, expired, raised, not_finite or task.",
    "reason",
)

# --- the coordinator: told by the replica that leads the job, by no other --------------------

LEADING = _coordinator.gauge(
    "doll_leading", "0 or 1", "1: this replica leads the job; told by all."
)
EPOCH = _coordinator.gauge("doll_epoch", "number", "Of the leader: each has a higher one.")
VERSION = _coordinator.gauge("doll_model_version", "updates", "J, updates of the model.")
UPDATES = _coordinator.counter("doll_updates_total", "updates", "Applied.")
UPDATE_BATCHES = _coordinator.counter("doll_update_batches_total", "batches", "In updates applied.")
UPDATE_RECORDS = _coordinator.counter("doll_update_records_total", "records", "In updates applied.")
SHORT_UPDATES = _coordinator.counter(
    "doll_short_updates_total",
    "updates",
    "Of fewer than K batches: linger, missing or quarantined.",
    "why",
)
LOSS = _coordinator.gauge(
    "doll_loss", "loss per record", "Of the newest update, at the weights before it (prequential)."
)
TRAINING_METRIC = _coordinator.gauge(
    "doll_training_metric",
    "mean per record",
    "The task's metrics of the newest update, likewise: accuracy and the like; auc,"
    " calibration_error, f1, precision and recall are of the records of the last minute.",
    "metric",
)
LEARNING_RATE = _coordinator.gauge(
    "doll_learning_rate",
    "1",
    "Of the newest update, by the job's rate, its schedule and its synchronisation.",
)
ROUND_STAGE = _coordinator.histogram(
    "doll_round_seconds",
    "seconds",
    "wait: from an update until the next round begins, for K batches; gradients: from its trigger"
    " to its last gradient; apply: the optimizer's step until the new model is published.",
    "stage",
)
STALENESS = _coordinator.histogram(
    "doll_gradient_staleness_versions",
    "updates",
    "How many updates older than the model a gradient was when it came; counted: yes or no.",
    "counted",
    buckets=VERSIONS,
)
SYNCHRONISATION = _coordinator.gauge(
    "doll_synchronisation",
    "always 1",
    "How the newest update was made: synchronous, stale, asynchronous or averaging.",
    "mode",
)
SWITCHES = _coordinator.counter(
    "doll_synchronisation_switches_total",
    "updates",
    "Made in another mode than the one before, by a rule or by a change of the job.",
)
GROUP_SIZE = _coordinator.gauge(
    "doll_group_size", "batches", "K that the newest update was made with."
)
MEMBERS = _coordinator.gauge(
    "doll_group_members",
    "workers",
    "That hold the weights and add gradients up among themselves (`aggregation.mode: group`).",
)
LEFT_OUT = _coordinator.gauge(
    "doll_group_left_out",
    "workers",
    "That live and cannot be members: they and some members do not reach each other.",
)
MEMBERSHIPS = _coordinator.counter(
    "doll_group_membership_changes_total", "memberships", "Of other members than the one before."
)
ATTEMPTS_BROKEN = _coordinator.counter(
    "doll_group_attempts_broken_total",
    "attempts",
    "At an update that came to nothing: a member died, hung, or lacked what it was to add.",
)
COLLECTIVE = _coordinator.histogram(
    "doll_group_collective_seconds",
    "seconds",
    "From when members are told to add up until enough of them have the result.",
)
REPAIR = _coordinator.histogram(
    "doll_group_repair_seconds",
    "seconds",
    "From when an attempt is given up until enough members have the result of a later one.",
)
BYTES_COPIED = _worker.counter(
    "doll_group_copied_bytes_total",
    "bytes",
    "Of weights and optimizer state that a worker took over from another, or from storage.",
)
BYTES_MOVED = _worker.counter(
    "doll_worker_moved_bytes_total",
    "bytes",
    "Weights and gradients that a worker has sent or received: through Redis as they are there,"
    " among members by what each collective takes on a ring; storage is not among them.",
    "direction",
)
UPDATE_STALENESS = _coordinator.gauge(
    "doll_update_staleness_versions",
    "updates",
    "Between the oldest gradient of the newest update and itself.",
)
WORKERS_BUSY = _coordinator.gauge(
    "doll_workers_busy_ratio",
    "1",
    "Share of their time that workers computed, by the last 20 updates of this mode; 1 until there"
    " are so many.",
)
WORKER_SPEED = _coordinator.gauge(
    "doll_worker_batches_per_second",
    "batches/s",
    "While it computes, by the last 1,000 gradients, of the 100 workers with most batches.",
    "worker",
)
WORKER_SHARE = _coordinator.gauge(
    "doll_worker_batches_ratio", "1", "Share of the batches of these gradients, likewise.", "worker"
)
RECORD_AGE = _coordinator.histogram(
    "doll_record_age_seconds",
    "seconds",
    "From the arrival of a batch's newest record in Kafka until its update is applied.",
    buckets=AGES_S,
)
CLAIMS_ACCEPTED = _coordinator.counter(
    "doll_claims_accepted_total", "batches", "Batches that count."
)
CLAIMS_REFUSED = _coordinator.counter(
    "doll_claims_refused_total", "claims", "Twice, late, of a ghost or unreadable: without effect."
)
REPLIES_REFUSED = _coordinator.counter(
    "doll_replies_refused_total",
    "messages",
    "gradient, failed, farewell: of another round or counted already; malformed: not readable.",
    "kind",
)
REDISPATCHED = _coordinator.counter(
    "doll_batches_redispatched_total",
    "batches",
    "Asked of somebody else: their worker left, died, failed or was late.",
)
QUARANTINED = _coordinator.counter(
    "doll_batches_quarantined_total", "batches", "Given up for ever: poison or expired.", "reason"
)
DEAD_LETTERS = _coordinator.counter(
    "doll_dead_letters_total", "records", "Written to dead-letter topics."
)
BATCHES_WAITING = _coordinator.gauge(
    "doll_batches_waiting", "batches", "Accepted and in no update yet."
)
WORKERS_LIVE = _coordinator.gauge("doll_workers_live", "workers", "That the leader sees.")
JOB_HELD = _coordinator.gauge(
    "doll_job_held", "0 or 1", "1: waits for a person; the reason is logged."
)
JOB_PAUSED = _coordinator.gauge(
    "doll_job_paused", "0 or 1", "1: a person lets it rest: no updates."
)
CHECKPOINT_AGE = _coordinator.gauge(
    "doll_checkpoint_age_seconds", "seconds", "Since the newest checkpoint was made."
)
CHECKPOINT_FAILURES = _coordinator.counter(
    "doll_checkpoint_failures_total",
    "attempts",
    "To write one that failed; each is repeated, unless a newer one comes meanwhile.",
)
TAKEOVERS = _coordinator.counter("doll_takeovers_total", "leaderships", "That this replica began.")
STREAM_RECORDS = _coordinator.gauge(
    "doll_stream_records",
    "records",
    "Arrived in Kafka since the job's first position; its rate is that of arrivals.",
    "stream",
)
STREAM_LAG = _coordinator.gauge(
    "doll_stream_lag_records",
    "records",
    "Arrived, behind no open transaction, and claimed by nobody yet; what waits is in"
    " doll_batches_waiting.",
    "stream",
)
ARRIVAL_RATE = _coordinator.gauge(
    "doll_arrival_rate", "records/s", "Of all streams, over the last minute."
)
STABILITY = _coordinator.gauge(
    "doll_stability_ratio",
    "1",
    "Work that arrives over work that can be done (Proposition 1). sufficient: below 1 it is stable"
    " however unevenly batches lie; necessary: from 1 on nothing helps but more or faster workers.",
    "bound",
)

# --- the provisioner: told by the replica in charge, by no other -----------------------------

PROVISIONING = _provisioner.gauge(
    "doll_provisioning", "0 or 1", "1: this replica rents; told by all."
)
MACHINES_RUNNING = _provisioner.gauge("doll_machines_running", "machines", "Paid for now.", "pool")
MACHINES_WANTED = _provisioner.gauge(
    "doll_machines_wanted", "machines", "By the plan that stands: spot or on_demand.", "kind"
)
MACHINES_ENDED = _provisioner.counter(
    "doll_machines_ended_total",
    "machines",
    "preempted, released, failed, refused or lost.",
    "cause",
)
PLANS = _provisioner.counter("doll_plans_total", "plans", "Made: yes or no.", "feasible")
PRICE = _provisioner.gauge("doll_price_usd_per_hour", "USD/h", "Of one machine, now.", "pool")
COST_PER_HOUR = _provisioner.gauge("doll_cost_usd_per_hour", "USD/h", "Of all machines that run.")
SPENT = _provisioner.gauge("doll_spent_usd", "USD", "Since the job began.")
ON_DEMAND_ONLY = _provisioner.gauge(
    "doll_on_demand_only_usd",
    "USD",
    "What the updates made so far would have cost on demand alone.",
)
COST_PER_UPDATE = _provisioner.gauge("doll_cost_usd_per_update", "USD", "Spent over updates made.")
COST_PER_MILLION = _provisioner.gauge(
    "doll_cost_usd_per_million_records", "USD", "Spent over records in updates."
)
ESTIMATE = _provisioner.gauge(
    "doll_estimate",
    "as its name says",
    "What is believed: arrivals_per_s (lambda_A of one worker), gradient_s (mu_C), update_mb (of"
    " transfer), availability by pool (alpha) and the like; bound: value, low or high (it lies"
    " between them with 90 %).",
    "quantity",
    "bound",
)
CAPACITY = _provisioner.gauge(
    "doll_fleet_capacity_ratio",
    "1",
    "What the machines can do over what arrives; below 1 they cannot keep up (Proposition 1).",
)
DEADLINE_LEFT = _provisioner.gauge(
    "doll_deadline_left_seconds", "seconds", "Until the job's deadline."
)
PLANNED_LEFT = _provisioner.gauge(
    "doll_planned_time_left_seconds", "seconds", "That the job takes yet, by the plan that stands."
)

# --- the evaluator ---------------------------------------------------------------------------

TEST_METRIC = _evaluator.gauge(
    "doll_test_metric",
    "mean per record",
    "On the test set, of the version evaluated last: loss, accuracy and the like.",
    "metric",
)
EVALUATED_VERSION = _evaluator.gauge(
    "doll_evaluated_version", "updates", "J of the version evaluated last."
)
EVALUATIONS = _evaluator.counter(
    "doll_evaluations_total",
    "versions",
    "done, or skipped: a newer one came meanwhile, or a leader took it back.",
    "outcome",
)
EVALUATION_SECONDS = _evaluator.histogram(
    "doll_evaluation_seconds", "seconds", "Of one version, on the test set."
)
PREQUENTIAL = _evaluator.gauge(
    "doll_prequential_metric",
    "mean per record",
    "Of a stream's records just before the model learned from them.",
    "stream",
    "metric",
)
DRIFTS = _evaluator.counter(
    "doll_drifts_total", "drifts", "Detected by ADWIN in a stream's errors.", "stream"
)

TRACKING_SENT = _evaluator.counter(
    "doll_tracking_sent_total", "points", "Of curves, that an MLflow server took."
)
TRACKING_FAILED = _evaluator.counter(
    "doll_tracking_failed_total",
    "attempts",
    "To tell an MLflow server; what they were of is told later.",
)
TRACKING_WAITING = _evaluator.gauge(
    "doll_tracking_waiting",
    "records",
    "Of the updates topic, of which an MLflow server was not told yet.",
)

# --- model servers ---------------------------------------------------------------------------

SERVED_VERSION = _server.gauge(
    "doll_served_version", "updates", "J of the version that answers; -1: none yet."
)
SERVED_BEHIND = _server.gauge(
    "doll_served_behind_seconds",
    "seconds",
    "How long there may have been a newer one: since it was last seen to be what is wanted.",
)
PREDICTIONS = _server.counter(
    "doll_predictions_total",
    "requests",
    "Requests for predictions, by the status of the answer.",
    "status",
)
PREDICTION_SECONDS = _server.histogram(
    "doll_prediction_seconds", "seconds", "From a request's arrival to its answer."
)
PREDICTION_BATCH = _server.histogram(
    "doll_prediction_batch_records",
    "records",
    "Answered in one pass of the network.",
    buckets=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0),
)
SHADOW_DIFFERENCE = _server.gauge(
    "doll_shadow_difference",
    "mean per output",
    "Absolute difference between the answers of the last batch and the shadow's.",
)
PREDICTIONS_NOT_WRITTEN = _server.counter(
    "doll_predictions_not_written_total",
    "records",
    "Answered, and not written to the topic of predictions: Kafka was unavailable.",
)

# --- the admin service -----------------------------------------------------------------------

API_REQUESTS = _api.counter(
    "doll_api_requests_total",
    "requests",
    "Answered; route `none`: there is no such.",
    "route",
    "method",
    "status",
)
API_SECONDS = _api.histogram(
    "doll_api_request_seconds",
    "seconds",
    "Until the answer began; streams of events apart.",
    "route",
    "method",
    buckets=SECONDS[:-1],
)
RECORDS_MISSING = _api.gauge(
    "doll_records_missing",
    "jobs or keys",
    "Jobs (doll.jobs) or API keys (doll.keys) that the admin service has read earlier and of which"
    " the topic has no record any more.",
    "topic",
)
API_STREAMS = _api.gauge("doll_api_streams_open", "streams", "Of events, open now.")
JOB_STATE = _admin.gauge(
    "doll_job_state",
    "always 1",
    "The job's state (job-states.md says what each means); a job that is not stopped has one.",
    "state",
)
JOB_LAG = _admin.gauge(
    "doll_job_lag_records",
    "records",
    "In the job's streams up to the high watermark and in no update yet, whether it is led or not.",
)
OPEN_TRANSACTION = _admin.gauge(
    "doll_stream_open_transaction_seconds",
    "seconds",
    "Since the last stable offset of one of the stream's partitions was first seen to stand still"
    " below the high watermark; 0: no transaction is open.",
    "stream",
)
JOB_SKIPPED = _admin.gauge(
    "doll_job_skipped_records", "records", "Did not decode, since the job began."
)
JOB_QUARANTINED = _admin.gauge(
    "doll_job_quarantined_batches",
    "batches",
    "Given up since the job began, and not taken back by an operator.",
)
JOB_EXPIRED = _admin.gauge(
    "doll_job_expired_records",
    "records",
    "Deleted from Kafka before they were trained, read or not, since the job began.",
)
JOB_LOST = _admin.gauge(
    "doll_job_lost_records",
    "records",
    "Trained, and lost by Kafka afterwards, since the job began.",
)

CATALOGUE: tuple[Metric, ...] = tuple(
    value for value in dict(globals()).values() if isinstance(value, Metric)
)
