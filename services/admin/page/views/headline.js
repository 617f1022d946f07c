/** Most important numbers of a job. */

import { h, say } from "../dom.js";
import { atLeast, brief, clock, count, money, percent, short, UNKNOWN } from "../format.js";

/** Main metric of a job: accuracy, if it has one. @returns {string|null} */
export function mainMetric(metrics) {
  const names = Object.keys(metrics ?? {});
  return names.includes("accuracy") ? "accuracy" : (names[0] ?? null);
}

/** A metric in words. */
export function metricText(name, value) {
  return name === "accuracy" || name?.endsWith("_share") ? percent(value) : short(value);
}

const ORDER = ["Version", "Loss", "Metric", "AUC", "Updates/s", "Synchronisation", "Lag", "Skipped", "Expired", "Lost", "Workers", "Time left", "Cost so far", "Predicted cost"];

/** Tiles with numbers; built once and updated often. */
export class Headline {
  /** @param {HTMLElement} element a list of definitions */
  constructor(element) {
    this.element = element;
    this.tiles = new Map();
  }

  /** Show current numbers. @param {import("../store.js").JobStore} store */
  update(store) {
    const { job, newest, provisioning } = store;
    if (job === null) return;
    const progress = job.progress;
    const stop = job.spec.stop ?? {};
    const version = newest?.version ?? progress.version;
    const counted = progress.updates + version - progress.version;
    this.#put("Version", count(version), versionNote(version, counted, stop.updates), share(counted, stop.updates));
    this.#put("Loss", short(progress.loss), newestNote(short(newest?.loss ?? null), stop.loss));
    const metric = mainMetric(progress.metrics);
    if (metric !== null) {
      const last = newest?.metrics?.[metric] ?? null;
      const name = metric === "accuracy" ? "Accuracy" : metric;
      this.#put("Metric", metricText(metric, progress.metrics[metric]), newestNote(metricText(metric, last)), null, name);
    }
    const { auc, precision, recall } = progress.metrics;
    if (auc !== undefined) {
      this.#put("AUC", short(auc), `last minute; precision ${short(precision ?? null)}, recall ${short(recall ?? null)}`);
    }
    this.#put("Updates/s", short(progress.updates_per_s), `${short(progress.samples_per_s)} records/s`);
    this.#put("Lag", short(progress.lag), progress.waiting === null ? "" : `${count(progress.waiting)} batches wait`);
    const quarantined = `${atLeast(progress.quarantined, progress.whole)} batches quarantined`;
    this.#put("Skipped", atLeast(progress.skipped, progress.whole), quarantined);
    this.#put("Expired", atLeast(progress.expired, progress.whole), "records deleted before they were trained");
    this.#put("Lost", atLeast(progress.lost, progress.whole), "records trained, then lost by Kafka");
    const { mode, group_size: k, staleness } = progress.synchrony;
    if (mode !== "synchronous" || job.spec.synchronisation || job.spec.tuner) {
      const behind = newest?.stale ?? progress.stale;
      const note = `K = ${count(k)}` + (staleness > 0 ? `, s = ${count(staleness)}; the newest update ${count(behind)} behind` : "");
      this.#put("Synchronisation", mode, note);
    }
    this.#put("Workers", count(progress.workers), provisioning ? `${provisioning.running} machines run` : "alive");
    const cost = provisioning?.cost ?? null;
    if (cost !== null) {
      this.#put("Cost so far", money(cost.spent_usd), `${percent(cost.ratio_to_on_demand)} of on-demand only`);
      const predicted = provisioning.plan === null ? "" : `by the plan, ${money(cost.usd_per_hour)}/h now`;
      this.#put("Predicted cost", money(cost.predicted_usd), predicted);
    }
    if (job.deadline_s !== null && !progress.done) {
      const leftS = job.deadline_s - Date.now() / 1000;
      const plan = provisioning?.plan ?? null;
      const expected = plan === null ? `at ${clock(job.deadline_s)}` : `done ${clock(plan.at_s + plan.expected_runtime_s)}, as planned`;
      this.#put("Time left", leftS > 0 ? brief(leftS) : "none", leftS > 0 ? expected : "the deadline is past");
    }
  }

  #put(name, value, note = "", part = null, title = name) {
    let tile = this.tiles.get(name);
    if (tile === undefined) {
      tile = { value: h("dd", { class: "value" }), note: h("dd", { class: "note" }), bar: null };
      const children = [h("dt", {}, title), tile.value, tile.note];
      if (part !== null) {
        tile.bar = h("progress", { max: 1, "aria-label": `${title}: done so far` });
        children.push(h("dd", { class: "bar" }, tile.bar));
      }
      this.tiles.set(name, tile);
      const later = [...this.element.children].find((other) => ORDER.indexOf(other.dataset.name) > ORDER.indexOf(name));
      this.element.insertBefore(h("div", { class: "tile", "data-name": name }, children), later ?? null);
    }
    say(tile.value, value);
    say(tile.note, note);
    if (tile.bar !== null && part !== null) tile.bar.value = part;
  }
}

function versionNote(version, counted, updates) {
  if (!updates) return "updates made";
  // Earlier updates may have had another K.
  const came = Math.abs(counted - version) < 1 ? "" : `count as ${count(Math.round(counted))} `;
  return `${came}of ${count(updates)} · ${percent(Math.min(1, counted / updates), 0)}`;
}

function share(counted, updates) {
  return updates ? Math.min(1, counted / updates) : null;
}

function newestNote(text, stopAt = null) {
  const goal = stopAt === null || stopAt === undefined ? "" : ` · stops at ${short(stopAt)}`;
  return text === UNKNOWN ? `over the last 20${goal}` : `newest ${text}${goal}`;
}
