/** Messages in place of data that cannot be shown, and warnings. */

import { copy, h, say } from "../dom.js";
import { count, short } from "../format.js";

/**
 * Message for the whole page about a refused request, with what to do.
 * @param {import("../api.js").Refusal} refusal
 * @returns {Node}
 */
export function refused({ kind, message }) {
  if (kind !== "key" && kind !== "role") {
    return h("section", { class: "alone" }, h("h1", {}, "Nothing to show yet"), h("p", {}, message));
  }
  const notice = copy("no-key");
  say(notice.message, message);
  notice.again.addEventListener("click", () => location.reload());
  return notice.root;
}

/** Message for a job that does not exist. @param {string} job @returns {Node} */
export function noJob(job) {
  const notice = copy("no-job");
  say(notice.title, `There is no job named ${job}`);
  return notice.root;
}

/** Message for an empty list: how to submit a job. @param {boolean} operator @returns {Node} */
export function noJobs(operator) {
  const notice = copy("no-jobs");
  notice.here.hidden = !operator;
  say(notice.command, `doll job submit docs/examples/digits.yaml --api ${location.origin}`);
  return notice.root;
}

/**
 * State of a job as a badge, with the same word as in the API, the command line and the metrics.
 * @param {{state: string, why: string}} job
 * @returns {HTMLElement}
 */
export function badge(job) {
  const { state } = job;
  return h("span", { class: "badge", "data-state": state.replaceAll(" ", "-"), "data-idle": awaitsTurn(job) }, state);
}

/**
 * True if a job only waits until it gets workers of other jobs, see `common/core/job_placement.py`.
 * @param {{state: string, why: string}} job
 */
export function awaitsTurn({ state, why }) {
  return state === "waiting for workers" && why.includes("another job has its turn");
}

/**
 * Warnings, the most severe first.
 * @param {Array<{grave: boolean, title: string, text: string, command: string}>} warnings
 * @returns {Array<Node>}
 */
export function banners(warnings) {
  return [...warnings]
    .sort((one, other) => Number(other.grave) - Number(one.grave))
    .map(({ grave, title, text, command }) =>
      h(
        "div",
        { class: grave ? "banner grave" : "banner", role: "alert" },
        h("strong", {}, title),
        text ? h("span", {}, text) : null,
        command ? h("code", {}, command) : null,
      ),
    );
}

const GRAVE = new Set(["held", "degraded", "waiting for a server", "waiting for a coordinator", "waiting for workers"]);

/**
 * Conditions of a job that a person must know about at once.
 * @param {import("../store.js").JobStore} store
 * @returns {Array<{grave: boolean, title: string, text: string, command: string}>} command: what to do about it
 */
export function warnings(store) {
  const { job, provisioning, workers } = store;
  if (job === null) return [];
  const progress = job.progress;
  const found = [];
  const warn = (grave, title, text, command = "") => found.push({ grave, title, text, command });
  if (job.state !== "running") {
    const resume = `doll job resume ${job.id}`;
    // Otherwise the reason names the command.
    const command = job.state === "held" && !job.why.includes(resume) ? resume : "";
    warn(GRAVE.has(job.state) && !awaitsTurn(job), `The job is ${job.state}${job.why ? ":" : "."}`, job.why, command);
  } else if (progress.led === null) warn(true, "Redis is unavailable:", "the job's leader and its workers are unknown.");
  if (workers?.board_away && progress.led !== null) warn(true, "Heartbeats of workers cannot be read:", workers.board_away);
  if (progress.note) warn(false, "Updates wait for each other:", progress.note);
  if (progress.skipped > 0) warn(false, `${counted(progress.skipped, "record", "records")} could not be decoded:`, "they are in the streams' dead letters.");
  if (progress.quarantined > 0) quarantined(job.id, progress, warn);
  if (progress.expired > 0) {
    warn(true, `${counted(progress.expired, "record", "records")} expired:`, "Kafka deleted them before they were trained. Their topics need a longer retention.");
  }
  if (progress.lost > 0) {
    warn(false, `${counted(progress.lost, "record was", "records were")} trained, then lost:`, "Kafka lost them afterwards: the model has learned from them, but no topic has them any more.");
  }
  if (provisioning) rented(provisioning, warn);
  return found;
}

function quarantined(id, { quarantined: all, requeueable }, warn) {
  const title = `${counted(all, "batch is", "batches are")} quarantined:`;
  const list = `doll job requeue ${id}`;
  if (requeueable === 0) warn(false, title, "their records are deleted or were written to the stream again. To list them:", list);
  else warn(false, title, `${count(requeueable)} can be trained once the task or the data is fixed:`, `${list} --all`);
}

function counted(number, one, many) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

function rented({ plan, warning, stability, settled }, warn) {
  if (settled) {
    warn(false, "The job's machines are released:", settled);
    return;
  }
  if (warning) warn(true, "Provisioning:", warning);
  if (plan?.warning && plan.warning !== warning) warn(true, `Plan ${plan.number}:`, plan.warning);
  if (plan && !plan.feasible) warn(true, "The plan is not feasible:", plan.reason);
  if (stability !== null && stability < 1 && !warning) {
    warn(true, `The stability ratio is ${short(stability)}:`, "records arrive faster than these machines can train on them.");
  }
}
