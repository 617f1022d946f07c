/** Asks the API; whatever goes wrong becomes one plain sentence that says what to do. */

/** An answer that is not what was asked for. */
export class Refusal extends Error {
  /**
   * @param {"key"|"role"|"missing"|"away"} kind
   * @param {string} sentence for people
   * @param {number} [againS] when it makes sense to ask again
   */
  constructor(kind, sentence, againS = 5) {
    super(sentence);
    this.kind = kind;
    this.againS = againS;
  }
}

/** An address on this service; whole, since a page opened with a key in its own may not say less. */
export function address(path) {
  return `${location.origin}${path}`;
}

/** The path of a job, or of something of it. */
export function jobPath(job, part = "") {
  return `/v1/jobs/${encodeURIComponent(job)}${part}`;
}

/**
 * Ask for JSON.
 * @param {string} path
 * @param {AbortSignal} [signal]
 * @returns {Promise<object>}
 * @throws {Refusal} for every answer but 200, and for none
 */
export async function ask(path, signal) {
  let answer;
  try {
    answer = await fetch(address(path), {
      signal: signal ?? null,
      headers: { Accept: "application/json" },
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("away", "The service does not answer. This page tries again by itself.");
  }
  if (answer.ok) return answer.json();
  throw refusal(answer.status, await detail(answer), Number(answer.headers.get("Retry-After")));
}

async function detail(answer) {
  try {
    const problem = await answer.json();
    return String(problem.detail ?? problem.title ?? "");
  } catch {
    return "";
  }
}

function refusal(status, told, retryAfterS) {
  if (status === 401) return new Refusal("key", "The API key is missing, wrong or no longer valid.");
  if (status === 403) return new Refusal("role", `This key may not see this. ${told}`);
  if (status === 404) return new Refusal("missing", told);
  if (status === 429) {
    return new Refusal("away", "Too many requests with this key. This page tries again by itself.", retryAfterS || 5);
  }
  return new Refusal("away", `The service cannot answer now. ${told} This page tries again by itself.`);
}
