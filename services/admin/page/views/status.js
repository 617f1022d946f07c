/** How a job is, in one word with a shape and in one sentence. */

import { h } from "../dom.js";

/**
 * @param {object} job with `wanted`, `reason` and perhaps `progress`
 * @returns {{state: string, word: string, reason: string}}
 */
export function stateOf(job) {
  const done = job.progress?.done ?? "";
  if (done) return { state: "done", word: "Done", reason: done };
  if (job.wanted === "paused") return { state: "paused", word: "Paused", reason: job.reason };
  if (job.wanted === "stopped") return { state: "stopped", word: "Stopped", reason: job.reason };
  if (job.progress?.led === false) return { state: "alone", word: "No leader", reason: job.reason };
  return { state: "running", word: "Running", reason: job.reason };
}

/** The word as a badge. @returns {HTMLElement} */
export function badge(job) {
  const { state, word } = stateOf(job);
  return h("span", { class: "badge", "data-state": state }, word);
}
