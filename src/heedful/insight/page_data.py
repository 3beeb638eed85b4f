"""The content of an inspection page as JSON: every view of one text, with its sizes capped."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.insight.alignment import align
from heedful.insight.attention_maps import AttentionMap, attention
from heedful.insight.attribution import Attributions, explain
from heedful.insight.embeddings import EmbeddingMap, Projection, embedding_map
from heedful.insight.logit_lenses import logit_lens
from heedful.insight.notes import Note
from heedful.insight.patches import Patching, patch_outputs, read_other
from heedful.insight.reading import Reading, check_index, read
from heedful.insight.search_trees import sampling_steps, search_tree
from heedful.insight.watching import stacks_of
from heedful.pipelines.base import SavedModel
from heedful.pipelines.encoders import Classifier
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.requests import options_for_ids
from heedful.pipelines.text_generation import Generator
from heedful.pipelines.translation import Translator
from heedful.progress import track

MAX_TOKENS = 96  # of a side that is shown
MAX_WEIGHTS = 4_000_000  # attention weights of a page, a byte each before base64
MAX_OUTPUTS = 8  # that are explained
MAX_INTERVALS = 6  # of an integral; its error is on the page
MAX_STEPS = 24  # of a search that is shown
MAX_POINTS = 600  # of a map of embeddings
Views = dict[str, Any]


@dataclass(frozen=True)
class PageOptions:
    """Choices of a page.

    Attributes:
        layers, heads: of the attention that is shown; None: all.
        first, last: range of the tokens of each side that are shown; `last` None: up to the limit.
        patch_from: a text with the same number of tokens, see `patching`.
        sentences, labels: texts of the map of sentences.
        projection: of the maps of embeddings.
        seed: of t-SNE and UMAP.
        generation: options of the output (`heedful.options.Options`).
    """

    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    first: int = 0
    last: int | None = None
    patch_from: str | None = None
    sentences: Sequence[str] = ()
    labels: Sequence[str] = ()
    projection: Projection = "pca"
    seed: int = 0
    generation: dict[str, Any] = field(default_factory=dict)


def views_of_text(
    model: SavedModel, text: str, target: str | None, options: PageOptions
) -> tuple[Views, list[Note]]:
    """All views of a text by a model, and notes on omitted parts.

    Raises:
        UserError: as in `attention`; no such layer, head or range of tokens.
    """
    reading = read(model, text, target, **options.generation)
    window = _window(reading, options)
    outputs = [token for token in reading.outputs if token is not None]
    ids: Any = reading.ids[next(iter(reading.ids))]
    target_ids = {"target": outputs} if isinstance(model, Translator) else {}
    inputs: Any = {"text": list(ids), **target_ids}
    views: Views = {"tokens": _tokens(reading, text, target)}
    notes: list[Note] = []
    others = None
    if options.patch_from is not None:
        if model.net.head is None:
            raise UserError(
                "patching measures an output, and this model has no output head, only states; "
                "leave out the text to patch from"
            )
        others = read_other(reading, options.patch_from, **options.generation)
    longest = max(map(len, reading.ids.values()))
    if window.stop - window.start < longest:
        notes.append(Note("note_tokens", (window.start, window.stop - 1, longest)))
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("attention", lambda: _attention(model, inputs, window, options, notes)),
    ]
    if isinstance(model, Translator) and outputs:
        steps.append(("alignment", lambda: _alignment(model, ids, outputs, window)))
    if model.net.head is not None:
        explained = _chosen_outputs(reading, window, notes)
        if reading.is_regression:
            notes.append(Note("note_regression"))
        else:
            steps.append(("lens", lambda: _lens(model, inputs, window)))
        steps.append(("attributions", lambda: _attributions(reading, explained, window)))
        if others is not None:
            steps.append(("patching", lambda: _patching(reading, others, explained, window)))
    if isinstance(model, Generator):
        steps.append(("search", lambda: _search(model, list(ids), options.generation, notes)))
    steps.append(("embeddings", lambda: _embeddings(model, options, notes)))
    with track("inspecting", len(steps)) as advance:
        for name, make in steps:
            if view := make():  # a side may have no tokens in the window
                views[name] = view
            advance(1)
    return views, notes


def _window(reading: Reading, options: PageOptions) -> range:
    """The tokens of each side that are shown."""
    longest = max(map(len, reading.ids.values()))
    last = longest if options.last is None else options.last
    if not 0 <= options.first < min(last, longest):
        raise UserError(
            f"tokens {options.first} to {last - 1} are not in the text, which has {longest}: give "
            f"first=FIRST and last=LAST with FIRST below LAST, from 0 to {longest}"
        )
    return range(options.first, min(last, longest, options.first + MAX_TOKENS))


def _tokens(reading: Reading, text: str, target: str | None) -> list[dict[str, Any]]:
    """For each side its text, its normalized text, and its pieces with ids and bytes."""
    sides = []
    for side, ids in reading.ids.items():
        is_source = side != "target"
        tokenizer: Tokenizer = (
            reading.model.src_tokenizer if is_source else reading.model.tgt_tokenizer
        )
        written = text if is_source else target
        sides.append(
            {
                "side": side,
                "text": written,
                "normalized": None if written is None else tokenizer.normalize(written),
                "pieces": [
                    {
                        "token": token,
                        "id": i,
                        "bytes": _bytes_of(tokenizer, i).hex(" "),
                        "special": i in tokenizer.special_ids,
                        "unknown": i == tokenizer.unk_id,
                    }
                    for token, i in zip(reading.tokens[side], ids, strict=True)
                ],
            }
        )
    return sides


def _bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes that a token adds to a text; of a special token, those of its name."""
    piece = tokenizer.piece(token)
    own = None if token in tokenizer.special_ids else tokenizer.spelling.to_bytes(piece)
    return tokenizer.decode([token], keep_specials=True).encode() if own is None else own


