/** Draws figures with Plotly: at most once a second, only visible ones, and all with one time range. */

import { onAxis } from "./format.js";
import { colours, onScheme } from "./theme.js";

// Minimum time between two drawings.
const SHORTEST_MS = 1000;
// Drawings may take at most the share 1 / SHARE of the time.
const SHARE = 10;
// Time between drawings of charts that are scrolled out of sight. They are drawn for screenshots of the whole page.
const UNSEEN_MS = 15000;
const MARGIN = { l: 50, r: 14, t: 10, b: 26 };
const OPTIONS = { displayModeBar: false, doubleClick: false, showTips: false, scrollZoom: false };
const fine = matchMedia("(pointer: fine)");

// Plotly is large, so it is loaded with the first view that has charts.
const loaded = import(document.querySelector('meta[name="plotly"]').content).then(
  () => globalThis.Plotly,
  () => null,
);

/**
 * Escape a text for Plotly, which interprets some tags and entities.
 * @param {string} text
 */
export function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/** A dotted line across a chart at a point in time, such as a deadline. */
export function upright(atS, colour, width = 1, more = {}) {
  const at = onAxis(atS);
  return { type: "line", xref: "x", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: { color: colour, width, dash: "dot" }, ...more };
}

// Measures the width of texts.
const ruler = document.createElement("canvas").getContext("2d");
// Height of a line of labels.
const LABEL_PX = 14;
// Maximum number of lines of labels.
const MOST_ROWS = 5;

/**
 * Labels of vertical lines, placed so that none covers another or leaves the chart. Labels without room are omitted,
 * the oldest first.
 * @param {Array<{atS: number, text: string, colour: string}>} marks oldest first
 * @param {{fromS: number, toS: number}} span range of the axis
 * @param {{width: number, height: number}} plot in pixels
 */
export function labels(marks, span, plot) {
  ruler.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const secondsOfPx = (span.toS - span.fromS) / plot.width;
  // Leftmost position in use, by row.
  const ends = [];
  const found = [];
  for (const { atS, text, colour } of marks.toReversed()) {
    const shown = shortened(text, plot.width);
    const wide = ruler.measureText(shown).width + 8;
    const at = (atS - span.fromS) / secondsOfPx;
    const left = at >= wide ? at - wide : Math.max(0, Math.min(at + 3, plot.width - wide));
    const row = Array.from({ length: MOST_ROWS }, (_, each) => each).find((each) => (ends[each] ?? Infinity) >= left + wide);
    if (row === undefined) continue;
    ends[row] = left;
    const place = { x: onAxis(span.fromS + left * secondsOfPx), xanchor: "left", yref: "paper", yanchor: "bottom" };
    found.push({ ...place, y: (row * LABEL_PX + 2) / plot.height, showarrow: false, text: plain(shown), font: { color: colour, size: 11 } });
  }
  return found;
}

function shortened(text, width) {
  let shown = text;
  for (let kept = text.length; kept > 1 && ruler.measureText(shown).width + 8 > width; kept -= 1) shown = `${text.slice(0, kept - 1)}…`;
  return shown;
}

/** All charts of a view, with a common time range. */
export class Charts {
  /**
   * @param {() => {fromS: number, toS: number}} whole returns the longest possible time range
   * @param {(zoomed: boolean) => void} zoomed called when a viewer zooms in or out
   */
  constructor(whole, zoomed) {
    this.whole = whole;
    this.zoomed = zoomed;
    this.panels = new Map();
    // Length of the time range in seconds, up to now; null shows everything.
    this.lastS = null;
    // [from, to] if the viewer has zoomed in.
    this.zoom = null;
    this.timer = 0;
    this.nextMs = 0;
    this.seen = new IntersectionObserver((entries) => this.#inSight(entries), { rootMargin: "200px" });
    this.sized = new ResizeObserver(() => this.#sized());
    this.print = () => this.#drawEach(globalThis.Plotly, true);
    addEventListener("beforeprint", this.print);
    onScheme(() => this.touch());
  }

  /**
   * Add a chart.
   * @param {HTMLElement} element element to draw in
   * @param {(palette: object, span: {fromS: number, toS: number}, plot: {width: number, height: number}) =>
   *   object|null} build receives the size of the plot in pixels; returns `data`, optional `layout`, and `summary`,
   *   the chart's content in words, or null if there is nothing to draw
   */
  add(element, build) {
    this.panels.set(element, { build, near: false, due: true, width: 0, drawnMs: -Infinity });
    element.setAttribute("role", "img");
    this.seen.observe(element);
    this.sized.observe(element);
  }

  /** Draw again soon, because data have changed. */
  touch() {
    for (const panel of this.panels.values()) panel.due = true;
    this.#soon();
  }

  /** Show the newest seconds only. @param {number|null} lastS null shows everything */
  newest(lastS) {
    this.lastS = lastS;
    this.zoom = null;
    this.nextMs = 0;
    this.touch();
  }

  /** @returns {{fromS: number, toS: number}} the time range shown */
  span() {
    if (this.zoom) return this.zoom;
    const { fromS, toS } = this.whole();
    return { fromS: this.lastS === null ? fromS : Math.max(fromS, toS - this.lastS), toS };
  }

  /** Remove all charts and listeners. */
  close() {
    clearTimeout(this.timer);
    removeEventListener("beforeprint", this.print);
    this.seen.disconnect();
    this.sized.disconnect();
    for (const element of this.panels.keys()) globalThis.Plotly?.purge(element);
    this.panels.clear();
  }

  #inSight(entries) {
    for (const { target, isIntersecting } of entries) {
      const panel = this.panels.get(target);
      if (panel) panel.near = isIntersecting;
    }
    this.#soon(0);
  }

  #sized() {
    let changed = false;
    for (const [element, panel] of this.panels) {
      if (panel.width === element.clientWidth) continue;
      panel.due = changed = true;
    }
    if (changed) this.#soon(0);
  }

