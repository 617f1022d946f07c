/** List of jobs with state, cost and links; the service sorts, filters and pages it. */

import { ask, me } from "../api.js";
import { copy, h, say, show } from "../dom.js";
import { atLeast, count, money, percent, short } from "../format.js";
import { awaitsTurn, badge, banners, noJobs, refused } from "./notices.js";

const EVERY_S = 5;
// Jobs per page.
const PAGE = 20;
// Time after the last key until the filter is sent.
const TYPED_MS = 250;
// Query of the last visit. `before` holds the `after` of each page before this one.
const asked = { sort: "state", state: "", text: "", after: "", before: [] };

/**
 * Show the list until closed.
 * @param {HTMLElement} main
 * @param {(state: string) => void} state called with the state of the connection
 * @returns {() => void} closes the view
 */
export function jobsView(main, state) {
  const rows = new Map();
  const parts = copy("jobs");
  const { root, title, submit, filter, sort, states, problem, unreadable, table, head, body, pages, notice } = parts;
  main.append(root);
  filter.value = asked.text;
  let closing = new AbortController();
  let timer = 0;
  let next = null;

  async function turn() {
    closing.abort();
    clearTimeout(timer);
    const { signal } = (closing = new AbortController());
    let againS = EVERY_S;
    try {
      const { sort: by, state: only, text, after } = asked;
      const query = new URLSearchParams({ sort: by, limit: PAGE, text, after, ...(only ? { state: only } : {}) });
      const [page, { role }] = await Promise.all([ask(`/v1/jobs?${query}`, signal), me()]);
      if (signal.aborted) return;
      submit.hidden = role !== "operator";
      list(page, role === "operator");
      state("live");
      problem.hidden = true;
    } catch (refusal) {
      if (refusal.name === "AbortError") return;
      // The last job of the previous page was deleted.
      if (refusal.kind === "wrong" && asked.after) return first();
      if (failed(refusal)) return;
      againS = Math.max(againS, refusal.againS ?? 0);
    }
    timer = setTimeout(turn, (document.hidden ? 12 : 1) * againS * 1000);
  }

  function failed(refusal) {
    const over = refusal.kind === "key" || refusal.kind === "role";
    state(over ? "stopped" : "disconnected");
    if (over || rows.size === 0) {
      title.hidden = states.hidden = table.hidden = problem.hidden = true;
      show(notice, refusal.message, () => refused(refusal));
    } else {
      say(problem, refusal.message);
      problem.hidden = false;
    }
    return over;
  }

  function list(page, operator) {
    const all = Object.values(page.states).reduce((sum, each) => sum + each, 0);
    title.hidden = states.hidden = table.hidden = all === 0;
    show(notice, [all, operator], () => (all === 0 ? noJobs(operator) : []));
    show(unreadable, page.unreadable, () => banners(page.unreadable.map(broken)));
    show(states, [page.states, asked.state], () => chips(page.states));
    for (const [id, row] of rows) {
      if (page.jobs.some((job) => job.id === id)) continue;
      row.root.remove();
      rows.delete(id);
    }
    page.jobs.forEach((job, place) => {
      if (!rows.has(job.id)) rows.set(job.id, newRow(job));
      const row = rows.get(job.id);
      update(row, job);
      if (body.children[place] !== row.root) body.insertBefore(row.root, body.children[place] ?? null);
    });
    table.toggleAttribute("data-unrented", !page.jobs.some((job) => job.provisioned));
    const from = asked.before.length * PAGE;
    next = page.next;
    pages.hidden = page.total <= PAGE && from === 0;
    say(parts.where, `${count(from + 1)} to ${count(from + page.jobs.length)} of ${count(page.total)}`);
    parts.back.disabled = from === 0;
    parts.on.disabled = next === null;
    for (const button of head.querySelectorAll("button")) {
      const [by, down] = sorted();
      const cell = button.parentElement;
      if (button.dataset.sort === by) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    sort.value = sorted()[0];
  }

  function chips(found) {
    const chip = (name, text) =>
      h("button", { type: "button", class: "badge", "data-state": name.replaceAll(" ", "-"), "data-only": name, "aria-pressed": String(asked.state === name) }, text);
    return Object.entries(found)
      .sort(([one], [other]) => (one < other ? -1 : 1))
      .map(([name, jobs]) => chip(name, `${count(jobs)} ${name}`));
  }

  function first(change = {}) {
    Object.assign(asked, change, { after: "", before: [] });
    turn();
  }

  filter.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => first({ text: filter.value.trim() }), TYPED_MS);
  });
  states.addEventListener("click", ({ target }) => {
    const only = target.closest("button")?.dataset.only;
    if (only !== undefined) first({ state: asked.state === only ? "" : only });
  });
  const choose = (by) => {
    const [before, down] = sorted();
    // Numbers are sorted with the largest first.
    const falls = before === by ? !down : by !== "id" && by !== "state";
    first({ sort: (falls ? "-" : "") + by });
  };
  head.addEventListener("click", ({ target }) => {
    const by = target.closest("button")?.dataset.sort;
    if (by !== undefined) choose(by);
  });
  sort.addEventListener("change", () => choose(sort.value));
  parts.on.addEventListener("click", () => {
    asked.before.push(asked.after);
    asked.after = next ?? "";
    turn();
  });
  parts.back.addEventListener("click", () => {
    asked.after = asked.before.pop() ?? "";
    turn();
  });

  turn();
  return () => {
    closing.abort();
    clearTimeout(timer);
  };
}

/** Return the field that the list is sorted by, and true if the largest comes first. */
function sorted() {
  return [asked.sort.replace("-", ""), asked.sort.startsWith("-")];
}

function broken({ id, offset, reason }) {
  return { grave: true, title: `The record of ${id} at offset ${offset} of doll.jobs is unreadable:`, text: reason };
}

function newRow(job) {
  const row = copy("jobs-row");
  row.link.href = `#/jobs/${encodeURIComponent(job.id)}`;
  row.link.title = `${job.task} · ${job.streams.join(", ")}`;
  say(row.link, job.id);
  row.root.addEventListener("click", (event) => {
    if (!event.target.closest("a") && String(getSelection()) === "") row.link.click();
  });
  return row;
}

function update(row, job) {
  const shown = job.state === "running" ? "" : job.why;
  show(row.state, [job.state, awaitsTurn(job)], () => badge(job));
  say(row.why, shown);
  row.why.title = shown;
  say(row.version, count(job.version));
  say(row.loss, short(job.loss));
  say(row.accuracy, percent(job.accuracy));
  say(row.rate, short(job.updates_per_s));
  say(row.lag, count(job.lag));
  for (const name of ["skipped", "quarantined", "expired", "lost"]) say(row[name], atLeast(job[name], job.whole));
  say(row.workers, count(job.workers));
  say(row.cost, job.provisioned ? money(job.spent_usd) : "");
}
