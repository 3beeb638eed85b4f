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
  return (await send(route, body, signal)).json().catch(fail);
}

/** The events of a streamed answer, one JSON value after the other; `body`: as of `send`. */
export async function* stream(route, body, signal) {
  if (body instanceof FormData) body.set("stream", "true");
  const answer = await send(route, body instanceof FormData ? body : { ...body, stream: true }, signal);
  let rest = "";
  for await (const part of parts(answer)) {
    const events = (rest + part).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const content = JSON.parse(data);
      if (content.error) throw errorOf(content, 500);
      yield content;
    }
  }
  throw new ServerError("", 0); // it broke off
}

/** The parts of an answer's text as they come. */
export async function* parts(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read().catch(fail);
    if (done) return;
    yield value;
  }
}

/** The answer of a route to JSON or a form; raises a ServerError unless its status is 200. */
export async function send(route, body, signal = undefined) {
  const headers = {};
  const isJson = body !== null && !(body instanceof FormData);
  if (isJson) headers["Content-Type"] = "application/json";
  if (hasKey()) {
    const key = sessionStorage.getItem(KEY);
    if (!/^[\x20-\x7e]*$/.test(key)) throw new ServerError("", 401); // no header can have it
    headers.Authorization = `Bearer ${key}`;
  }
  const options = { method: body === null ? "GET" : "POST", headers, signal };
  if (body !== null) options.body = isJson ? JSON.stringify(body) : body;
  const answer = await fetch(route, options).catch(fail);
  if (answer.ok) return answer;
  const content = await answer.json().catch(() => ({}));
  throw errorOf(content, answer.status);
}

/** Raise the error of a request without an answer, or whose answer breaks off. */
function fail(error) {
  throw error.name === "AbortError" ? error : new ServerError("", 0);
}

function errorOf(content, status) {
  const error = content.error ?? "";
  if (typeof error === "string") return new ServerError(error, status, content);
  return new ServerError(error.message ?? "", status, error);
}
