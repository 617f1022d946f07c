/** One job: assembles the parts of its page and keeps them up to date. */

import { jobPath, me } from "../api.js";
import { Charts } from "../charts.js";
import { copy, h, say, show } from "../dom.js";
import * as figures from "../figures.js";
import { clock, count, duration, short, zone } from "../format.js";
import { follow } from "../live.js";
import { JobStore } from "../store.js";
import { series, colours, onScheme } from "../theme.js";
import { MOST_LANES, tally, timeline } from "../timeline.js";
import { actionBar, deadLetters } from "./actions.js";
import { Headline, mainMetric } from "./headline.js";
import { legend, marksLegend, metricLegend } from "./legend.js";
import { happened, logList } from "./log.js";
import { awaitsTurn, badge, banners, noJob, refused, warnings } from "./notices.js";
import { estimates, history, planInForce, pools } from "./plan.js";
import { inWords, workersTable } from "./workers.js";

/**
 * Show a job until closed.
 * @param {HTMLElement} main
 * @param {string} name
 * @param {(state: string) => void} state called with the state of the connection
 * @returns {() => void} closes the view
 */
export function jobView(main, name, state) {
  const view = copy("job");
  const headline = new Headline(view.tiles);
  const store = new JobStore(name, changed, failed);
  const charts = new Charts(whole, (zoomed) => view.ranges.toggleAttribute("data-zoomed", zoomed));
  let due = 0;
  // Ends the event stream; null until the job is known.
  let shut = null;
  let stopped = false;
  let stream = "connecting";
  // Bar of actions; null until the viewer's role is known.
  let bar = null;
  // True if the last request for the job failed.
  let troubled = false;

  function whole() {
    const { update_at_s: at, cost_at_s: cost, lives = [], evaluation } = store.curves ?? {};
    const now = store.nowS || Date.now() / 1000;
    const lasts = [at?.at(-1), cost?.at(-1), evaluation?.at_s.at(-1), store.newest?.at_s, ...lives.map((life) => life.to_s ?? now)];
    const toS = over(store) ? Math.max(...lasts.filter(Number.isFinite), -Infinity) : now;
    const firsts = [at?.[0], cost?.[0], ...lives.map((life) => life.from_s)];
    const endS = Number.isFinite(toS) ? toS : now;
    return { fromS: Math.min(...firsts.filter(Number.isFinite), endS - 10), toS: endS };
  }

  function changed(part) {
    if (part === "job") {
      troubled = false;
      shut ??= listen();
      pulse();
    }
    if (part === "job" && !main.contains(view.root)) main.replaceChildren(view.root);
    if (part === "job") say(view.problem, "");
    // Render at once, but only once per frame.
    if (due === 0) due = requestAnimationFrame(render);
    if (part !== "job" && part !== "streams" && part !== "member") charts.touch();
  }

  function failed(refusal, part) {
    if (refusal.kind === "key" || refusal.kind === "role" || (refusal.kind === "missing" && part === "job")) {
      stop();
      main.replaceChildren(refusal.kind === "missing" ? noJob(name) : refused(refusal));
    } else if (!main.contains(view.root)) {
      main.replaceChildren(refused(refusal));
    } else {
      say(view.problem, refusal.message);
    }
    troubled ||= part === "job";
    pulse();
  }

  function pulse() {
    if (!stopped) state(troubled ? "disconnected" : stream);
  }

  function printed() {
    view.workersBox.open = true;
  }

  function looked() {
    // The network failed or recovered.
    store.refresh("job");
  }

  function render() {
    due = 0;
    if (store.job === null) return;
    headline.update(store);
    bar?.update(store.job);
    const { job, curves, provisioning } = store;
    const progress = job.progress;
    show(view.badge, [job.state, awaitsTurn(job)], () => badge(job));
    show(view.detail, job.detail, () => (job.detail ? [h("summary", {}, "Traceback"), h("pre", { class: "detail" }, job.detail)] : []));
    view.detail.hidden = !job.detail;
    show(view.subtitle, [job.spec, progress.synchrony.group_size, progress.learning_rate, job.submitted_s, Math.floor(Date.now() / 60000)], () => subtitle(job));
    show(view.warnings, warnings(store), () => banners(warnings(store)));
    show(view.plan, provisioning?.plan ?? provisioning, () => (provisioning ? planInForce(provisioning) : []));
    show(view.believed, provisioning?.believed ?? null, () => (provisioning ? estimates(provisioning.believed) : []));
    show(view.pools, provisioning?.plan ?? null, () => (provisioning?.plan ? pools(provisioning.plan) : []));
    show(view.history, provisioning?.plans ?? null, () => (provisioning ? history(provisioning.plans) : []));
    for (const part of view.root.querySelectorAll("[data-rented]")) part.hidden = !job.spec.provisioning || store.absent.provisioning !== undefined;
    const workers = store.workers?.workers ?? [];
    say(view.workersTitle, store.workers?.board_away || inWords(workers));
    show(view.workers, workers, () => workersTable(workers));
    const entries = happened(store);
    show(view.log, entries, () => logList(entries));
    if (curves !== null) legends(curves, progress);
  }

  function legends(curves, progress) {
    const metric = mainMetric(progress.metrics) ?? Object.keys(curves.metrics)[0] ?? null;
    say(view.metricTitle, metric === "accuracy" || metric === null ? "Prequential accuracy" : metric);
    const counted = tally(curves.lives);
    say(
      view.machinesNote,
      `${count(counted.running)} run in ${count(counted.slots)} slots; ${count(counted.preempted)} preemptions so far` +
        (counted.slots > MOST_LANES ? `; the first ${MOST_LANES} slots are drawn` : ""),
    );
    const evaluation = curves.evaluation;
    const shown = [metric, evaluation?.test[metric]?.at(-1), evaluation?.drifts.length];
    show(view.metricKeys, shown, () => metricLegend(evaluation, metric));
    const workers = store.workers?.workers ?? [];
    const drawn = [curves.lives.map((life) => [life.kind, life.cause]), workers.map((worker) => worker.status)];
    show(view.machinesKeys, drawn, () => marksLegend(curves.lives, workers));
    const names = figures.named(curves);
    const lags = new Map((store.streams?.streams ?? []).map((one) => [one.stream, one]));
    show(view.lagKeys, [names, [...lags.values()], colours().blue], () => legend(names, lags, curves.lag.length, series(colours())));
  }

  function listen() {
    let again = false;
    return follow(jobPath(name, "/events"), {
      event: (kind, data) => store.receive(kind, data),
      state: (now) => {
        stream = now;
        pulse();
      },
      opened: () => {
        // Events during the interruption were missed.
        if (again) store.open();
        again = true;
      },
      refused: () => store.refresh("job"),
    });
  }

  function stop() {
    stopped = true;
    shut?.();
    store.close();
    charts.close();
    cancelAnimationFrame(due);
    removeEventListener("beforeprint", printed);
    removeEventListener("online", looked);
    removeEventListener("offline", looked);
    state("stopped");
  }

  const metricFigure = (palette, span, plot) => {
    const updates = store.updates();
    const metric = mainMetric(store.job?.progress.metrics) ?? Object.keys(updates.metrics)[0];
    return metric === undefined ? null : figures.metric(metric)(updates, palette, span, plot, store.known.evaluation);
  };
  charts.add(view.loss, (palette, span) => figures.loss(store.updates(), palette, span));
  charts.add(view.metric, metricFigure);
  charts.add(view.machines, (palette, span) =>
    timeline(store.known.lives, store.nowS, store.workers?.workers ?? [], store.provisioning?.plans ?? [], palette, span),
  );
  charts.add(view.rate, (palette, span) => figures.rate(store.updates(), palette, span));
  charts.add(view.lag, (palette, span) => figures.lag(store.known, palette, span));
  charts.add(view.cost, (palette, span, plot) =>
    figures.cost(store.known, future(store), palette, span, plot, charts.lastS === null && charts.zoom === null),
  );
  charts.add(view.stability, (palette, span) => figures.stability(store.known, palette, span));
  view.ranges.addEventListener("change", ({ target }) => {
    view.ranges.removeAttribute("data-zoomed");
    charts.newest(target.value === "" ? null : Number(target.value));
  });
  say(view.name, name);
  say(view.foot, `Times in ${zone}.`);
  onScheme(render);
  deadLetters(view.deadLettersBox, view.deadLetters, name);
  me().then(({ role }) => {
    bar = actionBar(store, role === "operator");
    view.bar.replaceChildren(bar.root);
    render();
  // Without a key or a service, the job is not shown either, and its request reports the reason.
  }, () => {});
  addEventListener("beforeprint", printed);
  addEventListener("online", looked);
  addEventListener("offline", looked);

  store.open();
  return stop;
}

function over(store) {
  return Boolean(store.job?.progress.done || store.job?.wanted === "stopped");
}

function future(store) {
  const ended = over(store) || store.provisioning?.settled;
  return {
    plan: ended ? null : (store.provisioning?.plan ?? null),
    deadlineS: ended ? null : (store.job?.deadline_s ?? null),
  };
}

function subtitle(job) {
  const spec = job.spec;
  const parts = [
    spec.task.name ?? spec.task.entrypoint ?? spec.task.module ?? "",
    spec.streams.length > 4 ? `${spec.streams.length} streams` : spec.streams.join(", "),
    `K = ${count(job.progress.synchrony.group_size)} batches of b = ${count(spec.batch_size)}`,
    `${spec.optimizer.name}, learning rate ${short(job.progress.learning_rate ?? spec.optimizer.learning_rate)}`,
    `submitted ${clock(job.submitted_s)}, ${duration(Date.now() / 1000 - job.submitted_s)} ago`,
  ];
  return parts.filter(Boolean).map((text) => h("span", {}, text));
}
