/** The plan in force, its reasons and estimates, and the plans before it. */

import { h, s } from "../dom.js";
import { clock, count, duration, money, percent, short, UNKNOWN } from "../format.js";

// docs/howto/planning.md explains this in detail.
const BINDS = {
  deadline: "the deadline: one more spot worker would make the job late",
  workers: "the number of workers: all are on spot",
  cost: "the cost: one more spot worker would lengthen the job by more than it saves",
  price: "the price: spot costs as much as on-demand",
  availability: "availability: spot machines are never available",
  infeasible: "even on-demand machines alone would miss the deadline",
};

/** The plan in force. @param {object} provisioning @returns {Array<Node>} */
export function planInForce(provisioning) {
  const plan = provisioning.plan;
  if (plan === null) return [h("p", { class: "quiet" }, "The provisioner has made no plan yet.")];
  return [
    h(
      "p",
      { class: "lead" },
      h("strong", {}, mix(plan)),
      h("span", { class: "quiet" }, ` plan ${plan.number}, ${plan.policy}, since ${clock(plan.at_s)}`),
    ),
    split(plan),
    h("p", { class: "reason" }, plan.reason),
    h("dl", { class: "facts" }, facts(plan)),
  ];
}

/** Machines of a plan in words. @param {object} plan @returns {string} */
export function mix(plan) {
  return `${count(plan.spot)} on spot, ${count(plan.on_demand)} on demand`;
}

function split(plan) {
  const whole = plan.spot + plan.on_demand || 1;
  const wide = (plan.on_demand / whole) * 100;
  return s(
    "svg",
    { class: "split", viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { class: "on-demand", x: 0, y: 0, width: wide, height: 4 }),
    s("rect", { class: "spot", x: wide, y: 1, width: 100 - wide, height: 2 }),
  );
}

function facts(plan) {
  const pairs = [
    ["Decided because", plan.why],
    ["Limited by", BINDS[plan.binding] ?? plan.binding],
    ["Meets the deadline", plan.feasible ? "yes" : "no"],
    ["Left to do", `${count(plan.updates_left)} updates${left(plan.deadline_left_s)}`],
    ["Expected", `${money(plan.expected_cost_usd)} and ${duration(plan.expected_runtime_s)} more`],
    ["On-demand only", `${money(plan.on_demand_only_usd)} more`],
    ["Whole job", `${money(plan.predicted_usd)} predicted`],
    ["Stability ratio", short(plan.stability)],
  ];
  return pairs.filter(([, text]) => text).map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text)));
}

/** Slots and prices by pool at the time of the decision. @param {object} plan @returns {Array<Node>} */
export function pools(plan) {
  const names = [...new Set([...Object.keys(plan.usd_per_hour), ...Object.keys(plan.places)])];
  const rows = names.map((pool) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, pool === "none" ? "without a machine" : pool),
      h("td", { class: "number" }, count(plan.places[pool] ?? 0)),
      h("td", { class: "number" }, pool in plan.usd_per_hour ? `${money(plan.usd_per_hour[pool])}/h` : UNKNOWN),
    ),
  );
  const head = ["Pool", "Slots", "Price"].map((name, at) => h("th", { scope: "col", class: at > 0 ? "number" : null }, name));
  return [h("table", { class: "pools" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows))];
}

function left(deadlineLeftS) {
  return deadlineLeftS === null ? "" : `, ${duration(deadlineLeftS)} to the deadline`;
}

const NAMES = {
  arrivals_per_s: "Arrivals, records/s",
  gradient_s: "Time of a gradient",
  update_s: "Time of an update",
};

function nameOf(key) {
  const [head, pool] = key.split(/\.(.*)/s);
  const words = NAMES[head] ?? head.replace(/_usd_per_hour$|_per_s$|_s$/, "").replaceAll("_", " ");
  const first = words.charAt(0).toUpperCase() + words.slice(1);
  return pool ? `${first}, ${pool}` : first;
}

function valueOf(key, value) {
  const head = key.split(".")[0];
  if (head === "availability") return percent(value);
  if (head.endsWith("_usd_per_hour")) return `${money(value)}/h`;
  if (head.endsWith("_s") && !head.endsWith("_per_s")) return value < 1 ? `${short(value * 1000)} ms` : duration(value);
  return short(value);
}

/** Estimates with their 90 % intervals. @returns {Array<Node>} */
export function estimates(believed) {
  const keys = Object.keys(believed).sort();
  if (keys.length === 0) return [h("p", { class: "quiet" }, "No measurements yet.")];
  const rows = keys.map((key) => {
    const { value, low, high } = believed[key];
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, nameOf(key)),
      h("td", { class: "number" }, valueOf(key, value)),
      h("td", { class: "interval" }, interval(value, low, high)),
      h("td", { class: "number quiet" }, `${valueOf(key, low)} to ${valueOf(key, high)}`),
    );
  });
  return [
    h(
      "table",
      { class: "estimates" },
      h("caption", { class: "hidden" }, "Estimates with 90 % intervals"),
      h("thead", { class: "hidden" }, h("tr", {}, ["What", "Value", "", "90 %"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows),
    ),
  ];
}

// Draw an interval on a scale centered on the value, a quarter wider than the farther end.
function interval(value, low, high) {
  const reach = Math.max(value - low, high - value, Math.abs(value) * 0.05, 1e-12) * 1.25;
  const place = (at) => 50 + ((at - value) / reach) * 50;
  return s(
    "svg",
    { viewBox: "0 0 100 10", "aria-hidden": "true", preserveAspectRatio: "none" },
    s("line", { class: "whole", x1: 0, x2: 100, y1: 5, y2: 5 }),
    s("line", { class: "range", x1: place(low), x2: place(high), y1: 5, y2: 5 }),
    s("line", { class: "value", x1: 50, x2: 50, y1: 1, y2: 9 }),
  );
}

/** Earlier plans, newest first. @param {Array<object>} plans @returns {Array<Node>} */
export function history(plans) {
  if (plans.length === 0) return [h("p", { class: "quiet" }, "No plans yet.")];
  return [
    h(
      "ol",
      { class: "plans", reversed: true },
      plans.map((plan) =>
        h(
          "li",
          { "data-feasible": String(plan.feasible) },
          h(
            "div",
            { class: "head" },
            h("span", { class: "nth" }, String(plan.number)),
            h("time", {}, clock(plan.at_s)),
            h("strong", {}, mix(plan)),
            h("span", { class: "quiet" }, `${money(plan.predicted_usd)} predicted`),
          ),
          h("p", {}, h("span", { class: "why" }, plan.why), " ", plan.reason),
          plan.feasible ? null : h("p", { class: "warned" }, "Not feasible: the deadline cannot be met."),
          plan.warning ? h("p", { class: "warned" }, plan.warning) : null,
        ),
      ),
    ),
  ];
}
