/** Plain sentences in the place of what cannot be shown, and warnings above what can. */

import { h } from "../dom.js";

/**
 * What to do about a refusal, for the whole page.
 * @param {import("../api.js").Refusal} refusal
 * @returns {Node}
 */
export function refused(refusal) {
  if (refusal.kind === "key" || refusal.kind === "role") {
    const again = h("button", { type: "button", class: "button" }, "Reload and sign in");
    again.addEventListener("click", () => location.reload());
    return alone("A valid key is needed", [
      h("p", {}, refusal.message),
      h(
        "p",
        {},
        "Sign in with any user name, and the key as the password. Whoever runs this service makes one with ",
        h("code", {}, "doll key create --role viewer"),
        ".",
      ),
      h("p", {}, again),
    ]);
  }
  return alone("Nothing to show yet", [h("p", {}, refusal.message)]);
}

/** A job that is not there. @param {string} job @returns {Node} */
export function noJob(job) {
  return alone(`There is no job named ${job}`, [
    h("p", {}, "It was never submitted here, or it was deleted."),
    h("p", {}, h("a", { class: "button", href: "#/" }, "Show all jobs")),
  ]);
}

/** No jobs at all: how to submit one. @returns {Node} */
export function noJobs() {
  return alone("No jobs yet", [
    h("p", {}, "Submit one, with the key of an operator in DOLL_API_KEY:"),
    h("pre", {}, h("code", {}, `doll job submit docs/examples/digits.yaml --api ${location.origin}`)),
    h("p", {}, "It appears here as soon as it is accepted."),
  ]);
}

function alone(title, children) {
  return h("section", { class: "alone" }, h("h1", {}, title), children);
}

/**
 * Warnings, the gravest first.
 * @param {Array<{grave: boolean, title: string, text: string, command: string}>} warnings
 * @returns {Array<Node>}
 */
export function banners(warnings) {
  return [...warnings]
    .sort((one, other) => Number(other.grave) - Number(one.grave))
    .map(({ grave, title, text, command }) =>
      h(
        "div",
        { class: grave ? "banner grave" : "banner", role: "alert" },
        h("strong", {}, title),
        text ? h("span", {}, text) : null,
        command ? h("code", {}, command) : null,
      ),
    );
}
