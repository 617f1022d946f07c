/** Line charts of a job: makes figures for `charts.js` from answers. */

import { labels, plain, upright } from "./charts.js";
import { count, money, onAxis, percent, short } from "./format.js";
import { series } from "./theme.js";

// Share of the visible points that is averaged on each side of a point.
const SMOOTHED = 0.02;

const LEAST_GAP_S = 20;
// Minimum length of a gap, relative to the 90th percentile of steps.
const GAP = 5;

// Insert a null between points that lie far apart, because the time between them is unknown.
function gapped(x, y) {
  const steps = x.slice(1).map((atS, at) => atS - x[at]);
  const usual = steps.toSorted((one, other) => one - other)[Math.floor(steps.length * 0.9)] ?? 0;
  const longest = Math.max(LEAST_GAP_S, GAP * usual);
  const gaps = steps.flatMap((stepS, at) => (stepS > longest ? [at + 1] : []));
  if (gaps.length === 0) return [x, y];
  const edges = [0, ...gaps, x.length];
  const joined = (column, between) =>
    edges.slice(1).flatMap((to, at) => [...(at > 0 ? [between(edges[at])] : []), ...column.slice(edges[at], to)]);
  return [joined(x, (at) => (x[at - 1] + x[at]) / 2), joined(y, () => null)];
}

function line(atS, values, name, colour, more = {}) {
  const { width = 2, dash = "solid", ...others } = more;
  const [x, y] = gapped(atS, values);
  return {
    type: "scatter",
    mode: "lines",
    x: x.map(onAxis),
    y,
    name: plain(name),
    line: { color: colour, width, dash },
    connectgaps: false,
    ...others,
  };
}

function ofInterest(x, columns, span) {
  // Includes one point to the left of the visible range, so that the line enters there.
  const from = Math.max(0, x.findIndex((atS) => atS >= span.fromS) - 1);
  return [x.slice(from), ...columns.map((column) => column.slice(from))];
}

// Return means over as many points before as after, so that slopes are not shifted.
function smoothed(values) {
  const sums = [0];
  const counts = [0];
  for (const value of values) {
    const there = Number.isFinite(value);
    sums.push(sums.at(-1) + (there ? value : 0));
    counts.push(counts.at(-1) + (there ? 1 : 0));
  }
  const widest = Math.round(values.length * SMOOTHED);
  return values.map((_, at) => {
    const reach = Math.min(widest, at, values.length - 1 - at);
    const [from, to] = [at - reach, at + reach + 1];
    return counts[to] > counts[from] ? (sums[to] - sums[from]) / (counts[to] - counts[from]) : null;
  });
}

const newest = (values) => values.findLast((value) => value !== null && value !== undefined) ?? null;

function noisy(x, y, name, colour, span, form) {
  const [shownX, shownY] = ofInterest(x, [y], span);
  return {
    data: [
      line(shownX, shownY, "one update", colour, { width: 1, opacity: 0.3, hovertemplate: form }),
      line(shownX, smoothed(shownY), "smoothed", colour, { width: 2.5, hovertemplate: form }),
    ],
    summary: `${name} over time, ${short(newest(y))} in the newest update`,
  };
}

/** Loss of each update. */
export function loss(curves, palette, span) {
  if (curves.at_s.length === 0) return null;
  return noisy(curves.at_s, curves.loss, "Loss", palette.blue, span, "%{y:.4g}");
}

/** A metric of each update before it was made, and of versions on the test set; shares in percent. */
export function metric(name) {
  return (curves, palette, span, plot, evaluation) => {
    const values = curves.metrics[name] ?? [];
    const test = evaluation?.test[name] ?? [];
    if (newest(values) === null && newest(test) === null) return null;
    const share = [...values, ...test].every((value) => value === null || (value >= 0 && value <= 1));
    const form = share ? "%{y:.1%}" : "%{y:.4g}";
    const drawn = noisy(curves.at_s, values, name, palette.green, span, form);
    const layout = { yaxis: share ? { tickformat: ".0%", rangemode: "normal" } : {} };
    if (evaluation) tested(drawn, layout, test, evaluation, palette, span, plot, form);
    return { ...drawn, layout };
  };
}

function tested(drawn, layout, test, { at_s: at, drifts }, palette, span, plot, form) {
  if (test.length > 0) {
    const [x, y] = ofInterest(at, [test], span);
    const marks = { mode: "lines+markers", marker: { symbol: "circle", size: 5, color: palette.orange } };
    drawn.data.push(line(x, y, "test set", palette.orange, { ...marks, hovertemplate: form }));
    drawn.summary += `; ${short(newest(test))} on the test set`;
  }
  const shown = drifts.filter((drift) => drift.at_s >= span.fromS && drift.at_s <= span.toS);
  layout.shapes = shown.map((drift) => upright(drift.at_s, palette.red, 1.5));
  const marks = shown.map(({ at_s: atS, stream }) => ({ atS, text: `${stream} drifts`, colour: palette.red }));
  layout.annotations = labels(marks, span, plot);
  if (shown.length > 0) drawn.summary += `; ${count(shown.length)} drifts, the last of ${shown.at(-1).stream}`;
}

/** Updates per second. */
export function rate(curves, palette, span) {
  if (curves.at_s.length === 0) return null;
  const [x, y] = ofInterest(curves.at_s, [curves.updates_per_s], span);
  return {
    data: [
      line(x, y, "updates/s", palette.blue, {
        fill: "tozeroy",
        fillcolor: faint(palette.blue),
        hovertemplate: "%{y:.3g}",
      }),
    ],
    summary: `Updates per second over time, ${short(newest(curves.updates_per_s))} now`,
  };
}

