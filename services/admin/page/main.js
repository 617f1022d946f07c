/** Views by address: `#/` shows all jobs, `#/jobs/NAME` one, `#/submit` the editor. */

import { me, send } from "./api.js";
import { h, say } from "./dom.js";
import { jobsView } from "./views/jobs.js";
import { refused } from "./views/notices.js";

const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
const pulse = document.getElementById("pulse");
const PULSES = {
  connecting: "Connecting",
  live: "Live",
  disconnected: "Disconnected: trying again",
  stopped: "Stopped",
};
let close = () => {};

/** Show the state of the connection. @param {string} state a key of PULSES */
function state(now) {
  pulse.dataset.state = now;
  say(pulse, PULSES[now]);
}

function route() {
  const [, section, name] = location.hash.split("/");
  const job = section === "jobs" && name ? decoded(name) : null;
  close();
  state("connecting");
  main.replaceChildren();
  const place = section === "submit" ? "Submit a job" : job;
  crumbs.replaceChildren(...(place === null ? [] : [h("a", { href: "#/" }, "Jobs"), h("span", {}, place)]));
  document.title = place === null ? "DOLL" : `${place} · DOLL`;
  if (section === "submit") later(import("./views/submit.js"), ({ submitView }) => submitView(main, state));
  else if (job === null) close = jobsView(main, state);
  else later(import("./views/job.js"), ({ jobView }) => jobView(main, job, state));
  scrollTo(0, 0);
}

/**
 * Show a view once its modules are loaded, unless another one was requested meanwhile.
 * @param {Promise<object>} loading
 * @param {(modules: object) => () => void} open returns a function that closes the view
 */
async function later(loading, open) {
  const left = (close = () => {});
  const modules = await loading.catch(() => null);
  if (close !== left) return;
  if (modules === null) {
    state("stopped");
    main.replaceChildren(refused({ message: "The service did not send this page completely. Reload the page." }));
  } else close = open(modules);
}

/** Show who is signed in, and sign-out. A browser keeps an API key itself, so there is no sign-out for it. */
async function showCaller() {
  const { name } = await me();
  const who = document.getElementById("who");
  const [, shown] = name.split(/^oidc:/);
  who.hidden = shown === undefined;
  say(who.firstElementChild, shown ?? "");
  who.lastElementChild.addEventListener("click", async () => {
    await send("POST", "/sign-in/out");
    location.reload();
  });
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    // Somebody has typed the address. No job has this name, and the view says so.
    return text;
  }
}

document.getElementById("skip").addEventListener("click", (event) => {
  // The address selects the view, not a position on the page.
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", () => {
  route();
  main.focus({ preventScroll: true });
});
addEventListener("pagehide", () => close());
addEventListener("pageshow", (event) => event.persisted && route());
route();
// Errors are ignored here, because the view reports a missing key itself.
showCaller().catch(() => {});
