/** One event stream, kept open: reconnects, says how it is, rests while nobody looks. */

import { address } from "./api.js";

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 30000;
const REST_AFTER_MS = 30000; // hidden for so long; streams and connections are not without end
const NAMES = ["job", "update", "evaluation", "drift", "member", "machine", "plan", "review"];

/**
 * Follow a stream until it is closed.
 * @param {string} path
 * @param {object} listener
 * @param {(name: string, data: object) => void} listener.event
 * @param {(state: "live"|"connecting"|"disconnected") => void} listener.state
 * @param {() => void} listener.opened each time that it begins anew: what came meanwhile is not told
 * @param {() => void} listener.refused the service answered, but not with a stream: ask it why
 * @returns {() => void} closes it
 */
export function follow(path, listener) {
  let source = null;
  let waitMs = FIRST_WAIT_MS;
  let timer = 0;
  let rest = 0;

  function open() {
    clearTimeout(timer);
    source?.close();
    const mine = new EventSource(address(path));
    source = mine;
    mine.onopen = () => {
      waitMs = FIRST_WAIT_MS;
      listener.state("live");
      listener.opened();
    };
    mine.onerror = () => {
      listener.state("disconnected");
      if (mine.readyState !== EventSource.CLOSED) return; // the browser tries again
      listener.refused();
      timer = setTimeout(open, waitMs * (0.75 + Math.random() / 2)); // not all pages at once
      waitMs = Math.min(waitMs * 2, LONGEST_WAIT_MS);
    };
    for (const name of NAMES) {
      mine.addEventListener(name, (message) => {
        const data = parsed(message.data);
        if (data !== null && mine === source) listener.event(name, data);
      });
    }
  }

  function close() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }

  function looked() {
    clearTimeout(rest);
    if (document.hidden) rest = setTimeout(close, REST_AFTER_MS);
    else if (source === null) open();
  }

  listener.state("connecting");
  open();
  document.addEventListener("visibilitychange", looked);
  return () => {
    document.removeEventListener("visibilitychange", looked);
    clearTimeout(rest);
    close();
  };
}

function parsed(text) {
  try {
    const data = JSON.parse(text);
    return typeof data === "object" ? data : null;
  } catch {
    return null; // nothing that this page can show; the next refresh has it
  }
}
