// The box that shows facts of a part of a text: under the mouse, or with the focus.

import { make } from "./elements.js";

let tip = null;

/** Show a box below an element while the mouse is over it or it has the focus; `fill` fills it. */
export function addTip(element, fill) {
  for (const event of ["mouseenter", "focus"]) element.addEventListener(event, () => showTip(element, fill));
  for (const event of ["mouseleave", "blur"]) element.addEventListener(event, hideTip);
}

/** Hide the box; returns false if there is none. */
export function hideTip() {
  const isShown = tip !== null;
  tip?.remove();
  tip = null;
  return isShown;
}

/** Add a part to those of a text, which are one stop of the Tab key; the arrow keys, Home and End
 * move within it. */
export function addArrowKeys(part, parts) {
  const index = parts.push(part) - 1;
  part.tabIndex = index ? -1 : 0;
  part.addEventListener("focus", () => {
    for (const other of parts) other.tabIndex = other === part ? 0 : -1;
  });
  part.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: parts.length - 1 };
    const next = parts[steps[event.key]];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
}

function showTip(element, fill) {
  hideTip();
  tip = make("div", "card-tip");
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  element.setAttribute("aria-describedby", "tip");
  fill(tip);
  document.body.append(tip);
  const place = element.getBoundingClientRect();
  const most = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(place.left, most)) + scrollX}px`;
  tip.style.top = `${place.bottom + 6 + scrollY}px`;
}