// Streams with a colour and a name; the others are thin lines behind them.
const MOST_STREAMS = 8;

/** The streams of a job, those with most lag first. @returns {Array<{stream, lag}>} */
export function byLag(curves) {
  return [...curves.lag].sort((one, other) => (newest(other.lag) ?? -1) - (newest(one.lag) ?? -1));
}

/** The streams with a colour of their own. */
export function named(curves) {
  const chosen = new Set(byLag(curves).slice(0, MOST_STREAMS).map(({ stream }) => stream));
  return curves.lag.filter(({ stream }) => chosen.has(stream)).map(({ stream }) => stream);
}

/** Records of each stream that are not in an update yet. */
export function lag(curves, palette, span) {
  if (curves.lag_at_s.length === 0 || curves.lag.length === 0) return null;
  const look = series(palette);
  const names = named(curves);
  const data = curves.lag.map(({ stream, lag: records }) => {
    const [x, y] = ofInterest(curves.lag_at_s, [records], span);
    const place = names.indexOf(stream);
    if (place < 0) return line(x, y, stream, palette.line, { width: 1, hoverinfo: "skip" });
    const { colour, dash } = look(place);
    return line(x, y, stream, colour, { dash, hovertemplate: "%{y:,d}" });
  });
  const said = byLag(curves).slice(0, 3).map((one) => `${one.stream} ${count(newest(one.lag))}`);
  return {
    data: data.sort((one, other) => one.line.width - other.line.width),
    summary: `Lag per stream over time; now ${said.join(", ")}`,
  };
}

/** Capacity over arrivals, with the line at 1 below which updates cannot keep up. */
export function stability(curves, palette, span) {
  if (curves.cost_at_s.length === 0) return null;
  const [x, y] = ofInterest(curves.cost_at_s, [curves.stability], span);
  const now = newest(curves.stability);
  return {
    data: [line(x, y, "ratio", palette.purple, { hovertemplate: "%{y:.3f}" })],
    layout: {
      yaxis: { range: [0, Math.max(1.25, ...y) * 1.08] },
      shapes: [
        across({ y0: 0, y1: 1, fillcolor: faint(palette.red), line: { width: 0 }, layer: "below", type: "rect" }),
        across({ y0: 1, y1: 1, line: { color: palette.red, width: 1.5, dash: "dash" }, type: "line" }),
      ],
      annotations: [
        {
          ...{ xref: "paper", x: 0, xanchor: "left", y: 1, yanchor: "top", showarrow: false },
          text: "below 1 updates cannot keep up",
          font: { color: palette.red, size: 11 },
        },
      ],
    },
    summary: `Stability ratio over time, ${short(now)} now; below 1 updates cannot keep up`,
  };
}

function across(shape) {
  return { xref: "paper", x0: 0, x1: 1, yref: "y", ...shape };
}

/**
 * Cost so far compared with on-demand machines alone, and the plan's expected final cost.
 * @param {object} curves
 * @param {{plan: object|null, deadlineS: number|null}} ahead plan and deadline of a job that has not ended
 * @param {boolean} whole true if the chart may reach into the future
 */
export function cost(curves, { plan, deadlineS }, palette, span, plot, whole) {
  if (curves.cost_at_s.length === 0) return null;
  const [x, spent, other] = ofInterest(curves.cost_at_s, [curves.spent_usd, curves.on_demand_only_usd], span);
  const form = { hovertemplate: "$%{y:,.4~f}" };
  const data = [
    line(x, other, "on-demand only", palette.grey, { dash: "dash", ...form }),
    line(x, spent, "spent", palette.blue, { width: 2.5, ...form }),
  ];
  const shapes = [];
  const marks = [];
  let toS = span.toS;
  if (plan && whole && Number.isFinite(plan.expected_runtime_s)) {
    const endS = plan.at_s + plan.expected_runtime_s;
    toS = Math.max(toS, endS, deadlineS ?? 0);
    data.push(
      line([plan.at_s, endS], [plan.spent_usd, plan.predicted_usd], "predicted", palette.blue, {
        ...{ dash: "dot", width: 1.5, mode: "lines+markers", ...form },
        marker: { symbol: ["circle", "diamond"], size: [1, 10], color: palette.blue },
      }),
    );
    if (deadlineS !== null) {
      shapes.push(upright(deadlineS, palette.quiet));
      marks.push({ atS: deadlineS, text: "deadline", colour: palette.quiet });
    }
    toS += (toS - span.fromS) * 0.02;
  }
  const [now, against] = [newest(curves.spent_usd), newest(curves.on_demand_only_usd)];
  const predicted = plan ? `; ${money(plan.predicted_usd)} predicted for the whole job` : "";
  return {
    data,
    layout: {
      xaxis: { range: [onAxis(span.fromS), onAxis(toS)] },
      yaxis: { tickprefix: "$" },
      shapes,
      annotations: labels(marks, { fromS: span.fromS, toS }, plot),
    },
    summary:
      `Cost over time: ${money(now)} spent, ${money(against)} with on-demand machines alone` +
      ` (${percent(now / against)})${predicted}`,
  };
}

function faint(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgba(${red},${green},${blue},0.13)`;
}
