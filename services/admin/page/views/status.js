/** How a job is: the word that the API, the command line and the metrics have too, with a shape. */

import { h } from "../dom.js";

/** The word as a badge. @param {{state: string}} job @returns {HTMLElement} */
export function badge({ state }) {
  return h("span", { class: "badge", "data-state": state.replaceAll(" ", "-") }, state);
}
