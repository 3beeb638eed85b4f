// Requests to the server that the page came from.

const KEY = "heedful-key";

/** An answer of the server that is an error, with its status; 0: there was no answer. */
export class ServerError extends Error {
  constructor(message, status, { param = null, code = "", values = {} } = {}) {
    super(message);
    this.status = status;
    this.parameter = param;
    this.code = code;
    this.values = values;
  }
}

/** Keep an API key for this tab. */
export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** True if a key was given in this tab. */
export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** The JSON that a route answers; `body` null: a GET request. */
export async function request(route, body = null, signal = undefined) {
  return (await send(route, body, signal)).json();
}

/** The events of a streamed answer, one JSON value after the other; `body`: as of `send`. */
export async function* stream(route, body, signal) {
  if (body instanceof FormData) body.set("stream", "true");
  const answer = await send(route, body instanceof FormData ? body : { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const content = JSON.parse(data);
      if (content.error) throw errorOf(content, 500);
      yield content;
    }
  }
}

/** The answer of a route to JSON or a form; raises a ServerError unless its status is 200. */
export async function send(route, body, signal = undefined) {
  const headers = {};
  const isJson = body !== null && !(body instanceof FormData);
  if (isJson) headers["Content-Type"] = "application/json";
  if (hasKey()) headers.Authorization = `Bearer ${sessionStorage.getItem(KEY)}`;
  const options = { method: body === null ? "GET" : "POST", headers, signal };
  if (body !== null) options.body = isJson ? JSON.stringify(body) : body;
  let answer;
  try {
    answer = await fetch(route, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("", 0);
  }
  if (answer.ok) return answer;
  const content = await answer.json().catch(() => ({}));
  throw errorOf(content, answer.status);
}

function errorOf(content, status) {
  const error = content.error ?? "";
  if (typeof error === "string") return new ServerError(error, status, content);
  return new ServerError(error.message ?? "", status, error);
}
