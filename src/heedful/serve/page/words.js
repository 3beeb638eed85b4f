// A translation whose words show the words of the source that they are aligned with.

import { make } from "./elements.js";
import { text } from "./texts.js";
import { addArrowKeys, addTip } from "./tips.js";

const NEIGHBORS = 6; // words of the source that are shown before and after the aligned ones

/** Show a translation; each of its units (`words` or `tokens`) can be pointed at. */
export function showAligned(output, translation, { source, target, links }, unit) {
  output.replaceChildren();
  const words = [];
  let [shown, end] = [0, 0]; // the text so far in the output, and up to the last word found
  target.forEach((name, index) => {
    const sources = links.filter(([, own]) => own === index).map(([other]) => other);
    const word = name.replaceAll("\u2581", " ").trim(); // a token has its space as U+2581
    const start = translation.indexOf(word, end);
    if (!word || start < 0) return;
    end = start + word.length;
    if (!sources.length) return;
    output.append(translation.slice(shown, start));
    const span = output.appendChild(make("span", "word", word));
    addTip(span, (tip) => fillTip(tip, source, sources, unit));
    addArrowKeys(span, words);
    shown = end;
  });
  output.append(translation.slice(shown));
}

function fillTip(tip, source, aligned, unit) {
  tip.append(make("h2", "", text("alignedWith")));
  const line = tip.appendChild(make("div"));
  const first = Math.max(0, Math.min(...aligned) - NEIGHBORS);
  const last = Math.min(source.length - 1, Math.max(...aligned) + NEIGHBORS);
  if (first > 0) line.append("…");
  for (let index = first; index <= last; index++) {
    if (unit === "words" || source[index].startsWith("\u2581")) line.append(" ");
    const word = source[index].replaceAll("\u2581", " ").trim();
    line.append(make(aligned.includes(index) ? "mark" : "span", "", word));
  }
  if (last < source.length - 1) line.append(" …");
}
