// Elements that several parts of the page make.

/** A new element with a class and a text. */
export function make(tag, name = "", content = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.textContent = content;
  return element;
}

/** Named probabilities as bars, in their order; `best` is the name that is emphasized. */
export function bars(entries, best = entries[0]?.[0]) {
  const grid = make("div", "bars");
  for (const [name, value] of entries) {
    const track = make("span", "track");
    track.setAttribute("aria-hidden", "true");
    const filled = track.appendChild(make("span"));
    filled.style.width = `${(100 * value).toFixed(2)}%`;
    grid.append(make("span", name === best ? "name best" : "name", name), track);
    grid.append(make("span", "value", percent(value)));
  }
  return grid;
}

/** A probability in percent. */
export function percent(value) {
  return `${(100 * value).toFixed(value >= 0.9995 || value < 0.1 ? 2 : 1)}%`;
}

/** A token with its spaces and line breaks made visible. */
export function visible(token) {
  return token.replace(/\n/g, "⏎").replace(/ /g, "␣") || "∅";
}