def _attention(
    model: SavedModel,
    inputs: dict[str, Any],
    window: range,
    options: PageOptions,
    notes: list[Note],
) -> list[dict[str, Any]]:
    maps = [*attention(model, **inputs).maps.values()]
    total = len(maps) and sum(
        m.num_layers * m.num_heads * min(len(window), len(m.queries)) ** 2 for m in maps
    )
    stride = 1
    if options.layers is None and total > MAX_WEIGHTS:
        stride = -(-total // MAX_WEIGHTS)
        notes.append(Note("note_layers", (stride,)))
    parts = [_attention_part(m, window, options, stride) for m in maps]
    return [part for part in parts if part["queries"] and part["keys"]]


def _attention_part(
    attention_map: AttentionMap, window: range, options: PageOptions, stride: int
) -> dict[str, Any]:
    count, heads = attention_map.num_layers, attention_map.num_heads
    layers = (
        [*range(0, count, stride)]
        if options.layers is None
        else [check_index("layer", layer, count) for layer in options.layers]
    )
    shown_heads = (
        [*range(heads)]
        if options.heads is None
        else [check_index("head", head, heads) for head in options.heads]
    )
    shown = slice(window.start, window.stop)
    weights = attention_map.weights[np.ix_(layers, shown_heads)][..., shown, shown]
    summaries = {
        name: _rounded(values[np.ix_(layers, shown_heads)])
        for name, values in attention_map.summaries._asdict().items()
    }
    return {
        "part": attention_map.part,
        "first": window.start,
        "layers": layers,
        "heads": shown_heads,
        "queries": attention_map.queries[shown],
        "keys": attention_map.keys[shown],
        "weights": base64.b64encode(np.rint(weights * 255).astype(np.uint8).tobytes()).decode(),
        "summaries": summaries,
    }


def _alignment(
    model: Translator, source: Sequence[int], outputs: list[int], window: range
) -> dict[str, Any]:
    [alignment] = align(model, [source], [outputs], unit="tokens")
    # A target token is shown with the position that predicts it.
    first = len(model.ids.decoder_start_ids) - 1
    columns = _aligned_in(model.src_tokenizer, source, window)
    rows = _aligned_in(
        model.tgt_tokenizer, outputs, range(window.start - first, window.stop - first)
    )
    if not rows or not columns:
        return {}
    positions = _positions(model.src_tokenizer, source), _positions(model.tgt_tokenizer, outputs)
    return {
        "numbers": {
            "source": [positions[0][column] for column in columns],
            "target": [positions[1][row] + first for row in rows],
        },
        "source": [alignment.source[column] for column in columns],
        "target": [alignment.target[row] for row in rows],
        "weights": _rounded(alignment.weights[np.ix_(rows, columns)]),
    }


def _aligned_in(tokenizer: Tokenizer, ids: Sequence[int], window: range) -> list[int]:
    """Indices, among the tokens that are not special, of those at positions of a range."""
    positions = _positions(tokenizer, ids)
    return [index for index, position in enumerate(positions) if position in window]


def _positions(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The positions of the tokens that are not special."""
    return [p for p, token in enumerate(ids) if token not in tokenizer.special_ids]


def _lens(model: SavedModel, inputs: dict[str, Any], window: range) -> dict[str, Any]:
    lens = logit_lens(model, **inputs, top_k=5)
    is_single = isinstance(model, Classifier)
    shown = slice(None) if is_single else slice(window.start, window.stop)
    if not lens.positions[shown]:
        return {}
    return {
        "first": 0 if is_single else window.start,
        "layers": lens.layers,
        "positions": lens.positions[shown],
        "names": [row[shown] for row in lens.names],
        "probabilities": _rounded(lens.probabilities[:, shown]),
        "ranks": lens.ranks[:, shown].tolist(),
        "final": _rounded(lens.final_probabilities[:, shown]),
    }


def _chosen_outputs(
    reading: Reading, window: range, notes: list[Note]
) -> list[tuple[int, str | int | None]]:
    """Position and name of the outputs that are explained; None: the output that the text has."""
    if isinstance(reading.model, Classifier):
        labels = reading.model.labels
        if len(labels) > MAX_OUTPUTS:
            notes.append(Note("note_outputs", (MAX_OUTPUTS,)))
        return [(0, label) for label in labels[:MAX_OUTPUTS]]
    positions = [index for index in range(len(reading.outputs)) if index in window]
    if isinstance(reading.model, LanguageModel) and len(positions) > MAX_OUTPUTS:
        positions = positions[-MAX_OUTPUTS:]
        notes.append(Note("note_last_outputs", (MAX_OUTPUTS,)))
    masks = [index for index in positions if reading.outputs[index] is None]
    if not isinstance(reading.model, Generator) and masks:
        positions = masks
    if len(positions) > MAX_OUTPUTS:
        notes.append(Note("note_outputs", (MAX_OUTPUTS,)))
    return [(position, None) for position in positions[:MAX_OUTPUTS]]


def _attributions(
    reading: Reading, chosen: list[tuple[int, str | int | None]], window: range
) -> list[dict[str, Any]]:
    """Both methods for the outputs that are explained."""
    entries = []
    for position, output in chosen:
        exact = explain(
            reading,
            position,
            output,
            "integrated_gradients",
            tolerance=0.01,
            max_intervals=MAX_INTERVALS,
        )
        occluded = explain(reading, position, output, "occlusion")
        entries.append(_attribution_entry(exact, occluded, window))
    return entries


def _attribution_entry(
    exact: Attributions, occluded: Attributions, window: range
) -> dict[str, Any]:
    shown = slice(window.start, window.stop)
    return {
        "output": exact.output.name,
        "position": exact.output.position,
        "value": exact.value,
        "baseline": exact.baseline_value,
        "sum": float(sum(scores.sum() for scores in exact.scores.values())),
        "error": exact.convergence_error,
        "sides": [
            {
                "side": side,
                "tokens": tokens[shown],
                "gradients": _rounded(exact.scores[side][shown]),
                "occlusion": _rounded(occluded.scores[side][shown]),
            }
            for side, tokens in exact.tokens.items()
        ],
    }


def _patching(
    reading: Reading,
    others: Reading,
    chosen: list[tuple[int, str | int | None]],
    window: range,
) -> list[dict[str, Any]]:
    """The effects of each state of the other text on each output, for each stack."""
    return [
        _patching_entry(patched, window)
        for stack in stacks_of(reading.net)
        for patched in patch_outputs(reading, others, stack, chosen)
    ]


def _patching_entry(patched: Patching, window: range) -> dict[str, Any]:
    shown = slice(window.start, window.stop)
    return {
        "output": patched.output.name,
        "position": patched.output.position,
        "stack": patched.stack,
        "first": window.start,
        "layers": patched.layers,
        "tokens": patched.tokens[shown],
        "others": patched.other_tokens[shown],
        "effects": _rounded(patched.effects[:, shown]),
        "value": patched.value,
        "other": patched.other_value,
    }


def _search(
    model: Generator, row: list[int], generation: dict[str, Any], notes: list[Note]
) -> dict[str, Any]:
    options = options_for_ids(model, generation)
    settled = model.options(**options)
    if settled.by_beams:
        tree = search_tree(model, row, **options)
        if any(node.step > MAX_STEPS for node in tree.nodes):
            notes.append(Note("note_steps", (MAX_STEPS,)))
        nodes = [node for node in tree.nodes if node.step <= MAX_STEPS]
        return {
            "kind": "tree",
            "nodes": [{k: _plain(v) for k, v in asdict(node).items()} for node in nodes],
            "best": [index for index in tree.best if index < len(nodes)],
            "text": tree.text,
            "stop": asdict(tree.stop),
            "beam_size": tree.beam_size,
            "rule": tree.stop_rule,
        }
    is_limited = settled.max_new_tokens is None
    if is_limited:
        options = {**options, "max_new_tokens": MAX_STEPS}
    trace = sampling_steps(model, row, **options)
    if len(trace.steps) > MAX_STEPS or (is_limited and trace.stop.kind == "length"):
        notes.append(Note("note_steps", (MAX_STEPS,)))
    steps = [asdict(step) for step in trace.steps[:MAX_STEPS]]
    for step in steps:
        for distribution in step["distributions"]:
            distribution["probabilities"] = _rounded(np.array(distribution["probabilities"]))
    return {
        "kind": "steps",
        "steps": steps,
        "text": trace.text,
        "stop": asdict(trace.stop),
        "seed": trace.seed,
    }


def _embeddings(model: SavedModel, options: PageOptions, notes: list[Note]) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"projection": options.projection, "seed": options.seed}
    maps = []
    for kind in ("tokens", "positions"):
        try:
            maps.append(embedding_map(model, kind, limit=MAX_POINTS, **settings))
        except UserError:  # without a table of positions
            if kind == "tokens":
                raise
    if options.sentences:
        settings |= {"texts": options.sentences, "labels": options.labels}
        maps.append(embedding_map(model, "sentences", limit=MAX_POINTS, **settings))
    return [_embedding_entry(entry) for entry in maps]


def _embedding_entry(entry: EmbeddingMap) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "names": entry.names,
        "ids": entry.ids,
        "points": _rounded(entry.points),
        "projection": entry.projection,
        "variance": entry.variance,
        "settings": entry.settings,
        "neighbors": entry.neighbors.tolist(),
        "similarities": _rounded(entry.similarities, 3),
        "labels": entry.labels,
        "left_out": entry.num_left_out,
    }


def _plain(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _rounded(values: np.ndarray, digits: int = 4) -> Any:
    """Nested lists of rounded numbers; None for NaN and infinities, which JSON lacks."""
    rounded = np.round(values.astype(np.float64), digits)
    shown = rounded.astype(object)
    shown[~np.isfinite(rounded)] = None
    return shown.tolist()
