"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const views = data.views;
  const root = document.documentElement;
  const state = {
    language: (navigator.language || "").startsWith("zh") ? "zh" : "en",
    view: Object.keys(views)[0], part: 0, layer: 0, head: 0, query: 0, sort: null,
    color: "lens_probability", output: null, stack: null, method: "gradients", step: 0, map: 0, found: null,
  };
  root.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);

  // --- elements: all text is set as text, never as markup ------------------------------------

  const t = (key, ...values) =>
    (data.texts[state.language][key] ?? key).replace(/\{(\d)\}/g, (_, i) => values[i]);
  const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/gu;
  const visible = (text) =>
    text.replace(HIDDEN, (c) => "⟨" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩");
  const named = (text) => (text.trim() ? visible(text) : visible(text).replaceAll(" ", "␣") || "∅");
  // With a minus sign, at which no line is broken.
  const exponential = (value, digits) => value.toExponential(digits).replace("e-", "e−").replace("e+", "e");
  const number = (value, digits = 3) =>
    value === null || value === undefined ? "–" : Math.abs(value) < 1e-12 ? (0).toFixed(digits)
      : Math.abs(value) >= 1e4 || (value && Math.abs(value) < 10 ** -digits)
        ? exponential(value, 2) : value.toFixed(digits);

  /** Three significant digits, for an axis. */
  const tick = (value) => (value && (Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3)
    ? exponential(value, 1) : String(Number(value.toPrecision(3))));

  function el(name, attributes = {}, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (key === "class") element.className = value;
      else if (key === "style") Object.assign(element.style, value);
      else if (value !== false && value !== null) element.setAttribute(key, value);
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
    return element;
  }
  function svg(name, attributes = {}, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else element.setAttribute(key, value);
    }
    element.append(...children.flat());
    return element;
  }
  const token = (text) => el("bdi", { class: "t" }, named(text));
  const card = (...children) => el("div", { class: "card" }, ...children);
  const intro = (key, ...values) => el("p", { class: "soft" }, t(key, ...values));

  /** A table; with `onsort` its headings are buttons, and `sort` is the column and its sign. */
  function table(headings, rows, onsort, sort) {
    const head = headings.map((name, index) => el("th", {
      scope: "col", "aria-sort": sort?.[0] === index && (sort[1] > 0 ? "ascending" : "descending") },
    onsort ? el("button", { id: `sort-${index}`, onclick: () => onsort(index) }, name) : name));
    const body = rows.map((row) =>
      el("tr", {}, row.map((cell) => typeof cell === "number" || cell === null
        ? el("td", { class: "n" }, number(cell, Number.isInteger(cell) ? 0 : 4)) : el("td", {}, cell))));
    return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("table") },
      el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
  }
  /** A table that is built when it is opened. */
  function behind(make) {
    const details = el("details", {}, el("summary", {}, t("table")));
    const fill = () => { if (details.children.length === 1) details.append(make()); };
    details.addEventListener("toggle", fill);
    return details;
  }
  function choice(view, key, options, value, onchange) {
    const id = `${view}-${key}`;
    const select = el("select", { id, onchange: () => { onchange(select.value); document.getElementById(id).focus(); } },
      options.map(([id, name]) => el("option", { value: id, ...(String(id) === String(value) ? { selected: "" } : {}) }, name)));
    return el("label", {}, t(key), select);
  }
  function set(changes, focus) {
    Object.assign(state, changes);
    renderView(state.view);
    if (focus) document.getElementById(focus)?.focus();
  }
  /** Attributes of a cell of a grid, which is one stop of the Tab key, with arrow keys inside: the
   * id is PREFIX-ROW-COLUMN, `up` is the step of ArrowUp, `isStop` marks the first stop. */
  function gridCell(prefix, row, column, up, isStop) {
    const id = `${prefix}-${row}-${column}`;
    return { id, tabindex: isStop ? 0 : -1, onkeydown: (event) => {
      const step = { ArrowUp: [up, 0], ArrowDown: [-up, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      const next = step && document.getElementById(`${prefix}-${row + step[0]}-${column + step[1]}`);
      if (!next) return;
      event.preventDefault();
      for (const stop of next.parentElement.querySelectorAll("[tabindex='0']")) stop.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } };
  }
  const said = () => el("p", { class: "said", role: "status", "aria-live": "polite" });

  // --- colors ---------------------------------------------------------------------------------

  function rgb(variable) {
    const hex = getComputedStyle(root).getPropertyValue(variable).trim();
    return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  }
  const mix = (share, variable = "--accent") => {
    const [low, high] = [rgb("--card"), rgb(variable)];
    return low.map((value, i) => Math.round(value + (high[i] - value) * Math.min(1, Math.max(0, share))));
  };
  const shade = (share, variable) => `rgb(${mix(share, variable).join(",")})`;
  const ink = (share) => (share > 0.55 ? "var(--page)" : "var(--ink)");
  const ramp = (low, high, two) =>
    el("span", { class: "legend" }, low, el("span", { class: two ? "ramp two" : "ramp" }), high);

  // --- tokens ---------------------------------------------------------------------------------

  function tokensView() {
    return [intro("about_tokens"), ...views.tokens.map((side) => card(
      el("h2", {}, t(side.side)),
      side.text === null ? el("p", { class: "soft" }, t("own_output")) : [
        el("p", {}, el("span", { class: "soft" }, t("written") + ": "), token(side.text)),
        el("p", {}, el("span", { class: "soft" }, t("normalized") + ": "),
          side.normalized === side.text ? t("same") : token(side.normalized))],
      el("div", { class: "line" }, side.pieces.map((piece) =>
        el("span", { class: "piece" + (piece.special ? " special" : "") + (piece.unknown ? " unknown" : "") }, token(piece.token)))),
      table(["", t("token"), t("id"), t("bytes"), t("kind")], side.pieces.map((piece, index) =>
        [index, token(piece.token), piece.id, el("code", {}, piece.bytes),
          t(piece.unknown ? "unknown" : piece.special ? "special" : "ordinary")])))),
    ];
  }

  // --- attention ------------------------------------------------------------------------------

  const decoded = new Map();
  function weightsOf(part) {
    if (!decoded.has(part)) {
      decoded.set(part, Uint8Array.from(atob(part.weights), (c) => c.charCodeAt(0)));
    }
    return decoded.get(part);
  }
  function headOf(part, layer, head) {
    const size = part.queries.length * part.keys.length;
    const start = (layer * part.heads.length + head) * size;
    return weightsOf(part).subarray(start, start + size);
  }
  function thumbnail(part, layer, head, table256) {
    const canvas = el("canvas", { width: part.keys.length, height: part.queries.length, "aria-hidden": "true" });
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    const pixels = new Uint32Array(image.data.buffer);
    headOf(part, layer, head).forEach((weight, i) => { pixels[i] = table256[weight]; });
    context.putImageData(image, 0, 0);
    return canvas;
  }
  function ramp256() {
    return Uint32Array.from({ length: 256 }, (_, i) => {
      const [r, g, b] = mix(i / 255);
      return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
    });
  }

  /** Cells to point at; `numbers` are those of the rows and of the columns. */
  function matrix(rows, columns, valueAt, label, numbers) {
    const cell = Math.max(9, Math.min(26, Math.floor(620 / Math.max(rows.length, columns.length))));
    const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": label });
    const context = canvas.getContext("2d");
    const font = `${Math.min(12, cell + 1)}px ui-monospace, Menlo, Consolas, "Liberation Mono", "Noto Sans Mono CJK SC", monospace`;
    context.font = font;
    const short = (text) => { const s = named(text); return s.length > 14 ? s.slice(0, 13) + "…" : s; };
    const widest = (names) => Math.ceil(Math.max(...names.map((name) => context.measureText(short(name)).width))) + 10;
    const [left, top] = [widest(rows), widest(columns)];
    const width = left + cell * columns.length + 2, height = top + cell * rows.length + 2;
    const ratio = Math.max(1, window.devicePixelRatio || 1);
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    Object.assign(canvas.style, { width: width + "px", height: height + "px" });
    const status = said();
    status.textContent = t("hover");
    let at = null;
    function draw() {
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, height);
      context.font = font;
      const [dark, soft] = ["--ink", "--soft"].map((name) => getComputedStyle(root).getPropertyValue(name));
      context.textBaseline = "middle";
      rows.forEach((name, row) => {
        context.fillStyle = at && at[0] === row ? dark : soft;
        context.textAlign = "right";
        context.fillText(short(name), left - 6, top + cell * (row + 0.5));
        columns.forEach((_, column) => {
          context.fillStyle = shade(valueAt(row, column));
          context.fillRect(left + cell * column, top + cell * row, cell - 1, cell - 1);
        });
      });
      columns.forEach((name, column) => {
        context.save();
        context.translate(left + cell * (column + 0.5), top - 6);
        context.rotate(-Math.PI / 2);
        context.textAlign = "left";
        context.fillStyle = at && at[1] === column ? dark : soft;
        context.fillText(short(name), 0, 0);
        context.restore();
      });
      if (at) {
        context.strokeStyle = dark;
        context.lineWidth = 2;
        context.strokeRect(left + cell * at[1], top + cell * at[0], cell - 1, cell - 1);
      }
    }
    function move(row, column) {
      at = [Math.min(rows.length - 1, Math.max(0, row)), Math.min(columns.length - 1, Math.max(0, column))];
      draw();
      status.replaceChildren(t("query") + " ", String(numbers[0][at[0]]), " ", token(rows[at[0]]), " → " + t("key") + " ",
        String(numbers[1][at[1]]), " ", token(columns[at[1]]), ": " + number(valueAt(...at)));
    }
    canvas.addEventListener("mousemove", (event) => {
      const [row, column] = [(event.offsetY - top) / cell, (event.offsetX - left) / cell].map(Math.floor);
      if (row >= 0 && column >= 0 && row < rows.length && column < columns.length) move(row, column);
    });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      move(...(at ? [at[0] + step[0], at[1] + step[1]] : [0, 0]));
    });
    draw();
    return [el("div", { class: "scroll" }, canvas), status];
  }

  /** Two lines of tokens: choosing one of the first shades the second. */
  function pairOfLines(first, second, valueAt, chosen, choose, id) {
    const peak = Math.max(1e-9, ...second.map((_, column) => valueAt(chosen, column)));
    return [
      el("div", { class: "line" }, first.map((name, row) => el("button", {
        class: "piece" + (row === chosen ? " on" : ""), id: `${id}-${row}`,
        "aria-pressed": String(row === chosen), onclick: () => choose(row),
        onmouseenter: (event) => { if (row !== chosen && event.buttons === 0) choose(row); },
        onfocus: () => { if (row !== chosen) choose(row); },
      }, token(name)))),
      el("div", { class: "line" }, second.map((name, column) => {
        const value = valueAt(chosen, column);
        return el("span", { class: "piece", title: number(value), style: { background: shade(value / peak), color: ink(value / peak) } }, token(name));
      })),
    ];
  }

  function attentionView() {
    const parts = views.attention;
    if (!parts.length) return [];
    const part = parts[state.part] ?? parts[0];
    state.layer = Math.min(state.layer, part.layers.length - 1);
    state.head = Math.min(state.head, part.heads.length - 1);
    state.query = Math.min(state.query, part.queries.length - 1);
    const colors = ramp256();
    const label = (layer, head) => `${t("layer")} ${part.layers[layer]}, ${t("head")} ${part.heads[head]}`;
    const grid = el("div", { class: "heads", style: {
      gridTemplateColumns: `auto repeat(${part.heads.length}, minmax(26px, ${part.heads.length > 6 ? 66 : 110}px))` } },
    el("span"), part.heads.map((head) => el("span", { class: "name" }, `${t("head")} ${head}`)),
    part.layers.map((number_, layer) => [
      el("span", { class: "name" }, `${t("layer")} ${number_}`),
      part.heads.map((_, head) => el("button", {
        ...gridCell("head", layer, head, -1, layer === state.layer && head === state.head),
        "aria-label": label(layer, head), title: label(layer, head),
        "aria-pressed": String(layer === state.layer && head === state.head),
        onclick: () => set({ layer, head }, `head-${layer}-${head}`),
      }, thumbnail(part, layer, head, colors))),
    ]));
    const weights = headOf(part, state.layer, state.head);
    const valueAt = (row, column) => weights[row * part.keys.length + column] / 255;
    const names = Object.keys(part.summaries).filter((name) =>
      part.summaries[name].some((row) => row.some((value) => value !== null)));
    const headings = ["layer", "head", ...names]; // those of the parts differ
    let rows = part.layers.flatMap((number_, layer) => part.heads.map((head, index) =>
      [number_, head, ...names.map((name) => part.summaries[name][layer][index])]));
    const sort = state.sort && [headings.indexOf(state.sort[0]), state.sort[1]];
    if (sort && sort[0] >= 0) {
      const [column, sign] = sort;
      rows = rows.sort((a, b) => sign * (a[column] - b[column]));
    }
    return [
      intro("about_attention"),
      el("div", { class: "controls" }, parts.map((entry, index) => el("button", {
        id: `part-${index}`, "aria-pressed": String(index === state.part),
        onclick: () => set({ part: index }, `part-${index}`) }, t(entry.part))), ramp("0", "1")),
      card(el("h2", {}, t("heads")), el("div", { class: "scroll" }, grid)),
      card(el("h2", {}, `${t("zoom")}: ${t(part.part)}, ${label(state.layer, state.head)}`),
        matrix(part.queries, part.keys, valueAt, label(state.layer, state.head),
          [part.queries, part.keys].map((side) => side.map((_, index) => index + part.first))),
        behind(() => table([t("query"), ...part.keys.map((key) => token(key))],
          part.queries.map((query, row) => [token(query), ...part.keys.map((_, column) => valueAt(row, column))])))),
      card(el("h2", {}, t("sentence_view")), el("p", { class: "soft" }, t("sentence")),
        pairOfLines(part.queries, part.keys, valueAt, state.query,
          (query) => set({ query }, `query-${query}`), "query")),
      card(el("h2", {}, t("summaries")), el("p", { class: "soft" }, t("sort")),
        table(headings.map((name) => t(name)), rows, (column) => set({
          sort: [headings[column], sort && sort[0] === column ? -sort[1] : 1] }, `sort-${column}`), sort)),
    ];
  }

  // --- alignment ------------------------------------------------------------------------------

  function alignmentView() {
    const { source, target, weights, numbers } = views.alignment;
    const side = state.aligned ?? ["target", 0];
    const chosen = Math.min(side[1], (side[0] === "target" ? target : source).length - 1);
    const valueAt = (row, column) => weights[row][column];
    const choose = (name) => (index) => {
      if (side[0] !== name || side[1] !== index) set({ aligned: [name, index] }, `${name}-${index}`);
    };
    const shares = (name) => (name === side[0] ? null
      : (name === "source" ? source : target).map((_, index) => (name === "source" ? weights[chosen][index] : weights[index][chosen])));
    const line = (name, names) => {
      const values = shares(name), peak = values ? Math.max(1e-9, ...values) : 1;
      return [el("h2", {}, t(name)), el("div", { class: "line" }, names.map((text, index) => el("button", {
        class: "piece" + (!values && index === chosen ? " on" : ""), id: `${name}-${index}`,
        title: values ? number(values[index]) : "", onclick: () => choose(name)(index),
        onfocus: () => choose(name)(index), onmouseenter: () => choose(name)(index),
        style: values ? { background: shade(values[index] / peak), color: ink(values[index] / peak) } : {},
      }, token(text))))];
    };
    return [intro("about_alignment"), card(line("source", source), line("target", target)),
      card(matrix(target, source, valueAt, t("alignment"), [numbers.target, numbers.source]),
        behind(() => table([t("target"), ...source.map((key) => token(key))],
          target.map((name, row) => [token(name), ...source.map((_, column) => valueAt(row, column))]))))];
  }

  // --- logit lens -----------------------------------------------------------------------------

  /** A layer such as "layer 0", "decoder 1", "encoder final_norm", "embedding" or "head". */
  const layerName = (name) => (name === "head" ? t("output_head") : name.split(" ").map((word) => t(word)).join(" "));

  function lensView() {
    const lens = views.lens;
    const largest = Math.max(2, ...lens.ranks.flat());
    const share = (row, column) => (state.color === "rank"
      ? 1 - Math.log(lens.ranks[row][column]) / Math.log(largest) : lens.probabilities[row][column][0]);
    const status = said();
    const show = (row, column) => status.replaceChildren(
      `${layerName(lens.layers[row])}, ${t("position")} ${column + lens.first} `, token(lens.positions[column]), ": ",
      ...lens.names[row][column].flatMap((name, k) => [token(name), ` ${number(lens.probabilities[row][column][k])}  `]),
      ` · ${t("rank")} ${t("final")}: ${lens.ranks[row][column]} (${number(lens.final[row][column])})`);
    const order = lens.layers.map((_, row) => row).reverse();
    const grid = el("div", { class: "grid", style: { gridTemplateColumns: `auto repeat(${lens.positions.length}, auto)` } },
      order.map((row) => [el("span", { class: "side" }, layerName(lens.layers[row])),
        lens.positions.map((_, column) => el("button", {
          class: "cell named", ...gridCell("lens", row, column, 1, row === order[0] && column === 0),
          onfocus: () => show(row, column), onmouseenter: () => show(row, column), onclick: () => show(row, column),
          style: { background: shade(share(row, column)), color: ink(share(row, column)) },
        }, token(lens.names[row][column][0])))]),
      el("span"), lens.positions.map((name) => el("span", { class: "named" }, token(name))));
    return [intro("about_lens"),
      el("div", { class: "controls" }, choice("lens", "color", [["lens_probability", t("lens_probability")], ["rank", `${t("rank")} ${t("final")}`]],
        state.color, (color) => set({ color })),
      state.color === "rank" ? ramp(String(largest), "1") : ramp("0", "1")),
      card(el("div", { class: "scroll" }, grid), status, behind(() => table(
        [t("layer"), t("position"), t("token"), t("top"), t("probability"), `${t("rank")} ${t("final")}`],
        lens.layers.flatMap((name, row) => lens.positions.map((position, column) =>
          [layerName(name), column + lens.first, token(position), token(lens.names[row][column][0]),
            lens.probabilities[row][column][0], lens.ranks[row][column]])))))];
  }

  // --- attributions ---------------------------------------------------------------------------

  function attributionsView() {
    const entries = views.attributions;
    if (!entries.length) return [];
    const index = Math.min(state.output ?? entries.length - 1, entries.length - 1);
    const entry = entries[index];
    const scores = entry.sides.flatMap((side) => side[state.method]);
    const peak = Math.max(1e-9, ...scores.map(Math.abs));
    return [intro("about_attributions"),
      el("div", { class: "controls" },
        choice("attributions", "output", entries.map((e, i) => [i, `${visible(e.output)} (${e.position})`]), index, (value) => set({ output: Number(value) })),
        ["gradients", "occlusion"].map((method) => el("button", { id: `method-${method}`, "aria-pressed": String(state.method === method),
          onclick: () => set({ method }, `method-${method}`) }, t(method))),
        ramp(number(-peak, 2), number(peak, 2), true)),
      card(state.method === "gradients"
        ? el("p", {}, t("sum_line", number(entry.value), number(entry.baseline), number(entry.value - entry.baseline), number(entry.sum), number(entry.error, 4)))
        : el("p", {}, t("occlusion_line", number(entry.value))),
      entry.sides.map((side) => [el("h2", {}, t(side.side)),
        el("div", { class: "line" }, side.tokens.map((name, i) => {
          const value = side[state.method][i], share = Math.abs(value) / peak;
          return el("span", { class: "piece", title: number(value), style: {
            background: shade(share, value < 0 ? "--warm" : "--accent"), color: ink(share) } }, token(name));
        }))]),
      behind(() => table([t("side"), t("token"), t("gradients"), t("occlusion")], entry.sides.flatMap((side) =>
        side.tokens.map((name, i) => [t(side.side), token(name), side.gradients[i], side.occlusion[i]])))))];
  }

  // --- patching -------------------------------------------------------------------------------

  function patchingView() {
    const entries = views.patching;
    if (!entries.length) return [];
    const stacks = [...new Set(entries.map((entry) => entry.stack))];
    const stack = stacks.includes(state.stack) ? state.stack : stacks[0];
    const own = entries.filter((entry) => entry.stack === stack);
    const index = Math.min(state.output ?? own.length - 1, own.length - 1);
    const { layers, first, tokens, others, effects, output, value, other } = own[index];
    const peak = Math.max(1e-9, ...effects.flat().map(Math.abs));
    const status = said();
    status.textContent = t("hover");
    const pair = (column) => (tokens[column] === others[column] ? [token(tokens[column])]
      : [token(tokens[column]), " / ", token(others[column])]);
    const show = (row, column) => status.replaceChildren(`${layerName(layers[row])}, ${t("position")} ${column + first} `,
      ...pair(column), `: ${t("effect")} ${number(effects[row][column])}`);
    const order = layers.map((_, row) => row).reverse();
    const grid = el("div", { class: "grid", style: { gridTemplateColumns: `auto repeat(${tokens.length}, auto)` } },
      order.map((row) => [el("span", { class: "side" }, layerName(layers[row])),
        tokens.map((_, column) => {
          const effect = effects[row][column], share = Math.abs(effect) / peak;
          return el("button", { class: "cell named", ...gridCell("patch", row, column, 1, row === order[0] && column === 0),
            onfocus: () => show(row, column), onmouseenter: () => show(row, column), onclick: () => show(row, column),
            "aria-label": number(effect),
            style: { background: shade(share, effect < 0 ? "--warm" : "--accent"), color: ink(share) } }, effect ? (Math.abs(effect) < 0.005 ? 0 : effect).toFixed(2) : "");
        })]),
      el("span"), tokens.map((_, column) => el("span", { class: "named" }, ...pair(column))));
    return [intro("about_patching"),
      el("div", { class: "controls" },
        choice("patching", "output", own.map((e, i) => [i, `${visible(e.output)} (${e.position})`]), index, (i) => set({ output: Number(i) })),
        stacks.length > 1 ? stacks.map((name) => el("button", { id: `stack-${name}`, "aria-pressed": String(name === stack),
          onclick: () => set({ stack: name }, `stack-${name}`) }, t(name))) : null,
        ramp(number(-peak, 2), number(peak, 2), true)),
      card(el("p", {}, t("patch_line", visible(output), number(value), number(other))),
        el("div", { class: "scroll" }, grid), status,
        behind(() => table([t("layer"), t("position"), t("token"), t("other_text"), t("effect")],
          layers.flatMap((name, row) => tokens.map((_, column) =>
            [layerName(name), column + first, token(tokens[column]), token(others[column]), effects[row][column]])))))];
  }

  // --- search ---------------------------------------------------------------------------------

  const stopText = (stop) => t("stop_" + stop.kind, ...stop.numbers.map((value) => number(value, Number.isInteger(value) ? 0 : 3)));

  function treeView() {
    const { nodes, best, text, stop, beam_size, rule } = views.search;
    const onBest = new Set(best), counts = new Map(), placed = [];
    const [WIDTH, HEIGHT] = [96, 40];
    nodes.forEach((node) => {
      const row = counts.get(node.step) ?? 0;
      counts.set(node.step, row + 1);
      placed.push([node.step * WIDTH, 24 + row * HEIGHT]);
    });
    const steps = Math.max(0, ...nodes.map((node) => node.step));
    const [width, height] = [(steps + 1) * WIDTH, 24 + HEIGHT * Math.max(0, ...counts.values())];
    const picture = svg("svg", { class: "wide", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": t("search") });
    nodes.forEach((node, i) => {
      const [x, y] = placed[i], [px, py] = node.parent < 0 ? [24, 24] : placed[node.parent];
      picture.append(svg("path", { d: `M${px} ${py}C${px + 40} ${py} ${x - 40} ${y} ${x} ${y}`, fill: "none",
        stroke: onBest.has(i) ? "var(--accent)" : "var(--line)", "stroke-width": onBest.has(i) ? 2.5 : 1 }));
    });
    nodes.forEach((node, i) => {
      const [x, y] = placed[i], isPruned = node.fate === "pruned";
      const shown = named(node.token);
      picture.append(svg("g", {}, svg("rect", { x: x - 36, y: y - 16, width: 72, height: 33, rx: 7, fill: "var(--card)",
        stroke: onBest.has(i) ? "var(--accent)" : "var(--line)", "stroke-dasharray": isPruned ? "3 3" : "none",
        "stroke-width": node.fate === "finished" || node.fate === "cut" ? 2.5 : 1 }),
      svg("text", { x, y: y - 2, "text-anchor": "middle", class: isPruned ? "soft" : "", "font-weight": onBest.has(i) ? 700 : 400 }, shown.length > 9 ? shown.slice(0, 8) + "…" : shown),
      svg("text", { x, y: y + 12, "text-anchor": "middle", class: "soft" }, node.total.toFixed(2)),
      svg("title", {}, `${shown}: ${t("log_prob")} ${number(node.log_prob)}, ${t("total")} ${number(node.total)}, ${t("score")} ${number(node.score)}, ${t(node.fate)}`)));
    });
    return [intro("about_tree", beam_size, rule),
      card(el("p", {}, t("result") + ": ", token(text)), el("p", {}, `${t("ended")}: ${stopText(stop)}${t("sentence_end").trim()}`),
        el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("search") }, picture),
        behind(() => table(["", t("step"), t("parent"), t("token"), t("log_prob"), t("total"), t("score"), t("fate")],
          nodes.map((node, i) => [i, node.step, node.parent < 0 ? "–" : `${node.parent}`, token(node.token), node.log_prob, node.total, node.score, t(node.fate)]))))];
  }

  function stepsView() {
    const { steps, text, stop, seed } = views.search;
    state.step = Math.min(state.step, steps.length - 1);
    const step = steps[state.step];
    return [intro("about_steps"),
      card(el("p", {}, t("result") + ": ", token(text)),
        el("p", { class: "soft" }, `${seed === null ? t("greedy") : `${t("seed")} ${seed}`}${t("sentence_end")}${t("ended")}: ${stopText(stop)}${t("sentence_end").trim()}`),
        el("div", { class: "line" }, steps.map((entry, i) => el("button", { class: "piece" + (i === state.step ? " on" : ""),
          id: `step-${i}`, "aria-pressed": String(i === state.step), onclick: () => set({ step: i }, `step-${i}`) }, token(entry.token))))),
      step ? card(el("h2", {}, `${t("step")} ${state.step + 1}: `, token(step.token), ` (${number(step.probability)})`),
        el("div", { class: "charts" }, step.distributions.map((entry) => el("div", {},
          el("b", {}, t(entry.rule)), el("span", { class: "soft" }, ` · ${entry.num_allowed.toLocaleString()} ${t("allowed")} · ${t("entropy")} ${number(entry.entropy, 2)}`),
          table([t("token"), t("probability"), ""], entry.ids.map((id, i) => [token(entry.tokens[i]), entry.probabilities[i],
            el("div", { style: { width: `${Math.round(140 * entry.probabilities[i])}px`, height: "10px", marginTop: "6px", borderRadius: "3px",
              background: id === step.id ? "var(--accent)" : "var(--faint)" } })])))))) : null];
  }

  // --- embeddings -----------------------------------------------------------------------------

  function embeddingsView() {
    const maps = views.embeddings;
    const entry = maps[Math.min(state.map, maps.length - 1)];
    if (!entry) return [];
    const size = 560, pad = 18;
    const bounds = [0, 1].map((axis) => {
      const values = entry.points.map((point) => point[axis]);
      const [low, high] = [Math.min(...values), Math.max(...values)];
      return [low, high - low || 1];
    });
    const place = (point) => point.map((value, axis) => {
      const share = (value - bounds[axis][0]) / bounds[axis][1];
      return pad + (size - 2 * pad) * (axis ? 1 - share : share);
    });
    const labels = [...new Set(entry.labels)];
    const near = el("div"), circles = [];
    const picture = svg("svg", { class: "dots", viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": t(entry.kind) });
    const names = svg("g");
    function select(index) {
      circles.forEach((circle) => circle.classList.remove("on", "near"));
      circles[index].classList.add("on");
      const marked = [index, ...entry.neighbors[index]];
      entry.neighbors[index].forEach((other) => circles[other].classList.add("near"));
      names.replaceChildren(...marked.map((other) => {
        const [x, y] = place(entry.points[other]), shown = visible(entry.names[other]);
        const side = x > size / 2 ? { x: x - 6, "text-anchor": "end" } : { x: x + 6 };
        return svg("text", { ...side, y: y - 5, "font-weight": other === index ? 700 : 400 }, shown.length > 24 ? shown.slice(0, 23) + "…" : shown);
      }));
      near.replaceChildren(el("p", {}, t("nearest") + " ", token(entry.names[index])),
        table([t("token"), t("cosine")], entry.neighbors[index].map((other, k) =>
          [el("button", { onclick: () => { select(other); near.querySelector("button").focus(); } }, token(entry.names[other])), entry.similarities[index][k]])));
    }
    entry.points.forEach((point, index) => {
      const [x, y] = place(point);
      const circle = svg("circle", { cx: x, cy: y, r: 4, onmouseenter: () => select(index), onclick: () => select(index) },
        svg("title", {}, visible(entry.names[index])));
      if (labels.length) circle.style.fill = `hsl(${(labels.indexOf(entry.labels[index]) * 137) % 360} 60% 50%)`;
      circles.push(circle);
      picture.append(circle);
    });
    picture.append(names);
    const input = el("input", { type: "search", id: "find", oninput: () => {
      const wanted = input.value.toLowerCase();
      const index = wanted ? entry.names.findIndex((name) => name.replaceAll("▁", "").toLowerCase().startsWith(wanted)) : -1;
      const inside = index < 0 && wanted ? entry.names.findIndex((name) => name.toLowerCase().includes(wanted)) : index;
      if (inside >= 0) select(inside); else near.replaceChildren(wanted ? t("none_found") : "");
    } });
    const percent = (value) => (100 * value).toFixed(1) + "%";
    const settings = Object.entries(entry.settings).map(([key, value]) => `${key} ${value}`).join(", ");
    return [intro("about_embeddings"),
      el("div", { class: "controls" }, maps.map((map, index) => el("button", { id: `map-${index}`, "aria-pressed": String(map === entry),
        onclick: () => set({ map: index }, `map-${index}`) }, t(map.kind))), el("label", {}, t("find"), input)),
      card(el("p", { class: "soft" }, `${{ pca: "PCA", tsne: "t-SNE", umap: "UMAP" }[entry.projection]}: ` + (entry.variance.length
        ? t("variance", ...entry.variance.map(percent)) : t("settings", settings)),
      entry.left_out ? ` · ${t("left_out", entry.left_out.toLocaleString())}` : ""),
      labels.length ? el("p", {}, labels.map((label, i) => el("span", { style: { color: `hsl(${(i * 137) % 360} 60% 50%)`, marginRight: "12px" } }, "● ", token(label)))) : null,
      el("div", { class: "split" }, picture, near),
      behind(() => table(["", t("token"), "x", "y", t("nearest")], entry.names.map((name, i) =>
        [i, token(name), ...entry.points[i], token(entry.names[entry.neighbors[i][0]])]))))];
  }

  // --- training -------------------------------------------------------------------------------

  /** A chart over steps, or over the layers of `entry.layers` with a series for each checkpoint. */
  function chart(entry) {
    const layers = entry.layers?.map(layerName);
    const [W, H, left, right, top, bottom] = [520, layers ? 300 : 260, layers ? 92 : 62, 12, 12, layers ? 78 : 30];
    const all = entry.series.flatMap((series) => series.points);
    const steps = all.map((point) => point[0]), values = all.map((point) => point[1]);
    const isLog = Boolean(layers) && Math.min(...values) > 0 && Math.max(...values) > 30 * Math.min(...values);
    const scaled = (value) => (isLog ? Math.log10(value) : value);
    const [x0, x1] = [Math.min(...steps), Math.max(...steps)];
    const [y0, y1] = [layers && !isLog ? 0 : scaled(Math.min(...values)), scaled(Math.max(...values))];
    const x = (step) => left + (W - left - right) * (step - x0) / (x1 - x0 || 1);
    const y = (value) => H - bottom - (H - top - bottom) * (scaled(value) - y0) / (y1 - y0 || 1);
    const color = (i) => (layers ? shade(0.25 + 0.75 * (i + 1) / entry.series.length)
      : i === 0 ? "var(--accent)" : i === 1 ? "var(--warm)" : `hsl(${(i * 67) % 360} 55% 50%)`);
    const seriesName = (series) => (layers ? `${t("step")} ${series.name.toLocaleString()}` : t(series.name));
    const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": t(entry.name) });
    for (let k = 0; k <= 4; k += 1) {
      const height = H - bottom - (H - top - bottom) * k / 4, exact = y0 + (y1 - y0) * k / 4;
      picture.append(svg("line", { class: "axis", x1: left, x2: W - right, y1: height, y2: height }),
        svg("text", { class: "soft", x: left - 6, y: height + 4, "text-anchor": "end" }, tick(isLog ? 10 ** exact : exact)));
      if (!layers) {
        const step = Math.round(x0 + (x1 - x0) * k / 4);
        picture.append(svg("text", { class: "soft", x: x(step), y: H - 8, "text-anchor": k === 4 ? "end" : "middle" }, step.toLocaleString()));
      }
    }
    const stride = layers ? Math.ceil(layers.length / 24) : 1;
    layers?.forEach((name, i) => i % stride || picture.append(svg("text", { class: "soft", "text-anchor": "end",
      transform: `translate(${x(i) + 4} ${H - bottom + 12}) rotate(-40)` }, name.length > 18 ? name.slice(0, 17) + "…" : name)));
    const status = said();
    entry.series.forEach((series, i) => {
      picture.append(svg("path", { d: "M" + series.points.map(([s, v]) => `${x(s).toFixed(1)} ${y(v).toFixed(1)}`).join("L"),
        fill: "none", stroke: color(i), "stroke-width": 1.8 }));
      if (series.points.length < 40) series.points.forEach(([s, v]) => picture.append(svg("circle", { cx: x(s), cy: y(v), r: 2.6, fill: color(i) })));
    });
    const at = (place) => (layers ? layers[place] : `${t("step")} ${place.toLocaleString()}`);
    picture.addEventListener("mousemove", (event) => {
      const box = picture.getBoundingClientRect();
      const place = x0 + ((event.clientX - box.left) / box.width * W - left) / (W - left - right) * (x1 - x0);
      status.textContent = entry.series.map((series) => {
        const point = series.points.reduce((a, b) => (Math.abs(b[0] - place) < Math.abs(a[0] - place) ? b : a));
        return `${seriesName(series)} ${number(point[1], 4)} (${at(point[0])})`;
      }).join(" · ");
    });
    return el("figure", { class: "card" }, el("figcaption", {}, el("b", {}, t(entry.name)), isLog ? ` (${t("logarithmic")})` : "", " ",
      layers || entry.series.length > 1 ? entry.series.map((series, i) => el("span", { style: { color: color(i), marginLeft: "10px", whiteSpace: "nowrap" } }, "— " + seriesName(series))) : null),
    picture, status, behind(() => table([t(layers ? "layer" : "steps"), t("kind"), t("value")],
      entry.series.flatMap((series) => series.points.map(([place, value]) => [layers ? layers[place] : place, seriesName(series), value])))));
  }
  const trainingView = () => [intro("about_training"), el("div", { class: "charts" }, views.training.map(chart))];

  // --- the page -------------------------------------------------------------------------------

  const makers = { tokens: tokensView, attention: attentionView, alignment: alignmentView, lens: lensView,
    attributions: attributionsView, patching: patchingView, embeddings: embeddingsView, training: trainingView,
    search: () => (views.search.kind === "tree" ? treeView() : stepsView()) };
  const names = Object.keys(views).filter((name) => makers[name]);
  function renderView(name) {
    const section = document.getElementById(`view-${name}`);
    section.replaceChildren(el("h2", {}, t(name)), ...makers[name]().flat(3).filter(Boolean));
    section.dataset.drawn = "yes";
  }
  function open(name, focus) {
    state.view = name;
    for (const other of names) {
      const isOpen = other === name;
      const tab = document.getElementById(`tab-${other}`);
      tab.setAttribute("aria-selected", String(isOpen));
      tab.tabIndex = isOpen ? 0 : -1;
      document.getElementById(`view-${other}`).hidden = !isOpen;
    }
    if (!document.getElementById(`view-${name}`).dataset.drawn) renderView(name);
    if (focus) document.getElementById(`tab-${name}`).focus();
  }
  function render(focus) {
    root.lang = state.language === "zh" ? "zh-CN" : "en";
    const app = document.getElementById("app");
    app.replaceChildren(
      el("header", {}, el("div", { class: "top" }, el("h1", {}, visible(data.title)),
        el("div", { class: "controls", style: { margin: "0" } },
          el("button", { id: "language", onclick: () => { state.language = state.language === "en" ? "zh" : "en"; render("language"); } }, t("language")),
          el("button", { id: "theme", onclick: () => { root.classList.toggle("dark"); render("theme"); } }, t("theme")))),
      el("div", { class: "facts" }, Object.entries(data.facts).map(([key, value]) => el("span", {}, `${t(key)} `, el("b", {}, visible(value))))),
      data.notes.map(([key, ...values]) => el("p", { class: "soft note" }, `${t("notes")}: ${t(key, ...values)}${t("sentence_end").trim()}`))),
      el("div", { role: "tablist", "aria-label": t("views"), onkeydown: (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1, Home: -names.indexOf(state.view), End: names.length - 1 - names.indexOf(state.view) }[event.key];
        if (step === undefined) return;
        event.preventDefault();
        open(names[(names.indexOf(state.view) + step + names.length) % names.length], true);
      } }, names.map((name) => el("button", { role: "tab", id: `tab-${name}`, "aria-controls": `view-${name}`, onclick: () => open(name) }, t(name)))),
      ...names.map((name) => el("section", { id: `view-${name}`, role: "tabpanel", "aria-labelledby": `tab-${name}` })));
    open(state.view);
    if (focus) document.getElementById(focus).focus();
  }
  // On paper all views are light.
  let wasDark = false;
  addEventListener("beforeprint", () => {
    wasDark = root.classList.contains("dark");
    root.classList.remove("dark");
    names.forEach((name) => { if (wasDark || !document.getElementById(`view-${name}`).dataset.drawn) renderView(name); });
  });
  addEventListener("afterprint", () => {
    if (!wasDark) return;
    root.classList.add("dark");
    names.forEach(renderView);
  });
  render();
})();
