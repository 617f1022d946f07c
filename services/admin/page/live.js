/** One event stream, kept open: reconnects, reports its state, and pauses while the page is hidden. */

import { address } from "./api.js";

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 30000;
// Time hidden until the stream is closed, because streams and connections are limited.
const REST_AFTER_MS = 30000;
const NAMES = ["job", "update", "evaluation", "drift", "member", "machine", "plan", "review"];

/**
 * Follow a stream until it is closed.
 * @param {string} path
 * @param {object} listener
 * @param {(name: string, data: object) => void} listener.event
 * @param {(state: "live"|"connecting"|"disconnected") => void} listener.state
 * @param {() => void} listener.opened called each time the stream starts; events in between were missed
 * @param {() => void} listener.refused called if the service answered without a stream; request the job for the reason
 * @returns {() => void} closes the stream
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
      // The browser reconnects by itself.
      if (mine.readyState !== EventSource.CLOSED) return;
      listener.refused();
      // The random delay keeps pages from reconnecting all at once.
      timer = setTimeout(open, waitMs * (0.75 + Math.random() / 2));
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
    // The page cannot show this event; the next refresh has its content.
    return null;
  }
}
