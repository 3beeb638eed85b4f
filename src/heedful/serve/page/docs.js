// The page of the server's routes, made from its own description, openapi.json.

import { hasKey, parts, request, send } from "./api.js";
import { make } from "./elements.js";
import { startPage } from "./switches.js";
import { errorText, text } from "./texts.js";

const KINDS = { // the models that a route's example can name
  "/v1/completions": ({ kind }) => kind === "language model",
  "/v1/chat/completions": ({ chat }) => chat,
  "/classify": ({ kind }) => kind === "classifier",
  "/fill": ({ kind }) => kind === "masked language model",
};
const LIMITS = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<" };

const get = (id) => document.getElementById(id);
const state = { description: null, models: [], languages: [], error: null };

async function open() {
  try {
    state.description = await request("openapi.json");
    state.models = (await request("v1/models")).data;
    state.languages = await request("languages").catch(() => []); // while models are loaded
  } catch (error) {
    state.error = error;
  }
  show();
}

function show() {
  const { error } = state;
  get("status").hidden = !error;
  get("status").textContent = error ? messageOf(error) : "";
  if (!state.description) return;
  const groups = new Map();
  for (const [path, methods] of Object.entries(state.description.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const [tag] = operation.tags;
      if (!groups.has(tag)) groups.set(tag, make("section"));
      groups.get(tag).append(routeOf(method.toUpperCase(), path, operation));
    }
  }
  for (const [tag, section] of groups) section.prepend(make("h2", "", tag));
  get("routes").replaceChildren(make("h2", "", text("docsTitle")), paragraphs(state.description.info.description), ...groups.values());
}

function messageOf(error) {
  if (error.status === 0) return text("unreachable");
  if (error.status === 401 && !hasKey()) return text("docsKey");
  return errorText(error);
}

// --- One route ------------------------------------------------------------------------------------

function routeOf(method, path, operation) {
  const route = make("details", "card route");
  const summary = route.appendChild(make("summary"));
  summary.append(make("code", "method", method), make("code", "", path));
  route.addEventListener("toggle", () => {
    if (!route.open || route.childElementCount > 1) return;
    const schema = resolve(operation.requestBody?.content["application/json"].schema);
    route.append(paragraphs(operation.description ?? ""));
    if (schema) route.append(...fieldsOf(schema));
    route.append(exampleOf(method, path, schema));
  });
  return route;
}

function resolve(schema) {
  return schema?.$ref ? state.description.components.schemas[schema.$ref.split("/").pop()] : schema;
}

/** Tables of the fields of a body, and of the objects in it. */
function fieldsOf(schema) {
  const nested = new Map();
  const table = make("table");
  const head = table.createTHead().insertRow();
  for (const name of ["docsField", "docsType", "docsMeaning"]) head.append(make("th", "", text(name)));
  const rows = table.createTBody();
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const row = rows.insertRow();
    row.insertCell().append(make("code", "", name));
    row.insertCell().textContent = typeOf(field, nested);
    const notes = [];
    if (schema.required?.includes(name)) notes.push(text("docsRequired"));
    else if (![null, undefined].includes(field.default)) notes.push(text("docsDefault", { value: JSON.stringify(field.default) }));
    row.insertCell().append(...marked([field.description, notes.join(", ")].filter(Boolean).join(" · ")));
  }
  const frame = make("div", "wide");
  frame.append(table);
  const inner = [...nested].flatMap(([name, each]) => [make("h3", "", name), ...fieldsOf(each)]);
  return [frame, ...inner];
}

