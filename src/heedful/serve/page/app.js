// The page: its tabs, and what each of them asks the server.

import { hasKey, request, setKey, stream } from "./api.js";
import { bars, make, visible } from "./elements.js";
import { messageOf } from "./errors.js";
import { openFiles, showFiles, stopFile } from "./files.js";
import { startPage } from "./switches.js";
import { hasSpaces, keepText, languageName, reasonsText, text } from "./texts.js";
import { hideTip } from "./tips.js";
import { TokenView } from "./tokens.js";
import { showAligned } from "./words.js";

const USES = { // what a model can be used for
  translate: ({ kind }) => kind === "translator",
  generate: ({ kind }) => kind === "language model",
  chat: ({ kind, chat }) => kind === "language model" && chat,
  classify: ({ kind }) => kind === "classifier",
  fill: ({ kind }) => kind === "masked language model",
};
const TOP = 5; // alternatives of a token
const WAIT = 1000; // milliseconds until the server is asked again while it loads

const get = (id) => document.getElementById(id);
const state = { models: [], languages: [], messages: [], running: null, problem: null, review: null };

// --- Tabs -------------------------------------------------------------------------------------

function show() {
  showTabs();
  showLanguages();
  showModels();
  showProblem();
  showReview();
  showFiles(modelsFor("translate").length > 0);
}

const offered = () => Object.keys(USES).filter((use) => modelsFor(use).length);
const modelsFor = (use) => state.models.filter(USES[use]);

function showTabs() {
  const uses = offered();
  const chosen = [selected(), location.hash.slice(1), uses[0]].find((use) => uses.includes(use));
  get("tabs").replaceChildren(
    ...uses.map((use) => {
      const tab = make("button", "", text(`tab${use[0].toUpperCase()}${use.slice(1)}`));
      tab.type = "button";
      tab.id = `tab-${use}`;
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-controls", `panel-${use}`);
      tab.addEventListener("click", () => choose(use));
      return tab;
    }),
  );
  if (chosen) select(chosen);
}

const selected = () => document.querySelector("[role=tab][aria-selected=true]")?.id.slice(4);

/** Show another tab, without the error of the former one. */
function choose(use) {
  stopRunning();
  state.problem = null;
  showProblem();
  select(use);
}

function select(use) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const isChosen = tab.id === `tab-${use}`;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
  }
  for (const panel of document.querySelectorAll("[role=tabpanel]")) {
    panel.hidden = panel.id !== `panel-${use}`;
  }
  history.replaceState(null, "", `#${use}`);
}

function moveTab(event) {
  const uses = offered();
  const index = uses.indexOf(selected());
  const steps = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: uses.length - 1 };
  if (!(event.key in steps)) return;
  event.preventDefault();
  const use = uses[(steps[event.key] + uses.length) % uses.length];
  choose(use);
  get(`tab-${use}`).focus();
}

// --- Models and languages ----------------------------------------------------------------------

async function open() {
  try {
    await request("health/ready");
    state.models = (await request("v1/models")).data;
    state.languages = modelsFor("translate").length ? await request("languages") : [];
    if (modelsFor("translate").length) await openFiles();
    state.problem = offered().length ? null : () => text("noModels");
    get("key-form").hidden = true;
  } catch (error) {
    get("key-form").hidden = error.status !== 401;
    state.problem = error.status === 401 && !hasKey() ? null : () => messageOf(error);
    if (error.status === 503) state.problem = () => text("loading");
    if (error.status === 503 || error.status === 0) setTimeout(open, WAIT);
  }
  show();
}

function showModels() {
  for (const use of Object.keys(USES)) {
    const list = get(`${use}-model`);
    if (!list) continue;
    const chosen = list.value;
    list.replaceChildren(...modelsFor(use).map((model) => new Option(model.id)));
    if (chosen) list.value = chosen;
  }
  const names = state.models.map((model) => model.id).join(", ");
  get("models").textContent = names && text("models", { names });
}

