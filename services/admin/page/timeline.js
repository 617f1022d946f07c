/** Machines over time: one lane per slot, a bar for each machine's life, a mark for how it ended. */

import { plain, upright } from "./charts.js";
import { clock, duration, onAxis } from "./format.js";

/** Maximum number of lanes; more would not fit on a screen. */
export const MOST_LANES = 96;

/** Marks of ends and states: a shape each, besides the colour. */
export const MARKS = {
  preempted: { symbol: "x", colour: "red", words: "preempted" },
  failed: { symbol: "diamond", colour: "purple", words: "failed" },
  lost: { symbol: "square-open", colour: "purple", words: "lost" },
  refused: { symbol: "circle-open", colour: "quiet", words: "no capacity" },
  leaving: { symbol: "triangle-right-open", colour: "ink", words: "leaving" },
  silent: { symbol: "hourglass-open", colour: "ink", words: "no heartbeat" },
};

/** Bars by kind of machine: spot is thinner, so that both are visible if they overlap. */
export const KINDS = {
  "on-demand": { colour: "blue", width: 0.78, words: "on demand" },
  spot: { colour: "orange", width: 0.46, words: "spot" },
  unknown: { colour: "grey", width: 0.62, words: "by hand" },
};

/** @returns {number} height of a lane in pixels */
export function laneHeight(lanes) {
  return lanes <= 8 ? 24 : lanes <= 16 ? 17 : lanes <= 32 ? 12 : 8;
}

/** Counts for the timeline's heading. @returns {{slots: number, preempted: number, running: number}} */
export function tally(lives) {
  return {
    slots: lives.reduce((most, life) => Math.max(most, life.slot + 1), 0),
    preempted: lives.filter((life) => life.cause === "preempted").length,
    running: lives.filter((life) => life.to_s === null).length,
  };
}

/**
 * The figure.
 * @param {Array<object>} machines lives of the machines
 * @param {Array<object>} workers workers whose states are marked at the end of their bars
 * @param {Array<object>} plans plans, drawn as thin lines
 */
export function timeline(machines, nowS, workers, plans, palette, span) {
  if (machines.length === 0) return null;
  const { slots, preempted, running } = tally(machines);
  const lanes = Math.min(slots, MOST_LANES);
  const lives = machines.filter(
    (life) => life.slot < lanes && (life.to_s ?? nowS) >= span.fromS && life.from_s <= span.toS,
  );
  const each = laneHeight(lanes);
  return {
    data: [
      ...Object.keys(KINDS).map((kind) => bars(lives.filter((life) => life.kind === kind), kind, nowS, palette)),
      ...Object.keys(MARKS).map((name) => marks(marked(name, lives, workers), name, nowS, each, palette)),
    ].filter((trace) => trace.y.length > 0),
    layout: {
      height: lanes * each + 40,
      barmode: "overlay",
      hovermode: "closest",
      yaxis: {
        range: [lanes - 0.4, -0.6],
        showgrid: false,
        tickmode: "linear",
        tick0: 0,
        dtick: lanes <= 16 ? 1 : lanes <= 32 ? 4 : 8,
        nticks: 0,
      },
      shapes: plans
        .filter((plan) => plan.at_s >= span.fromS && plan.at_s <= span.toS)
        .slice(0, 40)
        .map((plan) => upright(plan.at_s, palette.quiet, 1, { layer: "below" })),
    },
    summary:
      `Machines over time in ${slots} slots: ${running} run now, ${preempted} were preempted so far.` +
      " The table of workers below has each.",
  };
}

function bars(lives, kind, nowS, palette) {
  const look = KINDS[kind];
  return {
    type: "bar",
    orientation: "h",
    base: lives.map((life) => onAxis(life.from_s)),
    x: lives.map((life) => ((life.to_s ?? nowS) - life.from_s) * 1000),
    y: lives.map((life) => life.slot),
    width: look.width,
    marker: { color: palette[look.colour], line: { width: 0 } },
    hovertext: lives.map((life) => described(life, nowS)),
    hoverinfo: "text",
    textposition: "none",
  };
}

function described(life, nowS) {
  const end = life.to_s === null ? "runs" : `${life.cause ?? "ended"} at ${clock(life.to_s)}`;
  const age = duration((life.to_s ?? nowS) - life.from_s);
  return [
    `${plain(life.worker)} in slot ${life.slot}, ${plain(life.pool)}`,
    `since ${clock(life.from_s)}, for ${age}`,
    plain(end),
  ].join("<br>");
}

/** Lives that have a mark. @param {string} name name of the mark */
export function marked(name, lives, workers) {
  if (name !== "leaving" && name !== "silent") return lives.filter((life) => life.cause === name && life.to_s !== null);
  const such = new Set(workers.filter((worker) => worker.status === name).map((worker) => worker.name));
  return lives.filter((life) => life.to_s === null && such.has(life.worker));
}

function marks(lives, name, nowS, each, palette) {
  const look = MARKS[name];
  return {
    type: "scatter",
    mode: "markers",
    x: lives.map((life) => onAxis(life.to_s ?? nowS)),
    y: lives.map((life) => life.slot),
    marker: {
      symbol: look.symbol,
      color: palette[look.colour],
      size: Math.min(11, each * 0.8 + 1),
      line: { width: 1, color: look.symbol.endsWith("open") ? palette[look.colour] : palette.card },
    },
    name: look.words,
    hovertext: lives.map((life) => (life.to_s === null ? `${plain(life.worker)}: ${look.words}` : described(life, nowS))),
    hoverinfo: "text",
    cliponaxis: false,
  };
}
