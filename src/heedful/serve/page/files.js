// The form that translates a file: choose or drop it, and download the result.

import { request, ServerError, stream } from "./api.js";
import { make } from "./elements.js";
import { messageOf } from "./errors.js";
import { reasonsText, text } from "./texts.js";

const FORM_BYTES = 2_000; // of a form beside its file
const get = (id) => document.getElementById(id);
const state = { file: null, formats: [], mostBytes: Infinity, running: null, shown: null, problem: null, reviews: [] };

/** Read from the server whether it translates files, and which. */
export async function openFiles() {
  const settings = await request("frontend/settings");
  state.formats = settings.filesTranslation ? settings.supportedFilesFormat : [];
  state.mostBytes = settings.maxBody ?? Infinity;
  get("file").accept = state.formats.join(",");
}

/** Show the form and its texts; it is hidden without a translator, or if the server reads no files. */
export function showFiles(isOffered) {
  get("file-form").hidden = !isOffered || !state.formats.length;
  get("file-formats").textContent = text("fileFormats", { formats: state.formats.join(" ") });
  get("file-name").textContent = state.file?.name ?? text("fileDrop");
  get("file-problem").hidden = !state.problem;
  get("file-problem").textContent = state.problem?.() ?? "";
  get("file-facts").textContent = state.shown?.() ?? "";
  get("reviews").hidden = !state.reviews.length;
  get("review-list").replaceChildren(...state.reviews.map(reviewItem));
}

function reviewItem({ line, source, reasons, reasonCodes }) {
  const item = make("li", "", source);
  item.value = line;
  item.append(make("div", "facts", reasonsText(reasons, reasonCodes)));
  return item;
}

/** End the translation that is running. */
export function stopFile() {
  state.running?.abort();
  state.running = null;
}

function choose(file) {
  if (!file) return;
  stopFile();
  state.file = file;
  forget();
}

/** Remove the result and the error of the former file. */
function forget() {
  Object.assign(state, { shown: null, problem: null, reviews: [] });
  get("file-link").hidden = true;
  showAgain();
}

const showAgain = () => showFiles(!get("file-form").hidden);

/** True if a later translation has begun. */
const isOther = (running) => state.running !== null && state.running !== running;

async function translateFile() {
  if (!state.file) return get("file").focus();
  stopFile();
  forget();
  const running = (state.running = new AbortController());
  const [button, stop, bar] = ["file-translate", "file-stop", "file-progress"].map(get);
  [button.disabled, stop.hidden, bar.hidden] = [true, false, false];
  bar.removeAttribute("value");
  try {
    showResult(await answerTo(state.file, running.signal));
  } catch (error) {
    if (isOther(running)) return;
    state.shown = null;
    if (error.name !== "AbortError") state.problem = () => messageOf(error);
    if (error.status === 401) get("key-form").hidden = false;
  } finally {
    if (!isOther(running)) {
      [button.disabled, stop.hidden, bar.hidden] = [false, true, true];
      state.running = null;
      showAgain();
      // A button that is disabled or hidden loses the focus of a keyboard.
      if (document.activeElement === document.body) (get("file-link").hidden ? button : get("file-link")).focus();
    }
  }
}

/** The last event of the server, which has the address of the translated file. */
async function answerTo(file, signal) {
  if (!state.formats.some((ending) => file.name.toLowerCase().endsWith(ending))) {
    throw new ServerError(text("fileOther"), 400);
  }
  if (file.size + FORM_BYTES > state.mostBytes) {
    throw new ServerError("", 413, { code: "body_too_large", values: { limit: state.mostBytes } });
  }
  await file.slice(0, 1).arrayBuffer().catch(() => {
    throw new ServerError(text("fileChanged"), 400);
  });
  const form = new FormData();
  form.set("file", file);
  for (const side of ["source", "target"]) { // a model that names no languages takes those of the file
    if (get(side).value !== "any") form.set(side, get(side).value);
  }
  let answer = null;
  for await (const event of stream("translate_file", form, signal)) {
    if (event.translatedFileUrl) answer = event;
    else showProgress(event);
  }
  if (!answer) throw new ServerError("", 0);
  return answer;
}

function showProgress({ done, segments }) {
  const bar = get("file-progress");
  bar.max = Math.max(segments, 1);
  bar.value = done;
  state.shown = () => text("fileProgress", { done, segments });
  showAgain();
}

function showResult({ translatedFileUrl, counts, reviews, notes }) {
  const link = get("file-link");
  link.href = translatedFileUrl.slice(translatedFileUrl.indexOf("download_file/")); // of this host
  link.download = ""; // with the name that the server gives
  link.hidden = false;
  const { segments, to_review: count, blank, kept } = counts;
  state.shown = () => {
    const parts = [text("fileReviews", { count, segments })];
    if (kept) parts.push(text("fileKept", { count: kept }));
    if (blank) parts.push(text("fileBlank", { count: blank }));
    parts.push(...notes);
    return parts.join(" · ");
  };
  state.reviews = reviews;
  showAgain();
}

get("file-form").addEventListener("submit", (event) => {
  event.preventDefault();
  translateFile();
});
get("file").addEventListener("click", () => (get("file").value = "")); // the same file, too
get("file").addEventListener("change", () => choose(get("file").files[0]));
get("file-stop").addEventListener("click", stopFile);
for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  get("file-drop").addEventListener(name, (event) => {
    event.preventDefault();
    get("file-drop").classList.toggle("over", name === "dragenter" || name === "dragover");
    if (name === "drop") choose(event.dataTransfer.files[0]);
  });
}
for (const name of ["dragover", "drop"]) { // beside the form a browser would open the file
  addEventListener(name, (event) => {
    if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
  });
}
for (const id of ["source", "target"]) get(id).addEventListener("change", forget);
