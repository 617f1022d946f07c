"""The dashboard of the pipeline: from records in Kafka to updates applied."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Lines, Query, Stat, States, Steps
from deploy.grafana.queries import lately, newest, per_s, quantile, selected, total

_STRANGE_FROM_1: Steps = {None: "green", 1: "orange"}


def _memory(kind: str) -> str:
    return selected("doll_worker_device_memory_bytes", f'kind="{kind}"')


PIPELINE = Dashboard(
    "pipeline",
    "From records in Kafka to updates of the model: throughput, delays and losses.",
    # Now.
    Stat(
        "Leading coordinators",
        "Number of coordinators that lead the job. Normal: 1. At 0, nothing is trained: start a"
        " coordinator, or find out why none leads (alert DollNoLeader). 2 for a moment during a"
        " takeover is harmless.",
        Query(total("doll_leading"), "leaders"),
        steps={None: "red", 1: "green", 2: "orange"},
    ),
    Stat(
        "Held or paused",
        "Normal: no. A held job waits for an operator's decision; `doll job list` shows the reason"
        " (alert DollJobHeld). A paused job waits for `doll job resume`.",
        Query(newest("doll_job_held"), "held"),
        Query(newest("doll_job_paused"), "paused"),
        steps={None: "green", 1: "red"},
        names=("no", "yes"),
    ),
    Stat(
        "Workers live",
        "Number of live workers. Normal: all that were started. If fewer for long, machines are"
        " preempted and not replaced, or workers crash: see their logs.",
        Query(newest("doll_workers_live"), "workers"),
        steps={None: "red", 1: "green"},
    ),
    Stat(
        "Stability ratio",
        "Arriving work divided by the work that workers can do (Proposition 1 of the paper)."
        ' Normal: below 100 %. If "necessary" is 100 % or more, the lag grows until there are more'
        " or faster workers or a smaller K.",
        Query(newest("doll_stability_ratio", "bound"), "{{bound}}"),
        unit="percentunit",
        steps={None: "green", 0.8: "orange", 1.0: "red"},
    ),
    Stat(
        "Version",
        "Number of updates (J) that the model contains. Normal: it grows as long as records"
        " arrive.",
        Query(newest("doll_model_version"), "version"),
    ),
    Stat(
        "Leader changes (1 h)",
        "Changes of the leading coordinator in the last hour. Normal: 0, and a few when"
        " coordinators are upgraded. If many, coordinators crash, or Redis or Kafka is unavailable"
        " repeatedly (alert DollLeaderChanges).",
        Query(f"changes(({newest('doll_epoch')})[1h:15s])", "changes"),
        steps={None: "green", 3: "orange", 6: "red"},
    ),
    # Records to updates.
    Lines(
        "Records per second",
        "Records that arrive, that workers read, and that updates contain. Normal: about the same."
        " If fewer are read than arrive, workers are too few, paused or not scraped. If fewer are"
        " in updates than are read, batches wait.",
        Query(newest("doll_arrival_records_per_second"), "arrive (1 min mean)"),
        Query(per_s("doll_records_read_total"), "read"),
        Query(per_s("doll_update_records_total"), "in updates"),
        unit="suffix: records/s",
    ),
    Lines(
        "Batches per second",
        "Batches that workers claimed, whose claims the leader accepted, and that updates contain."
        " Normal: the same. If more are announced than accepted, claims are refused (see Refused"
        " claims). If more are accepted than in updates, batches wait.",
        Query(per_s("doll_batches_announced_total"), "announced"),
        Query(per_s("doll_claims_accepted_total"), "accepted"),
        Query(per_s("doll_update_batches_total"), "in updates"),
        unit="suffix: batches/s",
    ),
    Lines(
        "Updates per second",
        "Normal: records per second divided by K times b. A short update has fewer than K batches,"
        " because no further batch came in time (linger), gradients are missing (on_missing:"
        " proceed) or a batch was quarantined.",
        Query(per_s("doll_updates_total"), "all"),
        Query(per_s("doll_short_updates_total", "why"), "short: {{why}}"),
        unit="suffix: updates/s",
    ),
    Lines(
        "Lag by stream",
        "Records in Kafka that no worker has claimed for a batch. Normal: less than a batch per"
        " worker, or falling. Growing: alert DollLagGrows.",
        Query(newest("doll_stream_lag_records", "stream"), "{{stream}}"),
        unit="suffix: records",
    ),
    Lines(
        "Batches waiting, workers reading",
        "Claimed batches that no update contains yet, and the number of workers that read streams."
        " Normal: K to 2K batches per worker at full load. A worker stops reading while enough of"
        " its batches wait; further records wait in Kafka.",
        Query(newest("doll_batches_waiting"), "batches waiting"),
        Query(total("doll_worker_reading"), "workers reading"),
    ),
    Lines(
        "Record age when trained",
        "Time from a record's arrival in Kafka until its update is applied. Normal: the time to"
        " collect and compute K batches. It grows with the lag.",
        Query(quantile(0.5, "doll_record_age_seconds"), "p50"),
        Query(quantile(0.95, "doll_record_age_seconds"), "p95"),
        unit="s",
    ),
    # Rounds, and workers.
    Lines(
        "Update time by stage",
        "Stages of an update. wait: for K batches, long if few records arrive. gradients: as long"
        " as the slowest worker takes. apply: milliseconds. If gradients p95 is far above p50, a"
        " machine is slow or failing.",
        Query(quantile(0.5, "doll_round_seconds", "stage"), "{{stage}} p50"),
        Query(quantile(0.95, "doll_round_seconds", "stage"), "{{stage}} p95"),
        unit="s",
    ),
    Lines(
        "Worker time by stage (p95)",
        "Stages of a worker's work. Normal: gradient takes by far the longest. If fetch or push is"
        " long, Redis or the network is slow. If indicator (sending a claim) is long, Kafka is"
        " slow.",
        Query(quantile(0.95, "doll_worker_stage_seconds", "stage"), "{{stage}}"),
        unit="s",
    ),
    Lines(
        "Staleness of gradients (p95)",
        "Age of gradients' weights on arrival, in updates of the model. Normal if counted: at most"
        " the job's staleness, which is 0 for a synchronous job. Gradients that did not count came"
        " too late and changed nothing.",
        Query(
            quantile(0.95, "doll_gradient_staleness_versions", "counted"),
            "counted: {{counted}}",
        ),
    ),
    Lines(
        "Synchronisation",
        "Synchronisation mode and K of the newest update, and mode switches. Normal: one mode, and"
        " others when the job's rules select them. If modes alternate, a rule changes the very"
        " condition that selects it.",
        Query(newest("doll_synchronisation", "mode"), "{{mode}}"),
        Query(newest("doll_group_size_batches"), "K"),
        Query(lately("doll_synchronisation_switches_total"), "switches (5 min)"),
    ),
    Lines(
        "Workers busy",
        "Share of time that workers spend computing. Normal: near 100 %. If low, workers wait for"
        " each other, for Redis or for the leader: use more batches per update, another mode or"
        " fewer workers.",
        Query(newest("doll_workers_busy_ratio"), "busy"),
        unit="percentunit",
    ),
    Lines(
        "Devices of workers",
        "Workers by the device on which they compute, and the largest share of a device's memory in"
        " use. Normal: one kind of device. If some workers compute on the CPU: alert"
        " DollWorkerWithoutGpu. A share near 100 % does no harm while no gradients are cut.",
        Query(total("doll_worker_device_info", "device"), "{{device}}"),
        Query(
            f"max by (job_name) ({_memory('used')} / ignoring (kind) {_memory('total')})",
            "memory used",
        ),
        Query(lately("doll_gradients_cut_total"), "gradients cut (5 min)"),
    ),
    Lines(
        "Members of the group",
        "Workers that hold the model weights and sum gradients among themselves (aggregation.mode:"
        " group). Normal: all live workers. A worker is left out if it and some members cannot"
        " connect to each other; `doll job show` names them.",
        Query(newest("doll_group_members"), "members"),
        Query(newest("doll_group_left_out_workers"), "left out"),
        Query(lately("doll_group_membership_changes_total"), "changes (5 min)"),
        Query(lately("doll_group_attempts_broken_total"), "failed attempts (5 min)"),
    ),
    Lines(
        "Gradient sums among members (p95)",
        "Time to sum gradients among group members, and to recover from a failed attempt. Normal:"
        " a sum takes as long as the network needs for the weights; recovery after a member's"
        " death takes a fraction of a second.",
        Query(quantile(0.95, "doll_group_collective_seconds"), "collective"),
        Query(quantile(0.95, "doll_group_repair_seconds"), "repair"),
        unit="s",
    ),
    Lines(
        "Weights copied by members",
        "Bytes of weights and optimizer state that members copy from each other after joining or"
        " missing an update. Normal: 0 while no member joins or leaves.",
        Query(per_s("doll_group_copied_bytes_total"), "bytes"),
        unit="Bps",
    ),
    Lines(
        "Share of batches by worker",
        "Share of the job's batches that each worker computed. Normal: similar for equal machines."
        " A slower worker gets fewer batches and delays nobody.",
        Query(newest("doll_worker_batches_ratio", "worker"), "{{worker}}"),
        unit="percentunit",
    ),
    Lines(
        "Speed of workers",
        "Batches per second of computing time, by worker. Normal: similar for equal machines. If"
        " one is far slower, its machine is slow or another program uses its cores.",
        Query(newest("doll_worker_batches_per_second", "worker"), "{{worker}}"),
        unit="suffix: batches/s",
    ),
    # Problems.
    Lines(
        "Refused claims and messages (5 min)",
        "Workers' claims and messages that the leader ignored because they are repeated or too"
        " late. Normal: some when workers start and leave. If always many, deadlines are too short"
        " for the gradients.",
        Query(lately("doll_claims_refused_total"), "claims"),
        Query(lately("doll_replies_refused_total", "kind"), "{{kind}}"),
    ),
    Lines(
        "Batches reassigned (5 min)",
        "Batches reassigned to another worker, and batches read from Kafka again for this. Normal:"
        " about K for each worker that leaves. If none leaves, workers are late.",
        Query(lately("doll_batches_redispatched_total"), "reassigned"),
        Query(lately("doll_batches_read_back_total"), "read back"),
    ),
    Lines(
        "Gradients that failed (5 min)",
        "Requests for gradients that failed, by reason. Normal: none. raised, not_finite: a fault"
        " of the task or of its records; such batches end in quarantine. model_missing: Redis lost"
        " the model, which the leader publishes again. unreadable, expired: Kafka lacks the"
        " records.",
        Query(lately("doll_gradients_failed_total", "reason"), "{{reason}}"),
    ),
    Lines(
        "Records not trained (5 min)",
        "Normal: none. Skipped records could not be decoded and become dead letters: correct the"
        " producer (alert DollDeadLetters). Expired records were deleted before they were trained:"
        " set a longer retention (alert DollRecordsExpired).",
        Query(lately("doll_records_skipped_total", "stream"), "skipped: {{stream}}"),
        Query(lately("doll_dead_letters_total"), "dead letters"),
        Query(lately("doll_records_expired_total", "stream"), "expired: {{stream}}"),
        steps=_STRANGE_FROM_1,
    ),
    Lines(
        "Batches quarantined (1 h)",
        "Batches put in quarantine in the last hour. Normal: none. poison: the batch crashes"
        " workers, raises an exception or gives non-finite numbers (alert DollQuarantine)."
        " expired: Kafka deleted its records before its gradient was computed.",
        Query(lately("doll_batches_quarantined_total", "reason", window="1h"), "{{reason}}"),
        steps=_STRANGE_FROM_1,
    ),
    States(
        "Leading coordinator over time",
        "The coordinator that leads the job. Normal: the same one for a long time. Gaps are times"
        " without a leader; a takeover takes about a second.",
        Query(f"max by (instance) ({selected('doll_leading')})", "{{instance}}"),
        steps={None: "gray", 1: "green"},
        names=("stands by", "leads"),
    ),
    Lines(
        "Processes",
        "Number of processes that answer scrapes, by service and version. Normal: all that were"
        " started, of one version except during an upgrade.",
        Query(
            "sum by (service, version) (doll_build_info)",
            "{{service}} {{version}}",
        ),
    ),
)
