/** Legends as text beside small drawings: shapes and dashes, never colour alone. */

import { h, s } from "../dom.js";
import { count, short } from "../format.js";
import { KINDS, marked, MARKS } from "../timeline.js";

const SHAPES = {
  x: "M2 2 10 10M10 2 2 10",
  diamond: "M6 1 11 6 6 11 1 6Z",
  "square-open": "M2 2H10V10H2Z",
  "circle-open": "M6 1.5A4.5 4.5 0 1 1 5.99 1.5Z",
  "triangle-right-open": "M2 1.5 10.5 6 2 10.5Z",
  "hourglass-open": "M2 1.5H10L2 10.5H10Z",
};

function sample(classes, ...shapes) {
  return s("svg", { class: `sample ${classes}`, viewBox: "0 0 24 12", "aria-hidden": "true" }, ...shapes);
}

function entry(drawing, text, value = null) {
  return h("li", {}, drawing, h("span", {}, text), value === null ? null : h("b", {}, value));
}

/** Legend of the timeline's bars and marks that occur. @returns {Array<Node>} */
export function marksLegend(lives, workers) {
  const kinds = Object.keys(KINDS).filter((kind) => lives.some((life) => life.kind === kind));
  const ends = Object.keys(MARKS)
    .map((name) => [name, marked(name, lives, workers).length])
    .filter(([, times]) => times > 0);
  if (lives.length === 0) return [];
  return [
    ...kinds.map((kind) => {
      const high = KINDS[kind].width * 12;
      return entry(sample(`kind-${kind}`, s("rect", { x: 0, width: 24, y: 6 - high / 2, height: high })), KINDS[kind].words);
    }),
    ...ends.map(([name, times]) => {
      const path = s("path", { d: SHAPES[MARKS[name].symbol], transform: "translate(6 0)" });
      return entry(sample(`mark-${name}`, path), MARKS[name].words, count(times));
    }),
    entry(sample("line-plan", s("line", { x1: 12, x2: 12, y1: 0, y2: 12 })), "new plan"),
  ];
}

/** Legend of the metric chart's lines besides the updates. @returns {Array<Node>} */
export function metricLegend(evaluation, metric) {
  const test = evaluation?.test[metric] ?? [];
  const entries = [];
  if (test.length > 0) {
    const dot = s("circle", { cx: 12, cy: 6, r: 2.5 });
    entries.push(entry(sample("line-test", s("line", { x1: 0, x2: 24, y1: 6, y2: 6 }), dot), "on the test set", short(test.at(-1))));
  }
  const drifts = evaluation?.drifts.length ?? 0;
  if (drifts > 0) entries.push(entry(sample("line-drift", s("line", { x1: 12, x2: 12, y1: 0, y2: 12 })), "a stream drifts", count(drifts)));
  return entries;
}

const DASHES = { solid: null, dash: "6 4", dot: "2 3", dashdot: "7 3 2 3" };

/** Legend of the lag chart's lines, with current values. @returns {Array<Node>} */
export function legend(names, streams, all, look) {
  const entries = names.map((name, place) => {
    const { colour, dash } = look(place);
    const drawn = s("line", { x1: 0, x2: 24, y1: 6, y2: 6, stroke: colour, "stroke-dasharray": DASHES[dash] ?? "none" });
    const dead = streams.get(name)?.dead_lettered ?? 0;
    const now = streams.has(name) ? short(streams.get(name).lag) : "";
    return entry(sample("line", drawn), dead > 0 ? `${name}, ${count(dead)} dead-lettered` : name, now);
  });
  if (all > names.length) entries.push(entry(null, `and ${count(all - names.length)} more`));
  return entries;
}
