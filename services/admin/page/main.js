/** Which view the address asks for: `#/` all jobs, `#/jobs/NAME` one, `#/submit` a new one. */

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

/** Show how the connection to the service is. @param {string} state a key of PULSES */
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
 * Show a view once its modules are here, unless another one is wanted by then.
 * @param {Promise<object>} loading
 * @param {(modules: object) => () => void} open returns what closes the view
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

/** Who signed in, and the way out; with an API key there is none: the browser keeps it. */
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
    return text; // typed by hand: there is no such job, and the view says so
  }
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says what is shown, not where
  main.focus();
});
addEventListener("hashchange", () => {
  route();
  main.focus({ preventScroll: true });
});
addEventListener("pagehide", () => close());
addEventListener("pageshow", (event) => event.persisted && route());
route();
showCaller().catch(() => {}); // without a key the view says so
