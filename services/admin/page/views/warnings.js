/** What a person must know about a job at once. */

import { count, short } from "../format.js";

const GRAVE = new Set(["held", "degraded", "waiting for a coordinator", "waiting for workers"]);

/**
 * @param {import("../store.js").JobStore} store
 * @returns {Array<{grave: boolean, title: string, text: string}>}
 */
export function warnings(store) {
  const { job, provisioning, workers } = store;
  if (job === null) return [];
  const progress = job.progress;
  const found = [];
  const warn = (grave, title, text) => found.push({ grave, title, text });
  if (job.state !== "running") warn(GRAVE.has(job.state), `The job is ${job.state}${job.why ? ":" : "."}`, job.why);
  else if (progress.led === null) warn(true, "Redis is unavailable:", "who leads and who works is not known.");
  if (workers?.board_away && progress.led !== null) warn(true, "Signs of life cannot be read:", workers.board_away);
  if (progress.skipped > 0) warn(false, `${count(progress.skipped)} records did not decode:`, "they are in the streams' dead letters.");
  if (progress.quarantined > 0) {
    warn(false, `${count(progress.quarantined)} batches are quarantined:`, "doll audit says which and why.");
  }
  if (provisioning) rented(provisioning, warn);
  return found;
}

function rented({ plan, warning, stability, settled }, warn) {
  if (settled) {
    warn(false, "Its machines are given back:", settled);
    return;
  }
  if (warning) warn(true, "Provisioning:", warning);
  if (plan?.warning && plan.warning !== warning) warn(true, `Plan ${plan.number}:`, plan.warning);
  if (plan && !plan.feasible) warn(true, "The plan is not feasible:", plan.reason);
  if (stability !== null && stability < 1 && !warning) {
    warn(true, `The stability ratio is ${short(stability)}:`, "records arrive faster than these machines make updates of them.");
  }
}
