/** The list of jobs: how each is, what it costs, and the way to it; sorted and filtered as one likes. */

import { ask, jobPath, me } from "../api.js";
import { copy, h, say, show } from "../dom.js";
import { atLeast, count, money, percent, short } from "../format.js";
import { badge, banners, noJobs, refused } from "./notices.js";

const EVERY_S = 5;
const JOBS_PER_S = 8; // asked about by one page, however many there are
const AT_ONCE = 4;
const STATES = [ // in the order of the list
  ...["running", "degraded", "waiting for workers", "waiting for a coordinator", "held"],
  ...["waiting for records", "drained", "paused", "finished", "stopped"],
];
let order = { by: "state", down: false }; // as it was left
let wanted = "";

/**
 * Show the list until closed.
 * @param {HTMLElement} main
 * @param {(state: string) => void} state told how the connection is
 * @returns {() => void} closes the view
 */
export function jobsView(main, state) {
  const closing = new AbortController();
  const rows = new Map();
  const { root, title, submit, filter, trouble, unreadable, table, head, body, notice } = copy("jobs");
  main.append(root);
  filter.value = wanted;
  let timer = 0;
  let operator = false;

  async function turn() {
    let againS = EVERY_S;
    try {
      const [jobs, records] = await all(closing.signal);
      operator = (await me()).role === "operator";
      submit.hidden = !operator;
      list(jobs);
      show(unreadable, records, () => banners(records.map(broken)));
      state("live");
      trouble.hidden = true;
      await details(jobs);
      arrange();
      againS = Math.max(EVERY_S, jobs.length / JOBS_PER_S);
    } catch (refusal) {
      if (refusal.name === "AbortError") return;
      if (failed(refusal)) return;
      againS = Math.max(againS, refusal.againS ?? 0);
    }
    timer = setTimeout(turn, (document.hidden ? 12 : 1) * againS * 1000);
  }

  function failed(refusal) {
    const over = refusal.kind === "key" || refusal.kind === "role";
    state(over ? "stopped" : "disconnected");
    if (over || rows.size === 0) {
      title.hidden = table.hidden = trouble.hidden = true;
      show(notice, refusal.message, () => refused(refusal));
    } else {
      say(trouble, refusal.message);
      trouble.hidden = false;
    }
    return over;
  }

  function list(jobs) {
    title.hidden = table.hidden = jobs.length === 0;
    show(notice, jobs.length === 0, () => (jobs.length === 0 ? noJobs(operator) : []));
    for (const [id, row] of rows) {
      if (jobs.some((job) => job.id === id)) continue;
      row.root.remove();
      rows.delete(id);
    }
    for (const job of jobs) {
      if (!rows.has(job.id)) rows.set(job.id, newRow(job));
      const row = rows.get(job.id);
      row.values.state = STATES.indexOf(job.state);
      row.text = [job.id, job.state, job.task, ...job.streams].join(" ").toLowerCase();
      tellState(row, job);
    }
    table.toggleAttribute("data-unrented", !jobs.some((job) => job.provisioned));
    arrange();
  }

  // By what was chosen, then by name; what is not known comes last either way.
  function arrange() {
    const { by, down } = order;
    const sorted = [...rows.values()].sort((one, other) => {
      const [a, b] = [one.values[by] ?? null, other.values[by] ?? null];
      const between = a === null || b === null ? (a === null) - (b === null) : (down ? -1 : 1) * compared(a, b);
      return between || compared(one.values.id, other.values.id);
    });
    sorted.forEach(({ root: row, text }, place) => {
      row.hidden = !text.includes(wanted);
      if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
    });
    for (const button of head.querySelectorAll("button")) {
      const cell = button.parentElement;
      if (button.dataset.sort === by) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
  }

  async function details(jobs) {
    const left = [...jobs];
    const work = async () => {
      for (let job = left.shift(); job !== undefined; job = left.shift()) await detail(job);
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
  }

  async function detail(summary) {
    const [job, provisioning] = await Promise.all([
      ask(jobPath(summary.id), closing.signal).catch(none), // deleted meanwhile: the next turn knows
      summary.provisioned ? ask(jobPath(summary.id, "/provisioning?limit=1"), closing.signal).catch(none) : null,
    ]);
    const row = rows.get(summary.id);
    if (job !== null && row !== undefined) tell(row, job, provisioning);
  }

  filter.addEventListener("input", () => {
    wanted = filter.value.trim().toLowerCase();
    arrange();
  });
  head.addEventListener("click", ({ target }) => {
    const by = target.closest("button")?.dataset.sort;
    if (by === undefined) return;
    const first = by !== "id" && by !== "state"; // of numbers, the largest
    order = { by, down: order.by === by ? !order.down : first };
    arrange();
  });

  turn();
  return () => {
    closing.abort();
    clearTimeout(timer);
  };
}

function none(refusal) {
  if (refusal.kind === "missing") return null;
  throw refusal;
}

async function all(signal) {
  const jobs = [];
  const unreadable = [];
  let after = null;
  do {
    const page = await ask(after === null ? "/v1/jobs" : `/v1/jobs?after=${encodeURIComponent(after)}`, signal);
    jobs.push(...page.jobs);
    unreadable.push(...page.unreadable);
    after = page.next;
  } while (after !== null);
  return [jobs, unreadable];
}

function broken({ id, offset, reason }) {
  return { grave: true, title: `The record of ${id} at offset ${offset} of doll.jobs is unreadable:`, text: reason };
}

function newRow(job) {
  const row = { ...copy("jobs-row"), values: { id: job.id }, text: "" };
  row.link.href = `#/jobs/${encodeURIComponent(job.id)}`;
  say(row.link, job.id);
  say(row.under, `${job.task} · ${streams(job.streams)}`);
  row.root.addEventListener("click", (event) => {
    if (!event.target.closest("a") && String(getSelection()) === "") row.link.click();
  });
  return row;
}

function streams(names) {
  return names.length <= 3 ? names.join(", ") : `${names.slice(0, 2).join(", ")} and ${names.length - 2} more`;
}

function tellState(row, { state, why }) {
  const told = state === "running" ? "" : why;
  show(row.state, [state, told], () => [badge({ state }), told ? h("span", { class: "under why" }, told) : null]);
}

function tell(row, job, provisioning) {
  const { progress } = job;
  const cost = provisioning?.cost ?? null;
  const counts = ["skipped", "quarantined", "expired", "lost"];
  Object.assign(row.values, {
    ...{ state: STATES.indexOf(job.state), version: progress.version, loss: progress.loss, lag: progress.lag },
    ...{ accuracy: progress.metrics.accuracy ?? null, rate: progress.updates_per_s, workers: progress.workers },
    ...{ cost: cost?.spent_usd ?? null, ratio: cost?.ratio_to_on_demand ?? null },
    ...Object.fromEntries(counts.map((name) => [name, progress[name]])),
  });
  const { version, loss, accuracy, rate, lag, workers, ratio } = row.values;
  tellState(row, job);
  say(row.version, count(version));
  say(row.loss, short(loss));
  say(row.accuracy, percent(accuracy));
  say(row.rate, short(rate));
  say(row.lag, count(lag));
  for (const name of counts) say(row[name], atLeast(progress[name], progress.whole));
  say(row.workers, count(workers));
  say(row.cost, job.spec.provisioning ? money(row.values.cost) : "");
  say(row.ratio, job.spec.provisioning ? percent(ratio) : "");
}

function compared(one, other) {
  return one < other ? -1 : Number(one > other);
}
