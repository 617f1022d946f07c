/** The list of jobs: how each is, what it costs, and the way to it. */

import { ask, jobPath } from "../api.js";
import { copy, h, say, show } from "../dom.js";
import { atLeast, count, money, percent, short } from "../format.js";
import { badge, banners, noJobs, refused } from "./notices.js";

const EVERY_S = 5;
const JOBS_PER_S = 8; // asked about by one page, however many there are
const AT_ONCE = 4;

/**
 * Show the list until closed.
 * @param {HTMLElement} main
 * @param {(state: string) => void} state told how the connection is
 * @returns {() => void} closes the view
 */
export function jobsView(main, state) {
  const closing = new AbortController();
  const rows = new Map();
  const { root, title, trouble, unreadable, table, body, notice } = copy("jobs");
  main.append(root);
  let timer = 0;

  async function turn() {
    let againS = EVERY_S;
    try {
      const [jobs, records] = await all(closing.signal);
      list(jobs);
      show(unreadable, records, () => banners(records.map(broken)));
      state("live");
      trouble.hidden = true;
      await details(jobs);
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
    show(notice, jobs.length === 0, () => (jobs.length === 0 ? noJobs() : []));
    for (const [id, row] of rows) {
      if (jobs.some((job) => job.id === id)) continue;
      row.root.remove();
      rows.delete(id);
    }
    jobs.forEach((job, place) => {
      if (!rows.has(job.id)) rows.set(job.id, newRow(job));
      const row = rows.get(job.id);
      tellState(row, job);
      if (body.children[place] !== row.root) body.insertBefore(row.root, body.children[place] ?? null);
    });
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
  const row = copy("jobs-row");
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
  const progress = job.progress;
  const cost = provisioning?.cost ?? null;
  tellState(row, job);
  say(row.version, count(progress.version));
  say(row.loss, short(progress.loss));
  say(row.accuracy, percent(progress.metrics.accuracy ?? null));
  say(row.rate, short(progress.updates_per_s));
  say(row.lag, count(progress.lag));
  for (const name of ["skipped", "quarantined", "expired", "lost"]) say(row[name], atLeast(progress[name], progress.whole));
  say(row.workers, count(progress.workers));
  say(row.cost, money(cost?.spent_usd ?? null));
  say(row.ratio, percent(cost?.ratio_to_on_demand ?? null));
}
