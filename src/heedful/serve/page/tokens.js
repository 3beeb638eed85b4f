// Generated text with the probabilities of its tokens, and their alternatives.

import { bars, make, percent, visible } from "./elements.js";
import { text } from "./texts.js";
import { addArrowKeys, addTip } from "./tips.js";

/** The pieces of an output. A character of several tokens is shown when its last one is there. */
export class TokenView {
  constructor(output) {
    this.output = output;
    this.waiting = []; // tokens without text of their own so far
    this.spans = [];
  }

  /** Show the new text and tokens of an event of a completion. */
  append(piece, logprobs) {
    this.waiting.push(...tokensOf(logprobs));
    if (!piece) return;
    const tokens = this.waiting;
    this.waiting = [];
    const span = make("span", "token", piece);
    addArrowKeys(span, this.spans);
    const least = Math.min(1, ...tokens.map(({ probability }) => probability));
    span.style.setProperty("--share", (0.45 * (1 - least)).toFixed(3));
    addTip(span, (tip) => fillTip(tip, tokens));
    this.output.append(span);
  }
}

function tokensOf({ tokens, token_logprobs: values, top_logprobs: tops }) {
  return tokens.map((token, index) => ({
    token,
    probability: Math.exp(values[index]),
    top: Object.entries(tops?.[index] ?? {})
      .map(([name, value]) => [visible(name), Math.exp(value)])
      .sort((left, right) => right[1] - left[1]),
  }));
}

function fillTip(tip, tokens) {
  for (const { token, probability, top } of tokens) {
    const line = tip.appendChild(make("div", "", `${text("probability")}: `));
    line.append(make("strong", "", percent(probability)));
    if (top.length) tip.append(make("h2", "", text("mostProbable")), bars(top, visible(token)));
  }
}
