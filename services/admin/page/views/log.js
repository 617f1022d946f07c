/** Recent events, newest first: from answers, and from events that no answer has. */

import { h } from "../dom.js";
import { clock, count, short } from "../format.js";
import { mix } from "./plan.js";

const MOST = 120;
const ENDS = {
  preempted: "was preempted",
  released: "was released",
  failed: "failed",
  refused: "could not be rented: no capacity",
  lost: "disappeared for an unknown reason, or somebody else stopped or ended it",
};

/** States that appear among the job's changes, with who made them. */
const IN_CHANGES = new Set(["held", "paused", "stopped", "finished"]);

/**
 * All entries of the log.
 * @param {import("../store.js").JobStore} store
 * @returns {Array<{atS: number, kind: string, text: string}>} newest first
 */
export function happened(store) {
  const entries = [
    ...(store.job?.changes ?? []).map(changed),
    ...(store.provisioning?.plans ?? []).map(planned),
    ...(store.curves?.lives ?? []).flatMap(lived),
    ...(store.curves?.evaluation?.drifts ?? []).map(drifted),
    ...(store.curves?.switches ?? []).map(switched),
    ...store.events.filter(({ name, data }) => name !== "job" || !IN_CHANGES.has(data.state)).map(received),
  ];
  return entries.sort((one, other) => other.atS - one.atS).slice(0, MOST);
}

function changed({ at_s: atS, action, by, role, changed: settings, reason }) {
  const what = Object.entries(settings).map(([name, value]) => `${name.replaceAll("_", " ")} is ${setting(value)}`);
  const who = by === role ? by : `${by} (${role})`;
  const details = [what.join(", "), reason].filter((part) => part !== "").join(". ");
  return { atS, kind: "job", text: `${action[0].toUpperCase()}${action.slice(1)} by ${who}${details ? `: ${details}` : "."}` };
}

/** A value in words: a block by its fields, a list by its numbers or its length. */
function setting(value) {
  if (value === null) return "none";
  if (typeof value === "number") return short(value);
  if (Array.isArray(value)) return value.every(Number.isFinite) ? value.map(short).join(" to ") : count(value.length);
  if (typeof value !== "object") return String(value);
  return Object.entries(value)
    .map(([name, each]) => (name === "mode" ? each : `${name.replaceAll("_", " ")} ${setting(each)}`))
    .join(", ");
}

function planned(plan) {
  return { atS: plan.at_s, kind: "plan", text: `Plan ${plan.number}: ${mix(plan)}. ${plan.why}` };
}

function drifted({ stream, version, at_s: atS, before, after }) {
  return { atS, kind: "drift", text: `${stream} drifts: errors rose from ${short(before)} to ${short(after)}, at version ${count(version)}.` };
}

function switched({ version, at_s: atS, mode }) {
  return { atS, kind: "job", text: `Updates are ${mode} from version ${count(version)} on.` };
}

function lived(life) {
  const who = `${life.worker} in slot ${life.slot}, ${life.pool},`;
  const entries = life.cause === "refused" ? [] : [{ atS: life.from_s, kind: "start", text: `${who} started.` }];
  if (life.to_s !== null) {
    entries.push({ atS: life.to_s, kind: life.cause ?? "released", text: `${who} ${ENDS[life.cause] ?? "ended"}.` });
  }
  return entries;
}

function received({ name, data, atS }) {
  if (name === "job") {
    return { atS, kind: "job", text: `The job is ${data.state}${data.why ? `: ${data.why}` : ""}` };
  }
  const what = data.status === "failed" ? `has failed: ${data.reason}` : `is ${data.status}.`;
  return { atS: data.at_s ?? atS, kind: "member", text: `The worker ${data.worker} ${what}` };
}

/** The log as a list. @returns {Array<Node>} */
export function logList(entries) {
  return [
    h(
      "ol",
      { class: "log" },
      entries.map(({ atS, kind, text }) =>
        h("li", { "data-kind": kind }, h("time", {}, clock(atS)), h("span", {}, text)),
      ),
    ),
  ];
}