  #soon(waitMs = Math.max(0, this.nextMs - performance.now())) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#draw(), waitMs);
  }

  async #draw() {
    const began = performance.now();
    this.nextMs = began + SHORTEST_MS;
    const drawing = await loaded;
    if (drawing === null) {
      for (const element of this.panels.keys()) element.replaceChildren("Charts cannot be drawn, because their library did not load.");
      return;
    }
    this.#drawEach(drawing, false);
    this.nextMs = began + Math.max(SHORTEST_MS, SHARE * (performance.now() - began));
  }

  #drawEach(drawing, all) {
    const palette = colours();
    const span = this.span();
    for (const [element, panel] of this.panels) {
      const wanted = panel.due && (all || panel.near || performance.now() - panel.drawnMs > UNSEEN_MS);
      if (!drawing || !wanted || element.clientWidth === 0) continue;
      panel.due = false;
      panel.drawnMs = performance.now();
      panel.width = element.clientWidth;
      // An empty figure hides its chart, which then has no height to draw in.
      element.closest("figure")?.removeAttribute("data-empty");
      const plot = { width: element.clientWidth - MARGIN.l - MARGIN.r, height: element.clientHeight - MARGIN.t - MARGIN.b };
      const figure = panel.build(palette, span, plot);
      element.closest("figure")?.toggleAttribute("data-empty", figure === null);
      if (figure === null) continue;
      element.setAttribute("aria-label", figure.summary);
      drawing.react(element, figure.data, layout(element, figure.layout ?? {}, palette, span), OPTIONS);
      // With a view box, the chart is scaled to the width of the paper when the page is printed.
      for (const svg of element.querySelectorAll(".main-svg")) {
        svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
      }
      if (!panel.listening) this.#listen(element, panel);
    }
  }

  #listen(element, panel) {
    panel.listening = true;
    element.on("plotly_relayout", (change) => {
      const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (from === undefined || to === undefined) return;
      this.zoom = { fromS: instant(from), toS: instant(to) };
      this.zoomed(true);
      this.nextMs = 0;
      this.touch();
    });
    element.addEventListener("dblclick", () => {
      this.zoomed(false);
      this.newest(this.lastS);
    });
  }
}

// Plotly returns local times without a time zone.
function instant(text) {
  return new Date(String(text).replace(" ", "T")).getTime() / 1000;
}

function layout(element, own, palette, span) {
  const axis = {
    color: palette.quiet,
    gridcolor: palette.line,
    linecolor: palette.line,
    zeroline: false,
    automargin: false,
  };
  return {
    width: element.clientWidth,
    height: own.height ?? element.clientHeight,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(element).fontFamily, size: 11.5, color: palette.quiet },
    showlegend: false,
    hovermode: "x unified",
    hoverlabel: { bgcolor: palette.card, bordercolor: palette.line, font: { color: palette.ink, size: 12 } },
    // On a touch screen, dragging scrolls the page.
    dragmode: fine.matches ? "zoom" : false,
    ...own,
    margin: { ...MARGIN, ...own.margin },
    xaxis: {
      ...axis,
      type: "date",
      showgrid: false,
      showline: true,
      nticks: element.clientWidth < 500 ? 4 : 7,
      range: [onAxis(span.fromS), onAxis(span.toS)],
      fixedrange: !fine.matches,
      hoverformat: "%e %b, %H:%M:%S",
      tickformatstops: [
        { dtickrange: [null, 59999], value: "%H:%M:%S" },
        { dtickrange: [60000, 43200000], value: "%H:%M" },
        { dtickrange: [43200000, null], value: "%e %b" },
      ],
      ...own.xaxis,
    },
    yaxis: { ...axis, fixedrange: true, nticks: 5, rangemode: "tozero", ...own.yaxis },
  };
}
