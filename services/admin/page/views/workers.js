/** Table of workers. */

import { h } from "../dom.js";
import { clock, short, UNKNOWN } from "../format.js";
import { KINDS } from "../timeline.js";

const WORDS = { alive: "alive", leaving: "leaving", silent: "no heartbeat", unknown: "unknown" };

/** Number of workers in each state. @param {Array<object>} workers @returns {string} */
export function inWords(workers) {
  if (workers.length === 0) return "No workers";
  const counts = Object.keys(WORDS)
    .map((status) => [status, workers.filter((worker) => worker.status === status).length])
    .filter(([, number]) => number > 0);
  return `${workers.length} worker${workers.length === 1 ? "" : "s"}: ${counts
    .map(([status, number]) => `${number} ${WORDS[status]}`)
    .join(", ")}`;
}

/** The table. @param {Array<object>} workers @returns {Array<Node>} */
export function workersTable(workers) {
  if (workers.length === 0) {
    return [
      h("p", { class: "quiet" }, "This job has no workers. Start one on a machine of yours with ", h("code", {}, "doll worker"), "."),
    ];
  }
  const names = ["Worker", "State", "Kind", "Slot", "Pool", "Machine", "Device", "Since", "Records, last 10 s"];
  const rows = [...workers].sort(bySlot).map((worker) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, worker.name),
      h("td", { title: worker.left_out ?? "" }, h("span", { class: "status", "data-status": worker.status }, WORDS[worker.status]), part(worker)),
      h("td", {}, h("span", { class: "kind", "data-kind": worker.kind }, KINDS[worker.kind].words)),
      h("td", { class: "number" }, worker.slot ?? UNKNOWN),
      h("td", {}, worker.pool ?? UNKNOWN),
      h("td", {}, worker.machine ?? UNKNOWN),
      h("td", { title: driver(worker.device) }, device(worker.device)),
      h("td", {}, clock(worker.since_s)),
      h("td", { class: "number" }, short(worker.samples)),
    ),
  );
  const head = h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name))));
  const table = h("table", { class: "workers" }, head, h("tbody", {}, rows));
  return [h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Workers" }, table)];
}

/** Name and memory of a device. @param {object | null} found @returns {string} */
function device(found) {
  if (found == null) return UNKNOWN;
  return found.memory_bytes ? `${found.name}, ${short(found.memory_bytes / 2 ** 30)} GiB` : found.name;
}

/** Driver and capability of a GPU. @param {object | null} found @returns {string} */
function driver(found) {
  if (found?.kind !== "cuda") return "";
  return `compute capability ${found.capability}, driver ${found.driver || "unknown"}`;
}

/** Role in the group that adds gradients up, if there is one. @param {object} worker @returns {string} */
function part(worker) {
  if (worker.member == null || worker.status !== "alive") return "";
  if (worker.member) return ", member";
  return worker.left_out == null ? ", joins the group" : ", left out of the group";
}

function bySlot(one, other) {
  return (one.slot ?? Infinity) - (other.slot ?? Infinity) || one.name.localeCompare(other.name);
}