function showLanguages() {
  const source = get("source").value || "auto";
  const option = ({ code, name }) => new Option(languageName(code, name), code);
  const known = state.languages.filter(({ targets }) => targets.length).map(option);
  get("source").replaceChildren(...(known.length === 1 ? [] : [new Option(text("detect"), "auto")]), ...known);
  if (!known.length) get("source").replaceChildren(new Option(text("anyLanguage"), "any"));
  if ([...get("source").options].some((each) => each.value === source)) get("source").value = source;
  showTargets();
}

function showTargets() {
  const [source, target] = [get("source").value, get("target").value];
  const fitting = state.languages.filter(({ code }) => source === "auto" || code === source);
  const codes = [...new Set(fitting.flatMap(({ targets }) => targets))].filter((code) => code !== source);
  const options = codes.map((code) => new Option(languageName(code), code));
  get("target").replaceChildren(...(options.length ? options : [new Option(text("anyLanguage"), "any")]));
  if (codes.includes(target)) get("target").value = target;
  get("swap").disabled = !canTranslate(get("target").value, source);
  get("swap").hidden = !state.languages.some(({ code, targets }) => targets.some((own) => canTranslate(own, code)));
}

function canTranslate(source, target) {
  return state.languages.some(({ code, targets }) => code === source && targets.includes(target));
}

function swapLanguages() {
  stopRunning();
  const [source, target] = [get("source").value, get("target").value];
  get("source").value = target;
  for (const type of ["input", "change"]) get("source").dispatchEvent(new Event(type, { bubbles: true }));
  get("target").value = source;
  const translation = get("translation").textContent;
  if (translation) get("translate-text").value = translation;
  clearTranslation();
}

// --- Errors and running requests ------------------------------------------------------------------

/** Remove an error when what it was about changes. */
function forgetProblem() {
  if (!state.problem || state.running) return;
  state.problem = null;
  showProblem();
}

function showProblem() {
  const element = get("status");
  element.hidden = !state.problem;
  element.textContent = state.problem ? state.problem() : "";
  element.classList.toggle("bad", Boolean(state.problem) && element.textContent !== text("loading"));
}

