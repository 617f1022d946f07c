/** Actions on a job: pause, resume, change, stop, delete, and downloads for everybody. */

import { ask, jobPath, send } from "../api.js";
import { copy, h, say, show } from "../dom.js";
import { clock, count } from "../format.js";

const DOES = {
  pause: { wanted: "paused", done: "Paused." },
  resume: { wanted: "running", done: "Resumed." },
  stop: { wanted: "stopped", done: "Stopped." },
};
const SETTINGS = ["group_size", "batch_size", "learning_rate"];

/**
 * Bar of actions of a job.
 * @param {import("../store.js").JobStore} store
 * @param {boolean} operator true if changes are offered
 */
export function actionBar(store, operator) {
  const bar = copy("actions");
  const path = jobPath(store.name);

  async function tried(work, done) {
    say(bar.said, "");
    bar.root.inert = true;
    try {
      await work();
      say(bar.said, done);
      store.refresh("job");
    } catch (refusal) {
      say(bar.said, refusal.message);
    } finally {
      bar.root.inert = false;
    }
  }

  function want(name) {
    const { wanted, done } = DOES[name];
    return tried(() => send("PATCH", path, { wanted }), done);
  }

  bar.pause.addEventListener("click", () => want("pause"));
  bar.resume.addEventListener("click", () => want("resume"));
  bar.stop.addEventListener("click", () => bar.stopping.showModal());
  bar.stopNo.addEventListener("click", () => bar.stopping.close());
  bar.stopYes.addEventListener("click", () => {
    bar.stopping.close();
    want("stop");
  });
  bar.remove.addEventListener("click", () => bar.removing.showModal());
  bar.removeNo.addEventListener("click", () => bar.removing.close());
  bar.removeYes.addEventListener("click", () => {
    bar.removing.close();
    tried(async () => {
      await send("DELETE", path);
      // The job's page has nothing to show any more.
      location.hash = "#/";
    }, "");
  });
  bar.change.addEventListener("click", () => {
    const { spec } = store.job;
    const now = [spec.group_size, spec.batch_size, spec.optimizer.learning_rate];
    SETTINGS.forEach((name, place) => (bar[name].value = bar[name].defaultValue = now[place]));
    bar.reason.value = "";
    // The change applies to the revision that the operator sees.
    bar.changing.revision = store.job.revision;
    bar.changing.showModal();
  });
  bar.changeNo.addEventListener("click", () => bar.changing.close());
  bar.form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = SETTINGS.filter((name) => bar[name].value !== bar[name].defaultValue);
    const patch = Object.fromEntries(given.map((name) => [name, bar[name].valueAsNumber]));
    const { revision } = bar.changing;
    bar.changing.close();
    if (given.length > 0) tried(() => send("PATCH", path, { ...patch, reason: bar.reason.value, revision }), "Changed.");
  });
  for (const link of [bar.newest, bar.best]) {
    link.href = `${path}/model?version=${link.dataset.version}`;
    link.addEventListener("click", async (event) => {
      event.preventDefault();
      // A browser does not report why a download failed.
      await tried(() => send("HEAD", link.getAttribute("href")), "");
      if (bar.said.textContent === "") location.assign(link.href);
    });
  }

  return {
    root: bar.root,
    update(job) {
      const [runs, over] = [job.wanted === "running", job.wanted === "stopped"];
      bar.pause.hidden = !operator || !runs;
      bar.resume.hidden = !operator || runs;
      bar.stop.hidden = !operator || over;
      bar.remove.hidden = !operator || !over;
      bar.change.hidden = !operator;
    },
  };
}

/**
 * Dead letters by reason, requested when the section is opened, because the service reads whole topics for them.
 * @param {HTMLDetailsElement} details
 * @param {HTMLElement} place element to list them in
 * @param {string} job
 */
export function deadLetters(details, place, job) {
  details.addEventListener("toggle", async () => {
    if (!details.open) return;
    try {
      const found = await ask(jobPath(job, "/dead-letters"));
      show(place, found, () => deadLettersTable(found));
    } catch (refusal) {
      show(place, refusal.message, () => h("p", { class: "quiet" }, refusal.message));
    }
  });
}

function deadLettersTable({ reasons, others }) {
  if (reasons.length === 0) return [h("p", { class: "quiet" }, `No dead letters as of ${clock(Date.now() / 1000)}.`)];
  const columns = ["Stream", "Records", "Batches", "Replayed", "Reason", "Newest"];
  const numbers = new Set(["Records", "Batches", "Replayed"]);
  const rows = reasons.map((each) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, each.stream),
      ["records", "batches", "replayed"].map((name) => h("td", { class: "number" }, count(each[name]))),
      h("td", {}, each.reason),
      h("td", { class: "quiet" }, each.newest.map(address).join(", ")),
    ),
  );
  const head = columns.map((name) => h("th", { scope: "col", class: numbers.has(name) ? "number" : null }, name));
  return [
    h("table", { class: "dead-letters" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)),
    others > 0 ? h("p", { class: "quiet" }, `and ${count(others)} for rarer reasons`) : null,
  ];
}

function address({ partition, offset, end }) {
  return `${partition}@${offset}${end > offset + 1 ? `:${end}` : ""}`;
}
