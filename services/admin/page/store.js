/** State of one job: answers of the API, and events since. */

import { ask, jobPath } from "./api.js";

const PARTS = {
  job: { path: "", everyS: 5 },
  streams: { path: "/streams", everyS: 5 },
  curves: { path: "/curves", everyS: 15 },
  workers: { path: "/workers", everyS: 15 },
  provisioning: { path: "/provisioning", everyS: 20 },
};
const CONCERNED = {
  // The event contains the whole job, so no part is requested again.
  job: [],
  evaluation: ["curves"],
  drift: ["curves"],
  member: ["workers"],
  machine: ["workers", "curves", "provisioning"],
  plan: ["provisioning", "curves"],
  review: ["provisioning", "curves"],
};
// Events arrive in bursts, which share one request.
const GATHER_MS = 400;
// Maximum number of updates after the last answer with curves.
const LONGEST_TAIL = 3000;
const MOST_EVENTS = 200;
const RATE_OVER_S = 10;

/** State of one job. */
export class JobStore {
  /**
   * @param {string} name
   * @param {(part: string) => void} changed called with each part that changes
   * @param {(refusal: Error, part: string) => void} refused called if a part cannot be read
   */
  constructor(name, changed, refused) {
    this.name = name;
    this.changed = changed;
    this.refused = refused;
    this.job = this.streams = this.curves = this.workers = this.provisioning = null;
    // The newest update that an event reported.
    this.newest = null;
    this.tail = [];
    // Events that are in no answer, newest last.
    this.events = [];
    // Parts that this job does not have, with reasons.
    this.absent = {};
    this.timers = new Map();
    this.closing = new AbortController();
  }

  /** Request everything, then repeat at intervals. If the job does not exist, request only the job. */
  open() {
    this.refresh("job");
    if (this.job !== null) this.#rest();
  }

  /** Stop all requests. */
  close() {
    this.closing.abort();
    for (const part of Object.keys(PARTS)) this.#cancel(part);
  }

  /** Request one part now. */
  async refresh(part) {
    const { path, everyS } = PARTS[part];
    this.#cancel(part);
    if (part === "provisioning" && !this.job?.spec.provisioning) {
      this.absent.provisioning = "its workers are started by hand";
      this.changed(part);
      return;
    }
    let againS = everyS;
    try {
      const answer = await ask(jobPath(this.name, path), this.closing.signal);
      const first = part === "job" && this.job === null;
      this[part] = answer;
      if (first) this.#rest();
      delete this.absent[part];
      if (part === "curves") this.#cut();
      if (part === "job") this.#forget();
      this.changed(part);
    } catch (refusal) {
      if (refusal.name === "AbortError") return;
      if (refusal.kind === "missing" && part !== "job") {
        this.absent[part] = refusal.message;
        this.changed(part);
      } else {
        this.refused(refusal, part);
      }
      againS = Math.max(everyS, refusal.againS ?? everyS);
    }
    if (this.closing.signal.aborted) return;
    this.#later(part, document.hidden ? Math.max(againS, 60) * 1000 : againS * 1000);
  }

  /** Apply an event. */
  receive(name, data) {
    if (name === "update") {
      this.#updated(data);
      this.changed("update");
      return;
    }
    const before = this.job;
    if (name === "job" && data.spec) this.job = data;
    const news = name === "job" ? before !== null && (before.state !== data.state || before.reason !== data.reason) : true;
    if (news && (name === "member" || name === "job")) {
      this.events = [...this.events.slice(1 - MOST_EVENTS), { name, data, atS: Date.now() / 1000 }];
    }
    for (const part of CONCERNED[name] ?? []) this.#later(part, GATHER_MS);
    this.changed(name);
  }

  /** Columns of all updates: those of the last answer, and those that events have reported since. */
  updates() {
    const curves = this.curves;
    if (curves === null) return { at_s: [], version: [], loss: [], metrics: {}, updates_per_s: [] };
    const joined = {
      at_s: [...curves.update_at_s, ...this.tail.map((one) => one.at_s)],
      version: [...curves.version, ...this.tail.map((one) => one.version)],
      loss: [...curves.loss, ...this.tail.map((one) => one.loss)],
      updates_per_s: [...curves.updates_per_s],
      metrics: {},
    };
    for (const [name, values] of Object.entries(curves.metrics)) {
      joined.metrics[name] = [...values, ...this.tail.map((one) => one.metrics?.[name] ?? null)];
    }
    let from = 0;
    for (let at = curves.update_at_s.length; at < joined.at_s.length; at += 1) {
      while (joined.at_s[at] - joined.at_s[from] > RATE_OVER_S && from < at - 1) from += 1;
      const elapsedS = joined.at_s[at] - joined.at_s[from];
      const made = joined.version[at] - joined.version[from];
      joined.updates_per_s.push(elapsedS > 0 && made > 0 ? made / elapsedS : null);
    }
    return joined;
  }

  /** Data of the charts besides updates. */
  get known() {
    const none = { lag_at_s: [], lag: [], lives: [], cost_at_s: [], spent_usd: [], on_demand_only_usd: [], stability: [], evaluation: null };
    return this.curves ?? { ...none, now_s: Date.now() / 1000 };
  }

  /** Time that the page shows, by the service's clock if it is known. */
  get nowS() {
    const servedS = this.curves?.now_s ?? 0;
    return Math.max(servedS, this.newest?.at_s ?? 0);
  }

  // The earliest requested time counts, or a burst of events would postpone the request again and again.
  #rest() {
    for (const part of Object.keys(PARTS)) if (part !== "job") this.refresh(part);
  }

  #later(part, afterMs) {
    const dueMs = performance.now() + afterMs;
    if ((this.timers.get(part)?.dueMs ?? Infinity) <= dueMs) return;
    this.#cancel(part);
    this.timers.set(part, { dueMs, timer: setTimeout(() => this.refresh(part), afterMs) });
  }

  #cancel(part) {
    clearTimeout(this.timers.get(part)?.timer);
    this.timers.delete(part);
  }

  #updated(update) {
    if (!Number.isFinite(update.version)) return;
    const last = this.tail.at(-1)?.version ?? this.curves?.version.at(-1) ?? 0;
    this.newest = { ...update, at_s: update.at_s ?? Date.now() / 1000 };
    if (update.version > last) this.tail.push(this.newest);
    // A new leader took updates back, or the event is a repetition.
    else this.#later("curves", GATHER_MS);
    if (this.tail.length > LONGEST_TAIL) this.refresh("curves");
  }

  #cut() {
    const last = this.curves.version.at(-1) ?? 0;
    this.tail = this.tail.filter((update) => update.version > last);
  }

  #forget() {
    // The answer is newer than the update, or a new leader took the update back.
    if (this.newest && this.job.progress.last_update_s >= this.newest.at_s) this.newest = null;
  }
}