/** Run an action of a form: one at a time, with its errors shown. */
async function run(form, action) {
  stopRunning();
  const running = new AbortController();
  state.running = running;
  state.problem = null;
  showProblem();
  const [button, stop] = [form.querySelector(".primary"), form.querySelector(".stop")];
  button.disabled = true;
  if (stop) stop.hidden = false;
  try {
    await action(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") state.problem = () => messageOf(error);
    if (error.status === 401) get("key-form").hidden = false;
  } finally {
    button.disabled = false;
    if (stop) stop.hidden = true;
    // A button that is disabled or hidden loses the focus of a keyboard.
    if (document.activeElement === document.body) button.focus();
    if (state.running === running) state.running = null;
    showProblem();
  }
}

function stopRunning() {
  state.running?.abort();
  state.running = null;
}

function clear(id) {
  hideTip();
  get(id).replaceChildren();
}

/** Show the milliseconds since `began` in an element, and further facts. */
function showTime(id, began, more = () => []) {
  const count = Math.round(performance.now() - began);
  keepText(get(id), () => [text("milliseconds", { count }), ...more()].join(" · "));
}

const showNone = (id) => keepText(get(id), () => "");

/** Have a screen reader say an output that has grown token by token. */
const announce = (output) => (get("announced").textContent = output);

// --- The uses of models ---------------------------------------------------------------------------

function clearTranslation() {
  clear("translation");
  showNone("translate-facts");
  state.review = null;
  showReview();
  get("others").hidden = get("word-help").hidden = true;
}

/** Show why the translation should be reviewed. */
function showReview() {
  const { reasons = [], reasonCodes = [] } = state.review ?? {};
  get("translate-reasons").hidden = !reasons.length;
  get("translate-reasons").textContent = text("review", { reasons: reasonsText(reasons, reasonCodes) });
}

async function translate(signal) {
  const q = get("translate-text").value;
  if (!q.trim()) return get("translate-text").focus();
  const began = performance.now();
  const alternatives = Number(get("alternatives").value);
  const [source, target] = [get("source").value, get("target").value];
  const sources = state.languages.filter(({ code, targets }) => (source === "auto" ? targets.includes(target) : code === source));
  const unit = [...sources.map(({ code }) => code), target].every(hasSpaces) ? "words" : "tokens";
  const body = { q, source, target, alternatives, scores: true, alignments: unit };
  clearTranslation();
  const answer = await request("translate", body, signal);
  showAligned(get("translation"), answer.translatedText, answer.alignments[0], unit);
  get("word-help").hidden = !answer.alignments[0].links.length;
  const scoreText = (index) => text("score", { value: answer.scores[index].toFixed(3) });
  showTime("translate-facts", began, () => {
    const detected = answer.detectedLanguage?.language;
    return [
      ...(detected ? [text("detected", { language: languageName(detected) })] : []),
      ...(answer.scores[0] === null ? [] : [scoreText(0)]),
    ];
  });
  state.review = answer;
  showReview();
  const others = answer.alternatives ?? [];
  get("others").hidden = !others.length;
  get("other-list").replaceChildren(
    ...others.map((other, index) => {
      const item = make("li");
      showAligned(item.appendChild(make("span")), other, answer.alignments[index + 1], unit);
      if (answer.scores[index + 1] !== null) item.append(" ", keepText(make("span", "facts"), () => scoreText(index + 1)));
      return item;
    }),
  );
}

/** The number of a field, null where it is empty. */
const number = (id) => (get(id).value === "" ? null : Number(get(id).value));

async function generate(signal) {
  const prompt = get("generate-text").value;
  if (!prompt) return get("generate-text").focus();
  const body = { model: get("generate-model").value, prompt, max_tokens: number("generate-tokens") };
  body.stream_options = { include_usage: true };
  body.temperature = number("generate-temperature");
  body.top_p = number("generate-top-p");
  if (number("generate-seed") !== null) body.seed = number("generate-seed");
  try {
    await showStream({ ...body, logprobs: TOP }, signal);
  } catch (error) {
    if (error.parameter !== "logprobs") throw error; // the backend has no probabilities
    await showStream(body, signal);
  }
}

async function showStream(body, signal) {
  const output = get("generated");
  clear("generated");
  get("token-help").hidden = true;
  showNone("generate-facts");
  output.classList.add("busy");
  const began = performance.now();
  const view = new TokenView(output);
  let count = 0;
  try {
    for await (const { choices, usage } of stream("v1/completions", body, signal)) {
      for (const choice of choices) {
        get("token-help").hidden = !choice.logprobs;
        if (choice.logprobs) view.append(choice.text, choice.logprobs);
        else output.append(choice.text);
        count += choice.logprobs?.tokens.length ?? 1; // without them, a part can be of several
      }
      count = usage?.completion_tokens ?? count;
      const values = { count, rate: (count / ((performance.now() - began) / 1000)).toFixed(0) };
      keepText(get("generate-facts"), () => text("tokens", values));
    }
  } finally {
    output.classList.remove("busy");
    announce(output.textContent);
  }
}

async function chat(signal) {
  const content = get("chat-text").value;
  if (!content.trim()) return get("chat-text").focus();
  const list = get("messages");
  const asked = list.appendChild(make("div", "message user", content));
  const answer = list.appendChild(make("div", "message assistant busy"));
  list.scrollTop = list.scrollHeight;
  get("chat-text").value = "";
  const system = get("chat-system").value.trim();
  const messages = [...state.messages, { role: "user", content }];
  const body = {
    model: get("chat-model").value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: number("chat-temperature"),
  };
  if (number("chat-tokens") !== null) body.max_tokens = number("chat-tokens");
  let [reply, end] = ["", null];
  try {
    for await (const event of stream("v1/chat/completions", body, signal)) {
      const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      reply += event.choices[0].delta.content ?? "";
      end = event.choices[0].finish_reason;
      answer.textContent = reply;
      if (isAtEnd) list.scrollTop = list.scrollHeight;
    }
    // Notes are no part of the conversation.
    if (!reply) answer.append(keepText(make("em"), () => text("noAnswer")));
    else if (end === "length") list.append(keepText(make("em", "facts"), () => text("cut")));
  } catch (error) {
    if (!reply && asked.isConnected) {
      asked.remove();
      answer.remove();
      get("chat-text").value = [content, get("chat-text").value].filter(Boolean).join("\n");
    }
    throw error;
  } finally {
    answer.classList.remove("busy");
    if (asked.isConnected) { // no new conversation has begun
      announce(answer.textContent);
      if (reply) state.messages = [...messages, { role: "assistant", content: reply }];
    }
  }
}

function clearChat() {
  stopRunning();
  state.messages = [];
  clear("messages");
  get("chat-text").focus();
}

async function classify(signal) {
  const texts = get("classify-text").value;
  if (!texts.trim()) return get("classify-text").focus();
  const body = { model: get("classify-model").value, texts };
  if (get("classify-pair").value.trim()) body.pairs = get("classify-pair").value;
  const began = performance.now();
  clear("classes");
  showNone("classify-facts");
  const { results } = await request("classify", body, signal);
  const classes = Object.entries(results.probabilities ?? {}).sort((a, b) => b[1] - a[1]);
  const values = Object.entries(results.values ?? {}); // of a regression
  get("classes").replaceChildren(
    bars(classes, results.label),
    ...values.map(([name, value]) => make("div", "", `${name}: ${value.toFixed(4)}`)),
  );
  showTime("classify-facts", began);
}

async function fill(signal) {
  const texts = get("fill-text").value;
  if (!texts.trim()) return get("fill-text").focus();
  const began = performance.now();
  const body = { model: get("fill-model").value, texts, top_k: number("fill-count") };
  clear("masks");
  showNone("fill-facts");
  const { results } = await request("fill", body, signal);
  const parts = results.flatMap((candidates, index) => [
    ...(results.length > 1 ? [keepText(make("h2"), () => text("mask", { number: index + 1 }))] : []),
    bars(candidates.map(({ token, probability }) => [visible(token), probability])),
  ]);
  get("masks").replaceChildren(...parts);
  showTime("fill-facts", began);
}

function insertMask() {
  const area = get("fill-text");
  area.setRangeText("<mask>", area.selectionStart, area.selectionEnd, "end");
  area.focus();
}

async function copy(button) {
  const output = get(button.dataset.from);
  try {
    await navigator.clipboard.writeText(output.textContent);
  } catch { // a page without https has no clipboard, but a selection
    getSelection().selectAllChildren(output);
    document.execCommand("copy");
  }
  button.textContent = text("copied");
  setTimeout(() => (button.textContent = text("copy")), 1500);
}

// --- Events ---------------------------------------------------------------------------------------

/** True for a key of an input method; Safari ends a composition before the key that does so. */
const isComposing = (event) => event.isComposing || event.keyCode === 229;

for (const [use, action] of Object.entries({ translate, generate, chat, classify, fill })) {
  const form = document.querySelector(`#panel-${use} form`);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run(form, action);
  });
  form.addEventListener("keydown", (event) => {
    const isArea = event.target.tagName === "TEXTAREA" && !isComposing(event);
    const sends = event.ctrlKey || event.metaKey || (event.target.id === "chat-text" && !event.shiftKey);
    if (event.key !== "Enter" || !isArea || !sends) return;
    event.preventDefault();
    if (!form.querySelector(".primary").disabled) form.requestSubmit();
  });
  form.querySelector(".stop")?.addEventListener("click", stopRunning);
  form.addEventListener("input", forgetProblem);
}
for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", () => copy(button));
get("tabs").addEventListener("keydown", moveTab);
get("source").addEventListener("change", showTargets);
get("swap").addEventListener("click", swapLanguages);
get("chat-clear").addEventListener("click", clearChat);
get("insert-mask").addEventListener("click", insertMask);
get("key-form").addEventListener("input", forgetProblem);
get("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(get("key").value.trim());
  open();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || isComposing(event) || hideTip()) return;
  stopRunning();
  stopFile();
});
startPage(show);
open();
