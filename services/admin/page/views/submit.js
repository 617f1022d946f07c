/** Editor for a job file, with error messages by line. */

import { jobPath, send } from "../api.js";
import { copy, h, say, show } from "../dom.js";

// Kept while other views are shown.
let draft = "";

/**
 * Show the editor until closed.
 * @param {HTMLElement} main
 * @param {(state: string) => void} state called with the state of the connection
 * @returns {() => void} closes the view
 */
export function submitView(main, state) {
  const view = copy("submit");
  const { text, gutter } = view;
  // Errors that the service found in the current text.
  let wrong = [];
  // The same text sent twice is one job.
  let key = crypto.randomUUID?.() ?? String(Math.random());
  main.append(view.root);
  state("live");
  text.value = draft;

  function number() {
    const lines = text.value.split("\n").length;
    const marked = new Set(wrong.map(({ line }) => line));
    show(gutter, [lines, ...marked], () =>
      Array.from({ length: lines }, (_, at) => h("span", { class: marked.has(at + 1) ? "wrong" : null }, String(at + 1))),
    );
    gutter.scrollTop = text.scrollTop;
  }

  function showErrors(errors, message) {
    wrong = errors.toSorted((one, other) => (one.line ?? 0) - (other.line ?? 0));
    say(view.said, errors.length === 0 ? message : "");
    show(view.errors, wrong, () => wrong.map(mistake));
    number();
  }

  function mistake({ field, detail, line }) {
    const name = field === "body" ? "" : `${field.replace(/^body\./, "")}: `;
    if (!line) return h("li", {}, name + detail);
    const there = h("button", { type: "button" }, `Line ${line}`);
    there.addEventListener("click", () => go(line));
    return h("li", {}, there, ` ${name}${detail}`);
  }

  function go(line) {
    const lines = text.value.split("\n");
    const from = lines.slice(0, line - 1).reduce((sum, each) => sum + each.length + 1, 0);
    text.focus();
    text.setSelectionRange(from, from + (lines[line - 1] ?? "").length);
    text.scrollTop = ((line - 3) * text.scrollHeight) / lines.length;
  }

  function edited() {
    draft = text.value;
    key = crypto.randomUUID?.() ?? String(Math.random());
    number();
  }

  text.addEventListener("input", edited);
  text.addEventListener("scroll", () => (gutter.scrollTop = text.scrollTop));
  view.file.addEventListener("change", async () => {
    text.value = await view.file.files[0].text();
    view.file.value = "";
    edited();
    showErrors([], "");
  });
  view.send.addEventListener("click", async () => {
    view.send.disabled = true;
    try {
      const job = await send("POST", "/v1/jobs", text.value, { "Content-Type": "application/yaml", "Idempotency-Key": key });
      draft = "";
      if (view.root.isConnected) location.hash = `#${jobPath(job.id).slice("/v1".length)}`;
    } catch (refusal) {
      showErrors(refusal.errors, refusal.message);
    } finally {
      view.send.disabled = false;
    }
  });
  number();
  return () => {};
}
