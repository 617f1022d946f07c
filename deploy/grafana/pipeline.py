"""The dashboard of the pipeline: from records in Kafka to updates applied."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Lines, Query, Stat, States, Steps
from deploy.grafana.queries import lately, newest, per_s, quantile, selected, total

_STRANGE_FROM_1: Steps = {None: "green", 1: "orange"}

PIPELINE = Dashboard(
    "pipeline",
    "From records in Kafka to updates: is it fast enough, and is anything lost on the way?",
    # Now.
    Stat(
        "Replicas that lead",
        "Normal: 1. At 0 nothing is trained: start a coordinator, or see why none leads (alert"
        " DollNoLeader). 2 for the moment of a takeover is harmless.",
        Query(total("doll_leading"), "leaders"),
        steps={None: "red", 1: "green", 2: "orange"},
    ),
    Stat(
        "Held",
        "Normal: no. Held: a person must decide; `doll job list` shows the reason (alert"
        " DollJobHeld). Rests: somebody paused it.",
        Query(newest("doll_job_held"), "held"),
        Query(newest("doll_job_paused"), "rests"),
        steps={None: "green", 1: "red"},
        names=("no", "yes"),
    ),
    Stat(
        "Workers live",
        "Normal: as many as were started. Fewer for long: machines are preempted and not replaced,"
        " or workers crash: see their logs.",
        Query(newest("doll_workers_live"), "workers"),
        steps={None: "red", 1: "green"},
    ),
    Stat(
        "Stability ratio",
        "Work that arrives over work that can be done (Proposition 1). Normal: below 1. Necessary"
        " from 1 on: the lag grows until there are more or faster workers, or a smaller K.",
        Query(newest("doll_stability_ratio", "bound"), "{{bound}}"),
        unit="percentunit",
        steps={None: "green", 0.8: "orange", 1.0: "red"},
    ),
    Stat(
        "Version",
        "J, updates of the model. Normal: grows as long as records arrive.",
        Query(newest("doll_model_version"), "version"),
    ),
    Stat(
        "Leader changes (1 h)",
        "Normal: 0, and a few when coordinators are upgraded. Many: coordinators crash, or Redis or"
        " Kafka is unavailable again and again (alert DollLeaderChanges).",
        Query(f"changes(({newest('doll_epoch')})[1h:15s])", "changes"),
        steps={None: "green", 3: "orange", 6: "red"},
    ),
    # Records to updates.
    Lines(
        "Records per second",
        "Normal: what arrives is read and is soon in updates. Less is read: workers are too few, or"
        " paused, or not scraped. Read, yet not in updates: batches wait.",
        Query(newest("doll_arrival_records_per_second"), "arrive (a minute's mean)"),
        Query(per_s("doll_records_read_total"), "are read"),
        Query(per_s("doll_update_records_total"), "in updates"),
        unit="suffix: records/s",
    ),
    Lines(
        "Batches per second",
        "Normal: three lines on each other. Announced above accepted: claims are refused (below)."
        " Accepted above in updates: batches wait.",
        Query(per_s("doll_batches_announced_total"), "announced"),
        Query(per_s("doll_claims_accepted_total"), "accepted"),
        Query(per_s("doll_update_batches_total"), "in updates"),
        unit="suffix: batches/s",
    ),
    Lines(
        "Updates per second",
        "Normal: records per second over K times b. Short ones have fewer than K batches: by linger"
        " where streams run dry, or as batches went missing (on_missing: proceed).",
        Query(per_s("doll_updates_total"), "all"),
        Query(per_s("doll_short_updates_total", "why"), "short: {{why}}"),
        unit="suffix: updates/s",
    ),
    Lines(
        "Lag by stream",
        "Records in Kafka that no batch has claimed. Normal: less than a batch for each worker, or"
        " falling. Growing: alert DollLagGrows.",
        Query(newest("doll_stream_lag_records", "stream"), "{{stream}}"),
        unit="suffix: records",
    ),
    Lines(
        "Batches waiting, workers reading",
        "Batches accepted and in no update yet. Normal: from K to 2K for each worker at full load."
        " Workers stop reading while enough of theirs wait; the rest waits in Kafka.",
        Query(newest("doll_batches_waiting"), "batches waiting"),
        Query(total("doll_worker_reading"), "workers reading"),
    ),
    Lines(
        "Age of a record when it is learned",
        "From its arrival in Kafka until its update is applied. Normal: the time in which K batches"
        " gather, and a round. Grows with the lag.",
        Query(quantile(0.5, "doll_record_age_seconds"), "p50"),
        Query(quantile(0.95, "doll_record_age_seconds"), "p95"),
        unit="s",
    ),
    # Rounds, and workers.
    Lines(
        "A round by stage",
        "wait: for K batches, so long where arrivals bound; gradients: as long as the slowest"
        " worker; apply: milliseconds. gradients p95 far above p50: a slow or dying machine.",
        Query(quantile(0.5, "doll_round_seconds", "stage"), "{{stage}} p50"),
        Query(quantile(0.95, "doll_round_seconds", "stage"), "{{stage}} p95"),
        unit="s",
    ),
    Lines(
        "A worker by stage (p95)",
        "Normal: gradient is by far the longest. Long fetch or push: Redis or the network, as"
        " weights and gradients go through it. Long indicator: Kafka.",
        Query(quantile(0.95, "doll_worker_stage_seconds", "stage"), "{{stage}}"),
        unit="s",
    ),
    Lines(
        "Staleness of gradients (p95)",
        "Updates that a gradient was behind the model. Normal where counted: up to the job's"
        " staleness, 0 where it is synchronous. Others came too late and changed nothing.",
        Query(
            quantile(0.95, "doll_gradient_staleness_versions", "counted"),
            "counted: {{counted}}",
        ),
    ),
    Lines(
        "Synchronisation",
        "How updates are made. Normal: in one mode, and in others as the job's rules say. Back and"
        " forth: a rule that undoes what it was for.",
        Query(newest("doll_synchronisation", "mode"), "{{mode}}"),
        Query(newest("doll_group_size_batches"), "K"),
        Query(lately("doll_synchronisation_switches_total"), "switches in 5 minutes"),
    ),
    Lines(
        "Workers busy",
        "Share of their time that workers compute. Normal: near 1. Low: they wait for each other,"
        " for Redis or for the leader: more batches per update, another mode, or fewer workers.",
        Query(newest("doll_workers_busy_ratio"), "busy"),
        unit="percentunit",
    ),
    Lines(
        "Members of the group",
        "Workers that hold the weights and add up among themselves (aggregation.mode: group)."
        " Normal: all that live. Left out: they and some members do not reach each other, whom the"
        " job's state names.",
        Query(newest("doll_group_members"), "members"),
        Query(newest("doll_group_left_out_workers"), "left out"),
        Query(lately("doll_group_membership_changes_total"), "changes in 5 minutes"),
        Query(lately("doll_group_attempts_broken_total"), "attempts broken in 5 minutes"),
    ),
    Lines(
        "Adding up among members (p95)",
        "Normal: a collective takes as long as the weights need on the network. Repairs: after each"
        " member that dies, a fraction of a second.",
        Query(quantile(0.95, "doll_group_collective_seconds"), "collective"),
        Query(quantile(0.95, "doll_group_repair_seconds"), "repair"),
        unit="s",
    ),
    Lines(
        "Weights copied by members",
        "What joins, or missed an update, takes over all that another holds. Normal: nothing while"
        " nobody comes or goes.",
        Query(per_s("doll_group_copied_bytes_total"), "bytes"),
        unit="Bps",
    ),
    Lines(
        "Share of batches by worker",
        "Normal: alike for machines of a kind. Who is slower gets fewer, and holds nobody up.",
        Query(newest("doll_worker_batches_ratio", "worker"), "{{worker}}"),
        unit="percentunit",
    ),
    Lines(
        "Speed of workers",
        "Batches per second of computing. Normal: alike for machines of a kind. One far below the"
        " others: a slow machine, or a neighbour that takes its cores.",
        Query(newest("doll_worker_batches_per_second", "worker"), "{{worker}}"),
        unit="suffix: batches/s",
    ),
    # Problems.
    Lines(
        "Refused in 5 minutes",
        "Claims and replies without effect: twice, late, of a ghost. Normal: some when workers come"
        " and go. Steadily many: deadlines too short for the gradients.",
        Query(lately("doll_claims_refused_total"), "claims"),
        Query(lately("doll_replies_refused_total", "kind"), "{{kind}}"),
    ),
    Lines(
        "Computed again in 5 minutes",
        "Batches asked of somebody else, and those read back from Kafka for it. Normal: K or so for"
        " each worker that leaves. Without any leaving: workers are late.",
        Query(lately("doll_batches_redispatched_total"), "asked of others"),
        Query(lately("doll_batches_read_back_total"), "read back"),
    ),
    Lines(
        "Gradients that failed in 5 minutes",
        "Normal: none. raised, not_finite: the task or its records; such batches end in quarantine."
        " model_missing: Redis lost it, it is put back. unreadable, expired: retention.",
        Query(lately("doll_gradients_failed_total", "reason"), "{{reason}}"),
    ),
    Lines(
        "Records that teach nothing, in 5 minutes",
        "Normal: none. Skipped ones did not decode and are dead letters: mend the producer (alert"
        " DollDeadLetters). Expired ones are lost: longer retention (alert DollRecordsExpired).",
        Query(lately("doll_records_skipped_total", "stream"), "skipped: {{stream}}"),
        Query(lately("doll_dead_letters_total"), "dead letters"),
        Query(lately("doll_records_expired_total", "stream"), "expired: {{stream}}"),
        steps=_STRANGE_FROM_1,
    ),
    Lines(
        "Batches in quarantine, in an hour",
        "Normal: none. poison: workers died, raised or diverged on it alone (alert DollQuarantine)."
        " expired: retention deleted its records before its gradient was computed.",
        Query(lately("doll_batches_quarantined_total", "reason", window="1h"), "{{reason}}"),
        steps=_STRANGE_FROM_1,
    ),
    States(
        "Who leads",
        "Normal: one replica for a long time. Gaps are time without a leader; a takeover takes"
        " about a second.",
        Query(f"max by (instance) ({selected('doll_leading')})", "{{instance}}"),
        steps={None: "gray", 1: "green"},
        names=("stands by", "leads"),
    ),
    Lines(
        "Processes",
        "That answer scrapes, by service and version. Normal: as many as were started, of one"
        " version but during an upgrade.",
        Query(
            "sum by (service, version) (doll_build_info)",
            "{{service}} {{version}}",
        ),
    ),
)