/** The type of a field in words; the objects that it has are added to `nested`. */
function typeOf(field, nested) {
  if (field.$ref) {
    const name = field.$ref.split("/").pop();
    nested.set(name, resolve(field));
    return name;
  }
  const kinds = field.anyOf ?? field.oneOf;
  if (kinds) return kinds.filter(({ type }) => type !== "null").map((each) => typeOf(each, nested)).join(" | ") || "null";
  if ("const" in field) return JSON.stringify(field.const);
  if (field.enum) return field.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (field.type === "array") return `[${typeOf(field.items, nested)}, …]`;
  const limits = Object.keys(LIMITS).filter((key) => Math.abs(field[key]) < 2 ** 53).map((key) => `${LIMITS[key]} ${field[key]}`);
  return [field.type, limits.join(", ")].filter(Boolean).join(" ");
}

// --- The example ----------------------------------------------------------------------------------

/** An example of a request by curl, and a form that sends it. */
function exampleOf(method, path, schema) {
  const form = make("form");
  const model = state.models.find(KINDS[path] ?? (() => true))?.id ?? "MODEL";
  const address = form.appendChild(field("input", `path-${method}-${path}`, "docsPath"));
  address.control.value = path.slice(1).replace("{name}", encodeURIComponent(model));
  address.hidden = !path.includes("{");
  let body = null;
  if (schema) {
    body = form.appendChild(field("textarea", `body-${path}`, "docsRequest")).control;
    body.value = JSON.stringify(withNames(schema.examples?.[0] ?? {}, model), null, 2);
    body.rows = body.value.split("\n").length;
    body.spellcheck = false;
  }
  const command = make("pre", "code");
  const showCommand = () => (command.textContent = curl(address.control.value, body?.value));
  form.addEventListener("input", showCommand);
  showCommand();
  const button = make("button", "primary", text("docsTry"));
  const answer = make("pre", "code");
  answer.setAttribute("aria-live", "polite");
  answer.hidden = true;
  let running = new AbortController();
  form.append(make("h3", "", text("docsExample")), command, button, answer);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    answer.hidden = false;
    answer.textContent = "…";
    running.abort();
    running = new AbortController();
    call(address.control.value, body?.value, answer, running.signal).catch((error) => {
      if (error.name !== "AbortError") answer.textContent = messageOf(error);
    });
  });
  return form;
}

function field(tag, id, label) {
  const block = make("div", "field");
  const name = block.appendChild(make("label", "", text(label)));
  name.htmlFor = id;
  block.control = block.appendChild(make(tag, "code"));
  block.control.id = id;
  return block;
}

/** An example with a model and with languages of this server. */
function withNames(example, model) {
  const source = state.languages.find(({ targets }) => targets.length);
  const own = { ...example };
  if ("model" in own) own.model = model;
  if ("source" in own && source) Object.assign(own, { source: source.code, target: source.targets[0] });
  return own;
}

function curl(path, body) {
  const quoted = (value) => `'${value.replaceAll("'", "'\\''")}'`;
  const parts = ["curl", "-s", quoted(new URL(path, document.baseURI).href)];
  if (hasKey()) parts.push("-H", '"Authorization: Bearer $KEY"');
  if (body !== undefined) parts.push("-H", quoted("Content-Type: application/json"), "-d", quoted(body));
  return parts.join(" ");
}

/** Send a request, and show its answer as it comes. */
async function call(path, body, output, signal) {
  let content = null;
  try {
    if (body !== undefined) content = JSON.parse(body);
  } catch (error) {
    output.textContent = text("docsNotJson", { reason: error.message });
    return;
  }
  const answer = await send(path, content, signal);
  output.textContent = "";
  for await (const part of parts(answer)) output.append(part);
  if (answer.headers.get("content-type") !== "application/json") return;
  output.textContent = JSON.stringify(JSON.parse(output.textContent), null, 2);
}

// --- Texts ----------------------------------------------------------------------------------------

function paragraphs(description) {
  const block = make("div");
  for (const part of description.split(/\n\s*\n/).filter(Boolean)) block.appendChild(make("p")).append(...marked(part));
  return block;
}

/** A text whose parts in backticks are code. */
function marked(description) {
  return description.split("`").map((part, index) => make(index % 2 ? "code" : "span", "", part));
}

startPage(show);
open();
