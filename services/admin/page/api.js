/** Client of the API; each failure becomes one plain sentence that says what to do. */

/** A failed request. */
export class Refusal extends Error {
  /**
   * @param {"key"|"role"|"missing"|"wrong"|"away"} kind
   * @param {string} sentence text for people
   * @param {number} [againS] time after which a retry makes sense
   * @param {Array<{field: string, detail: string, line?: number}>} [errors] invalid fields of the request
   */
  constructor(kind, sentence, againS = 5, errors = []) {
    super(sentence);
    this.kind = kind;
    this.againS = againS;
    this.errors = errors;
  }
}

/** Complete address on this service. A page opened with a key in its address may not use relative ones. */
export function address(path) {
  return `${location.origin}${path}`;
}

/** Path of a job, or of a part of it. */
export function jobPath(job, part = "") {
  return `/v1/jobs/${encodeURIComponent(job)}${part}`;
}

/**
 * Request JSON.
 * @param {string} path
 * @param {AbortSignal} [signal]
 * @returns {Promise<object>}
 * @throws {Refusal} for every answer but 200, and without an answer
 */
export async function ask(path, signal) {
  const answer = await fetched(path, { signal: signal ?? null }, " This page retries automatically.");
  return answer.json();
}

/**
 * Send a change once, without retries.
 * @param {string} method HTTP method
 * @param {string} path
 * @param {object|string} [body] sent as JSON unless it is a string
 * @param {Object<string, string>} [headers]
 * @returns {Promise<object|null>} null if the answer is empty
 * @throws {Refusal} if the change was not made, or the outcome is unknown
 */
export async function send(method, path, body, headers = { "Content-Type": "application/json" }) {
  const sent = body === undefined ? {} : { body: typeof body === "string" ? body : JSON.stringify(body), headers };
  const answer = await fetched(path, { method, ...sent }, "");
  return method === "HEAD" || answer.status === 204 ? null : answer.json();
}

/** Name and role of the page's user. @returns {Promise<{name: string, role: string}>} */
export function me() {
  asked ??= ask("/v1/me").catch((refusal) => {
    asked = null;
    throw refusal;
  });
  return asked;
}

let asked = null;

async function fetched(path, request, again) {
  let answer;
  try {
    const headers = { Accept: "application/json", ...request.headers };
    answer = await fetch(address(path), { ...request, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("away", `The service does not answer.${again}`);
  }
  if (answer.ok) return answer;
  const { detail = "", errors = [] } = await answer.json().catch(() => ({}));
  throw refusal(answer.status, detail, errors, Number(answer.headers.get("Retry-After")), again);
}

function refusal(status, detail, errors, retryAfterS, again) {
  if (status === 401) return new Refusal("key", "The API key is missing, wrong or no longer valid.");
  if (status === 403) return new Refusal("role", `This API key does not permit this. ${detail}`);
  if (status === 404) return new Refusal("missing", detail || "It does not exist yet.");
  if (status < 500 && status !== 429) return new Refusal("wrong", detail, 5, errors);
  const what = status === 429 ? "Too many requests with this key." : `The service cannot answer now. ${detail}`;
  return new Refusal("away", what + again, retryAfterS || 5);
}
