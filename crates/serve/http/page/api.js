// Requests to the server that this page came from. Keys are kept until the browser tab
// is closed, and are sent as headers.

const STORE = "stolon-keys";

/** The keys that the user has entered: `api` for /v1, `admin` for the prefix cache. */
export const keys = load();

function load() {
  try {
    const stored = JSON.parse(sessionStorage.getItem(STORE)) ?? {};
    return { api: String(stored.api ?? ""), admin: String(stored.admin ?? "") };
  } catch {
    return { api: "", admin: "" };
  }
}

/** Replaces the keys. */
export function setKeys(api, admin) {
  keys.api = api.trim();
  keys.admin = admin.trim();
  try {
    sessionStorage.setItem(STORE, JSON.stringify(keys));
  } catch {
    // Without storage, the keys last until the page is loaded again.
  }
}

/** A reply that is not a success. `status` is 0 if there was no reply. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The `Response` to a request; throws `ApiError` if it failed. */
export async function send(path, { admin = false, body, signal } = {}) {
  const headers = {};
  const key = admin ? keys.admin : keys.api;
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    // A relative address, so that the page works below any path of a proxy.
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // The reply is not an error object of the server, but one of a proxy, for example.
  }
  throw new ApiError(response.status, String(message));
}

/** The text that the page shows for an error of a client's request. */
export function explain(error) {
  const message = error.message.replace(/\.?$/, ".");
  if (error.status === 401) return `${aboutApiKey()} Enter it under “Keys”.`;
  if (error.status === 429) return `${message} Try again in a moment.`;
  return message;
}

/** The text that the page shows if the server has refused the API key. */
export const aboutApiKey = () =>
  keys.api ? "The server does not know this API key." : "The chat needs an API key.";

/** The JSON of the reply to a request of a client. */
export const client = async (path, options) => (await send(path, options)).json();

/** The JSON of the reply to a request of an operator. */
export const operator = async (path, options) =>
  (await send(path, { ...options, admin: true })).json();

/** The data of a reply's server-sent events, parsed as JSON until `[DONE]`. */
export async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const lines = event.split("\n").filter((line) => line.startsWith("data:"));
        const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
