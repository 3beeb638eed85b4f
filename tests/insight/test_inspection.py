"""Inspection of models of all families against forward passes written here with einsum."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backend_models import model_of
from heedful import insight
from heedful.errors import UserError
from heedful.insight.alignment import align
from heedful.insight.attention_maps import summarize
from heedful.insight.watching import stacks_of

TEXT, TARGET = "the cat sat", "a dog ran"
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-5}
FAMILIES = ["vaswani2017", "gpt2", "bert-mlm", "bert-classify"]
KINDS = {"bert-mlm": {"head": "mlm"}, "bert-classify": {"head": "classify"}}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Tiny random models in fp64."""
    made = {name: model_of(name.split("-")[0], **KINDS.get(name, {})) for name in FAMILIES}
    for model in made.values():
        model.net.double()
    return made


def inputs_of(name: str) -> dict[str, Any]:
    return {"target": TARGET} if name == "vaswani2017" else {}


@dataclass
class Own:
    """Attention weights by name, the states after each layer, and logits, by einsum alone."""

    patterns: dict[str, Tensor]
    states: dict[str, list[Tensor]]
    logits: Tensor


def own_attention(layer: Any, x: Tensor, keys: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output (T, D) and weights (H, T, K) from the matrices of an attention."""
    heads = layer.num_heads
    if hasattr(layer, "qkv"):
        matrices = layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3)
    else:
        matrices = (
            (layer.q.weight, *layer.kv.weight.chunk(2)),
            (layer.q.bias, *layer.kv.bias.chunk(2)),
        )
    query, key, value = (
        (torch.einsum("td,ed->te", states, matrix) + bias).unflatten(1, (heads, -1))
        for states, matrix, bias in zip((x, keys, keys), *matrices, strict=True)
    )
    scores = torch.einsum("the,khe->htk", query, key) / math.sqrt(query.size(-1))
    if causal:
        scores = scores + torch.full(scores.shape[1:], -math.inf).triu(1)
    weights = torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True)
    out = torch.einsum("htk,khe->the", weights, value).flatten(1)
    return torch.einsum("te,de->td", out, layer.out.weight) + layer.out.bias, weights


def own_feedforward(layer: Any, x: Tensor) -> Tensor:
    hidden = torch.einsum("td,fd->tf", x, layer.up.weight) + layer.up.bias
    name = layer.activation.__name__ if hasattr(layer.activation, "__name__") else "?"
    hidden = layer.activation(hidden) if name != "relu" else hidden.clamp(min=0)
    return torch.einsum("tf,df->td", hidden, layer.down.weight) + layer.down.bias


def own_norm(norm: Any, x: Tensor) -> Tensor:
    if isinstance(norm, nn.Identity):
        return x
    centered = x - x.mean(-1, keepdim=True)
    scale = (centered.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return centered * scale * norm.weight + norm.bias


def own_stack(
    own: Own, name: str, stack: Any, x: Tensor, causal: bool, memory: Tensor | None = None
) -> Tensor:
    own.states[name] = [x]
    for index, block in enumerate(stack.blocks):
        for part in ("self_attention", "cross_attention", "feedforward"):
            residual = getattr(block, part)
            if residual is None:
                continue
            is_post = type(residual).__name__ == "PostNorm"
            y = x if is_post else own_norm(residual.norm, x)
            if part == "feedforward":
                y = own_feedforward(residual.sublayer, y)
            else:
                keys = y if part == "self_attention" else memory
                is_causal = causal and part == "self_attention"
                y, weights = own_attention(residual.sublayer, y, keys, is_causal)
                own.patterns[f"{name}.{index}.{part}"] = weights
            x = own_norm(residual.norm, x + y) if is_post else x + y
        own.states[name].append(x)
    return own_norm(stack.final_norm, x)


def own_embedding(embedding: Any, ids: list[int]) -> Tensor:
    rows = torch.arange(len(ids)) + getattr(embedding.positions, "offset", 0)
    x = embedding.tokens.weight[ids] * embedding.scale + embedding.positions.weight[rows]
    if embedding.types is not None:
        x = x + embedding.types.weight[0]
    return own_norm(embedding.norm, x)


def own_head(net: Any, x: Tensor) -> Tensor:
    head = net.head
    if hasattr(head, "labels"):
        hidden = torch.tanh(torch.einsum("d,ed->e", x[0], head.dense.weight) + head.dense.bias)
        return (torch.einsum("e,ce->c", hidden, head.labels.weight) + head.labels.bias)[None]
    if not isinstance(head.transform, nn.Identity):
        dense = head.transform.dense
        x = torch.einsum("td,ed->te", x, dense.weight) + dense.bias
        x = own_norm(head.transform.norm, head.transform.activation(x))
    logits = torch.einsum("td,vd->tv", x, head.out.weight)
    return logits if head.out.bias is None else logits + head.out.bias


def own_forward(name: str, model: Any, ids: dict[str, list[int]]) -> Own:
    with torch.no_grad():
        return own_pass(name, model, ids)


def own_pass(name: str, model: Any, ids: dict[str, list[int]]) -> Own:
    """`own_forward`, differentiable."""
    own, net = Own({}, {}, torch.empty(0)), model.net
    if name == "vaswani2017":
        x = own_embedding(net.src_embedding, ids["source"])
        memory = own_stack(own, "encoder", net.encoder, x, False)
        x = own_embedding(net.tgt_embedding, ids["target"])
        x = own_stack(own, "decoder", net.decoder, x, True, memory)
    else:
        stack = "decoder" if name == "gpt2" else "encoder"
        x = own_embedding(net.embedding, ids["text"])
        x = own_stack(own, stack, getattr(net, stack), x, stack == "decoder")
    own.logits = own_head(net, x)
    return own


def own_ids(name: str, model: Any) -> dict[str, list[int]]:
    tokenizer = model.tokenizer
    if name == "vaswani2017":
        source = [*tokenizer.encode(TEXT), tokenizer.eos_id]
        return {"source": source, "target": [tokenizer.bos_id, *tokenizer.encode(TARGET)]}
    ids = tokenizer.encode(TEXT)
    return {"text": [tokenizer.bos_id, *ids, tokenizer.eos_id] if "bert" in name else ids}


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_equals_an_einsum_forward(models: dict[str, Any], name: str) -> None:
    model, ids = models[name], own_ids(name, models[name])
    own = own_forward(name, model, ids)
    actual = insight.attention(model, TEXT, **inputs_of(name))
    named = {
        f"{'decoder' if part == 'cross' else part}.{layer}."
        f"{'cross' if part == 'cross' else 'self'}_attention": weights
        for part, attention_map in actual.maps.items()
        for layer, weights in enumerate(attention_map.weights)
    }
    assert named.keys() == own.patterns.keys()
    for key, weights in own.patterns.items():
        np.testing.assert_allclose(named[key], weights, **CLOSE)
    for attention_map in actual.maps.values():  # no padding, and no key without a token
        shape = len(attention_map.queries), len(attention_map.keys)
        assert attention_map.weights.shape[2:] == shape
        np.testing.assert_allclose(attention_map.weights.sum(-1), 1, **CLOSE)
    if name == "vaswani2017":
        assert actual["cross"].keys == tuple(model.tokenizer.tokens(ids["source"]))
        assert actual.target[-1] == "</s>"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_logit_lens_equals_an_einsum_forward(models: dict[str, Any], name: str) -> None:
    model = models[name]
    own = own_forward(name, model, own_ids(name, model))
    lens = insight.logit_lens(model, TEXT, **inputs_of(name), top_k=3)
    stack = [*stacks_of(model.net)][-1]
    final = own.logits.argmax(-1)
    assert len(lens.layers) == len(own.states[stack]) == 3
    for row, state in enumerate(own.states[stack]):
        norm = getattr(model.net, stack).final_norm
        logits = own_head(model.net, own_norm(norm, state)).detach()
        probabilities = logits.softmax(-1)
        expected = probabilities.topk(min(3, logits.size(1)), dim=-1)
        np.testing.assert_allclose(lens.probabilities[row], expected.values, **CLOSE)
        assert lens.ids[row].tolist() == expected.indices.tolist()
        for cell, ids in zip(lens.names[row], expected.indices.tolist(), strict=True):
            of_tokens = name != "bert-classify"
            assert [*cell] == (
                model.tokenizer.tokens(ids) if of_tokens else [model.labels[i] for i in ids]
            )
        share = probabilities.gather(1, final[:, None])[:, 0]
        np.testing.assert_allclose(lens.final_probabilities[row], share, **CLOSE)
        order = (-logits).argsort(-1)
        ranks = [1 + order[i].tolist().index(final[i]) for i in range(len(logits))]
        assert lens.ranks[row].tolist() == ranks
    assert lens.ranks[-1].tolist() == [1] * len(final)
    read = [*own_ids(name, model).values()][-1][: len(final)]
    assert lens.positions == tuple(model.tokenizer.tokens(read))
    assert lens.layers == ("embedding", "layer 0", "layer 1")


def own_logit(model: Any, name: str, vectors: dict[str, Tensor], output: Any) -> float:
    """The logit of an output for token embeddings that are given."""
    with torch.no_grad():
        return float(own_value(model, name, vectors, output))


def own_value(model: Any, name: str, vectors: dict[str, Tensor], output: Any) -> Tensor:
    """`own_logit`, differentiable."""
    embeddings = {"source": "src_embedding", "target": "tgt_embedding", "text": "embedding"}
    net, ids = model.net, own_ids(name, model)

    class Rows:
        """An embedding whose rows are the vectors."""

        def __init__(self, side: str) -> None:
            module = getattr(net, embeddings[side])
            self.tokens, self.weight = self, vectors[side]
            for key in ("scale", "positions", "types", "norm"):
                setattr(self, key, getattr(module, key))

    class Net:
        encoder = getattr(net, "encoder", None)
        decoder = getattr(net, "decoder", None)
        head = net.head

    for side in ids:
        setattr(Net, embeddings[side], Rows(side))

    class Holder:
        net = Net

    rows = {side: [*range(len(row))] for side, row in ids.items()}
    return own_pass(name, Holder, rows).logits[output.position, output.id]


@pytest.mark.parametrize("name", ["gpt2", "bert-mlm", "bert-classify", "vaswani2017"])
def test_integrated_gradients_equal_finite_differences(models: dict[str, Any], name: str) -> None:
    """The integral of directional differences along each token's part of the path."""
    model, ids = models[name], own_ids(name, models[name])
    is_smooth = name != "vaswani2017"  # ReLU has kinks, which slow down any quadrature
    actual = insight.attributions(
        model, TEXT, **inputs_of(name), tolerance=1e-7 if is_smooth else 1e-3
    )
    matrix = {
        "source": lambda: model.net.src_embedding, "target": lambda: model.net.tgt_embedding,
        "text": lambda: model.net.embedding,
    }  # fmt: skip
    weights = {side: matrix[side]().tokens.weight.detach() for side in ids}
    ends = {side: weights[side][row] for side, row in ids.items()}
    starts = {side: weights[side].mean(0).expand_as(end) for side, end in ends.items()}
    value, baseline = (own_logit(model, name, v, actual.output) for v in (ends, starts))
    assert actual.value == pytest.approx(value, abs=1e-9)
    assert actual.baseline_value == pytest.approx(baseline, abs=1e-9)
    total = sum(float(scores.sum()) for scores in actual.scores.values())
    assert actual.convergence_error is not None
    assert abs(total - (value - baseline)) <= actual.convergence_error + 1e-9
    assert actual.convergence_error < (1e-6 if is_smooth else 0.01)
    if not is_smooth:
        return
    nodes, factors = np.polynomial.legendre.leggauss(16)
    [side], step = ids, 1e-5
    expected = np.zeros(len(ids[side]))
    for node, factor in zip(nodes, factors, strict=True):
        point = starts[side] + (node + 1) / 2 * (ends[side] - starts[side])
        for token in range(len(point)):
            move = torch.zeros_like(point)
            move[token] = step * (ends[side][token] - starts[side][token])
            high, low = (
                own_logit(model, name, {side: point + sign * move}, actual.output)
                for sign in (1, -1)
            )
            expected[token] += factor / 2 * (high - low) / (2 * step)
    np.testing.assert_allclose(actual.scores[side], expected, **CLOSE)


@pytest.mark.parametrize("name", FAMILIES)
def test_integrated_gradients_equal_those_of_captum(models: dict[str, Any], name: str) -> None:
    """By token embeddings, of the forward pass by einsum, at the nodes of one interval."""
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    from heedful.insight.attribution import explain
    from heedful.insight.reading import read

    model, sides = models[name], [*own_ids(name, models[name])]
    reading = read(model, TEXT, **inputs_of(name))
    actual = explain(reading, None, None, "integrated_gradients", max_intervals=1)
    ends = tuple(reading.vectors(side).detach()[None] for side in sides)
    means = [reading.embedding(side).tokens.weight.detach().mean(0) for side in sides]
    starts = tuple(mean.expand_as(end) for mean, end in zip(means, ends, strict=True))

    def logit(*rows: Tensor) -> Tensor:
        vectors = [dict(zip(sides, row, strict=True)) for row in zip(*rows, strict=True)]
        return torch.stack([own_value(model, name, row, actual.output) for row in vectors])

    expected = captum.IntegratedGradients(logit).attribute(
        ends, starts, n_steps=8, method="gausslegendre"
    )
    for side, scores in zip(sides, expected, strict=True):
        np.testing.assert_allclose(actual.scores[side], scores.sum(-1)[0].detach(), **CLOSE)


@pytest.mark.parametrize("name", ["gpt2", "bert-classify", "vaswani2017"])
def test_occlusion_is_the_fall_of_the_logit(models: dict[str, Any], name: str) -> None:
    model, ids = models[name], own_ids(name, models[name])
    actual = insight.attributions(
        model, TEXT, **inputs_of(name), method="occlusion", baseline="zero"
    )
    names = {"source": "src_embedding", "target": "tgt_embedding", "text": "embedding"}
    ends = {side: getattr(model.net, names[side]).tokens.weight.detach()[row]
            for side, row in ids.items()}  # fmt: skip
    for side in ids:
        falls = []
        for token in range(len(ids[side])):
            rows = {key: end.clone() for key, end in ends.items()}
            rows[side][token] = 0
            falls.append(actual.value - own_logit(model, name, rows, actual.output))
        np.testing.assert_allclose(actual.scores[side], falls, **CLOSE)


def test_outputs_are_chosen_by_name(models: dict[str, Any]) -> None:
    classes = insight.attributions(models["bert-classify"], TEXT, output="bad", method="occlusion")
    assert classes.output == (0, 1, "bad")
    model = models["gpt2"]
    [cat] = model.tokenizer.encode("cat")
    chosen = insight.attributions(model, TEXT, position=0, output="cat", method="occlusion")
    assert (chosen.output.position, chosen.output.name) == (0, "cat")
    following = insight.attributions(model, TEXT, position=0, method="occlusion")
    assert following.output.id == model.tokenizer.encode(TEXT)[1]  # the next token of the text
    for keywords, problem in [
        ({"output": "zebra"}, "is not one token"),
        ({"position": 99}, "there are positions 0 to 2"),
        ({"output": 4000}, "outputs have indices 0 to 39"),
        ({"method": "magic"}, "method must be"),
        ({"baseline": "noise"}, "baseline must be"),
        ({"tolerance": 0}, "tolerance must be"),
    ]:
        with pytest.raises(UserError, match=problem):
            insight.attributions(model, TEXT, **keywords)
    assert cat in range(40)


# --- watch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_watch_reads_every_name_and_leaves_no_hooks(models: dict[str, Any], name: str) -> None:
    model, ids = models[name], own_ids(name, models[name])
    own = own_forward(name, model, ids)
    rows = [torch.tensor([row]) for row in ids.values()]
    with torch.no_grad():
        before = model.net(*rows)
        with insight.watch(model.net) as watched:
            torch.testing.assert_close(model.net(*rows), before)
        assert set(watched) == set(watched.names)
        after = model.net(*rows)
    assert torch.equal(after, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.net.modules())
    for stack, states in own.states.items():
        torch.testing.assert_close(watched[f"{stack}.embedding.state"][0], states[0])
        for layer, state in enumerate(states[1:]):
            torch.testing.assert_close(watched[f"{stack}.{layer}.feedforward.state"][0], state)
    logits = watched["head.logits"]
    torch.testing.assert_close(logits if logits.dim() == 2 else logits[0], own.logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_disabled_head_equals_zeros_in_the_projection(models: dict[str, Any], name: str) -> None:
    model = models[name]
    rows = [torch.tensor([row]) for row in own_ids(name, model).values()]
    stack = [*stacks_of(model.net)][-1]
    attention = getattr(model.net, stack).blocks[1].self_attention.sublayer
    width = attention.head_dim
    with torch.no_grad(), insight.watch(model.net, "head.logits") as watched:
        before = model.net(*rows)
        watched.disable_head(f"{stack}.1.self_attention", 1)
        changed = model.net(*rows)
        watched.restore()
        assert torch.equal(model.net(*rows), before)
        kept = attention.out.weight[:, width : 2 * width].clone()
        attention.out.weight[:, width : 2 * width] = 0
        expected = model.net(*rows)
        attention.out.weight[:, width : 2 * width] = kept
    torch.testing.assert_close(changed, expected)
    assert not torch.allclose(changed, before)


def test_watch_reports_wrong_names_and_shapes(models: dict[str, Any]) -> None:
    net, ids = models["gpt2"].net, torch.tensor([[5, 6, 7]])
    with pytest.raises(UserError, match=r"nothing named decoder\.7"):
        insight.watch(net, "decoder.7.*")
    with pytest.raises(UserError, match="has no stack"):
        insight.watch(nn.Linear(2, 2))
    with insight.watch(net) as watched:
        with pytest.raises(UserError, match="has heads 0 to 1, not 2"):
            watched.disable_head("decoder.0.self_attention", 2)
        watched.change("head.logits", lambda logits: logits[:, :1])
        with pytest.raises(UserError, match="it must keep"):
            net(ids)
        watched.restore()
        watched.patch("decoder.0.feedforward.state", torch.zeros(1, 9, 16), [0])
        with pytest.raises(UserError, match="of the same length"):
            net(ids)


# --- patching -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_patched_embeddings_equal_a_text_with_another_token(
    models: dict[str, Any], name: str
) -> None:
    """At the embedding, a patch at position t is a text whose token t is the other's."""
    model, other = models[name], "a dog sat"
    actual = insight.patching(model, TEXT, other, **inputs_of(name))
    ids = own_ids(name, model)
    side = "source" if name == "vaswani2017" else "text"
    tokens = model.tokenizer.encode(other)
    first = 1 if "bert" in name else 0
    position, output = actual.output.position, actual.output.id
    for index, token in enumerate(tokens):
        changed = [*ids[side]]
        changed[first + index] = token
        logits = own_forward(name, model, {**ids, side: changed}).logits
        expected = logits[position].log_softmax(-1)[output]
        assert actual.log_probs[0, first + index] == pytest.approx(float(expected), abs=1e-9)
    whole = own_forward(
        name, model, {**ids, side: [*ids[side][:first], *tokens, *ids[side][first + len(tokens) :]]}
    )
    assert actual.other_value == pytest.approx(
        float(whole.logits[position].log_softmax(-1)[output]), abs=1e-9
    )
    assert np.abs(actual.effects).max() > 1e-3
    if name == "gpt2":  # the last layer's state of the last position alone decides
        assert actual.log_probs[-1, -1] == pytest.approx(actual.other_value, abs=1e-9)
        np.testing.assert_allclose(actual.effects[-1, :-1], 0, atol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_results_do_not_depend_on_the_rows_of_a_pass(
    models: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> list[Any]:
        patched = insight.patching(models[name], TEXT, "a dog sat", **inputs_of(name))
        occluded = insight.attributions(models[name], TEXT, **inputs_of(name), method="occlusion")
        return [patched.log_probs, *occluded.scores.values()]

    whole = found()
    for module in ("patches", "attribution"):
        monkeypatch.setattr(f"heedful.insight.{module}._ROWS", 2)
    for parts, expected in zip(found(), whole, strict=True):
        np.testing.assert_allclose(parts, expected, rtol=0, atol=1e-9)


def test_patching_needs_texts_of_equal_length(models: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="texts have 3 and 2 tokens"):
        insight.patching(models["gpt2"], TEXT, "the cat")
    with pytest.raises(UserError, match="has the stack decoder, not encoder"):
        insight.patching(models["gpt2"], TEXT, "a dog sat", stack="encoder")


# --- summaries, alignments ------------------------------------------------------------------------


def test_summaries_of_known_heads() -> None:
    """A head on the previous token, one on the first, one on all keys alike."""
    size = 5
    previous = np.eye(size, k=-1)
    previous[0, 0] = 1
    first = np.zeros((size, size))
    first[:, 0] = 1
    alike = np.full((size, size), 1 / size)
    summaries = summarize(np.stack([previous, first, alike])[None], is_cross=False)
    np.testing.assert_allclose(summaries.entropy, [[0, 0, math.log(size)]], atol=1e-12)
    np.testing.assert_allclose(summaries.previous_share, [[1, 1 / 4, 1 / 5]])
    np.testing.assert_allclose(summaries.first_share, [[2 / 5, 1, 1 / 5]])
    np.testing.assert_allclose(summaries.mean_distance, [[4 / 5, 2, 8 / 5]])
    cross = summarize(np.stack([previous])[None], is_cross=True)
    assert np.isnan(cross.mean_distance).all()
    assert np.isnan(cross.previous_share).all()


def test_alignments_do_not_depend_on_the_padding_of_a_batch(models: dict[str, Any]) -> None:
    """They are sums over the tokens of words of weights that the einsum forward has too."""
    model = models["vaswani2017"]
    tokenizer = model.tokenizer
    pairs = [(TEXT, TARGET), ("a", "cats and dogs ran home"), ("the dog sat on the mat", "a")]
    sources = [[*tokenizer.encode(source), tokenizer.eos_id] for source, _ in pairs]
    targets = [[*tokenizer.encode(target), tokenizer.eos_id] for _, target in pairs]
    together = align(model, sources, targets)
    for pair, alignment in zip(pairs, together, strict=True):
        alone = insight.alignments(model, *pair)
        np.testing.assert_allclose(alignment.weights, alone.weights, **CLOSE)
        assert alignment.source == tuple(pair[0].split())
        assert alignment.target == tuple(pair[1].split())
        links = [tuple(map(int, pair.split("-"))) for pair in alignment.pharaoh().split()]
        assert [target for _, target in links] == [*range(len(alignment.target))]
        assert all(alignment.weights[t].argmax() == s for s, t in links)
    ids = {"source": sources[0], "target": [tokenizer.bos_id, *targets[0]]}
    own = own_forward("vaswani2017", model, ids)
    cross = [weights for name, weights in own.patterns.items() if "cross" in name]
    mean = torch.stack(cross).mean((0, 1))[:, :-1]  # without EOS, which the source ends with
    for at, rows in (("output", mean[:-2]), ("input", mean[1:-1])):
        [tokens] = align(model, sources[:1], targets[:1], unit="tokens", at=at)  # type: ignore[arg-type]
        np.testing.assert_allclose(tokens.weights, rows, **CLOSE)
    last = insight.alignments(model, TEXT, TARGET, unit="tokens", layers=[-1])
    np.testing.assert_allclose(last.weights, cross[-1].mean(0)[:-2, :-1], **CLOSE)


def test_words_group_the_tokens_between_spaces(models: dict[str, Any]) -> None:
    from heedful.insight.alignment import words_of

    tokenizer = models["vaswani2017"].tokenizer
    ids = tokenizer.encode("cats  home dogs")
    words, of_ids = words_of(tokenizer, [tokenizer.bos_id, *ids, tokenizer.eos_id])
    assert words == ("cats", "home", "dogs")
    assert (of_ids[0], of_ids[-1]) == (None, None)
    spelled = ["", "", ""]
    for token, word in zip(ids, of_ids[1:-1], strict=True):
        if word is not None:
            spelled[word] += tokenizer.decode([token])
    assert spelled == ["cats", "home", "dogs"]


KINDS_OF_TOKENIZERS = ["bpe", "unigram", "wordpiece", "word", "char", "byte_bpe", "byte"]


@pytest.mark.parametrize("kind", KINDS_OF_TOKENIZERS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the \N{GRINNING FACE} dog runs", ["the", "\N{GRINNING FACE}", "dog", "runs"]),
        ("the do\N{GRINNING FACE}g runs", ["the", "do\N{GRINNING FACE}g", "runs"]),
        ("a \N{DIAERESIS} dog", ["a", "\N{DIAERESIS}", "dog"]),  # NFKC has a space for it
        ("the \N{LATIN SMALL LIGATURE FI}  dog", ["the", "\N{LATIN SMALL LIGATURE FI}", "dog"]),
        ("\N{IDEOGRAPHIC SPACE}the\N{NO-BREAK SPACE}dog ", ["the", "dog"]),
    ],
)
def test_words_are_those_of_the_text_that_was_given(
    kind: str, text: str, expected: list[str]
) -> None:
    """Every word has tokens, in order, whatever is unknown and however the text is normalized."""
    from heedful.data.tokenizer import train_tokenizer
    from heedful.insight.alignment import words_of

    sizes = {"byte_bpe": 290, "bpe": 60, "unigram": 40, "wordpiece": 60}
    lines = ["the dog runs", "a cat sleeps", "find it"]
    tokenizer = train_tokenizer(lines, kind=kind, vocab_size=sizes.get(kind), or_fewer=True)
    ids = [tokenizer.bos_id, *tokenizer.encode_target(tokenizer.encode(text))]
    words, of_ids = words_of(tokenizer, ids, text)
    assert [*words] == expected
    of_text = [word for word in of_ids if word is not None]
    assert [*dict.fromkeys(of_text)] == [*range(len(expected))]
    assert of_text == sorted(of_text)
    # A row that was cut keeps its EOS; its words are those of the whole text.
    cut, of_cut = words_of(tokenizer, [*ids[:3], ids[-1]], text)
    assert (cut, of_cut) == (words, (*of_ids[:3], None))


def test_bytes_of_one_character_and_texts_cut_at_a_stop_belong_to_their_words() -> None:
    from heedful.data.tokenizer import train_tokenizer
    from heedful.insight.alignment import words_of

    tokenizer = train_tokenizer(["a dog"], kind="byte")
    ids = tokenizer.encode("a \N{GRINNING FACE} dog")
    expected = (0, None, 1, 1, 1, 1, None, 2, 2, 2)
    assert words_of(tokenizer, ids) == (("a", "\N{GRINNING FACE}", "dog"), expected)
    cut = words_of(tokenizer, ids, "a \N{GRINNING FACE}")
    assert cut == (("a", "\N{GRINNING FACE}"), (*expected[:6], None, None, None, None))


def test_alignments_count_an_unknown_character_as_a_word(models: dict[str, Any]) -> None:
    model = models["vaswani2017"]
    text, target = "the \N{GRINNING FACE} dog", "a \N{DIAERESIS} dog ran"
    alignment = insight.alignments(model, text, target)
    assert alignment.source == ("the", "\N{GRINNING FACE}", "dog")
    assert alignment.target == ("a", "\N{DIAERESIS}", "dog", "ran")
    assert (alignment.weights[:, 1] > 0).all()


def test_alignment_error_rate_of_a_worked_example() -> None:
    """Och and Ney's formula: A has 3 links, 1 sure and 1 possible; S has 2."""
    actual = [frozenset({(0, 0), (1, 1), (2, 2)})]
    sure, possible = [frozenset({(0, 0), (3, 3)})], [frozenset({(1, 1)})]
    assert insight.alignment_error_rate(actual, sure, possible) == pytest.approx(1 - 3 / 5)
    assert insight.alignment_error_rate(sure, sure) == 0
    assert insight.alignment_error_rate([frozenset()], sure) == 1


# --- bad input ------------------------------------------------------------------------------------


def test_a_multi_label_classifier_has_a_probability_for_each_class() -> None:
    model = model_of("bert", head="classify")
    model.metadata = replace(model.metadata, problem="multi_label")
    expected = model.classify(TEXT).probabilities
    lens = insight.logit_lens(model, TEXT, top_k=2)
    actual = dict(zip(lens.names[-1][0], lens.probabilities[-1, 0], strict=True))
    assert actual == pytest.approx(expected, abs=1e-5)
    assert lens.final_probabilities[-1, 0] == pytest.approx(max(expected.values()), abs=1e-5)
    patched = insight.patching(model, TEXT, "the dog ran", output="bad")
    assert patched.value == pytest.approx(math.log(expected["bad"]), abs=1e-5)


def test_a_regression_has_values_and_no_probabilities() -> None:
    model = model_of("bert", head="classify")
    model.metadata = replace(model.metadata, problem="regression")
    for call in (
        lambda: insight.logit_lens(model, TEXT),
        lambda: insight.patching(model, TEXT, "the dog ran", output="bad"),
    ):
        with pytest.raises(UserError, match="values, not probabilities"):
            call()
    value = insight.attributions(model, TEXT, output="bad").value
    assert value == pytest.approx(model.classify(TEXT).values["bad"], abs=1e-5)


def test_a_word_without_tokens_has_no_link(models: dict[str, Any]) -> None:
    """A zero-width space, which the normalization of the tokenizer leaves out."""
    alignment = insight.alignments(models["vaswani2017"], TEXT, "a \u200b dog")
    assert alignment.target == ("a", "\u200b", "dog")
    assert not alignment.weights[1].any()
    assert {target for _, target in alignment.links} == {0, 2}


def test_bad_input_is_refused_in_one_line(models: dict[str, Any]) -> None:
    gpt, translator = models["gpt2"], models["vaswani2017"]
    for call, problem in [
        (lambda: insight.attention(gpt, TEXT, TARGET), "a target is for encoder-decoders"),
        (lambda: insight.attention(gpt, TEXT, beam_siz=3), "beam_siz"),
        (lambda: insight.attention(translator, "  "), "the text is empty"),
        (lambda: insight.attention(gpt, "cat " * 60), "tokens, but the model allows 48"),
        (lambda: insight.attention(translator, TEXT, "cat " * 60), "target 1 has"),
        (lambda: insight.attention(gpt, TEXT)["cross"], "attention in decoder, not in cross"),
        (lambda: insight.attention(gpt, TEXT)["decoder"].plot(2), "there are layers 0 to 1"),
        (lambda: insight.attention(gpt, TEXT)["decoder"].plot(0, 5), "there are heads 0 to 1"),
        (lambda: insight.logit_lens(gpt, TEXT, top_k=0), "top_k must be at least 1"),
        (lambda: insight.alignments(gpt, TEXT), "alignments need a translator"),
        (lambda: insight.alignments(translator, TEXT, unit="lines"), "unit must be"),
        (lambda: insight.alignments(translator, TEXT, at="end"), "at must be"),
        (lambda: insight.alignments(translator, TEXT, layers=[4]), "there are layers 0 to 1"),
        (lambda: insight.alignments(translator, TEXT, layers=[]), "layers are empty"),
        (lambda: insight.sampling_steps(gpt, TEXT, top_k_shown=0), "top_k_shown must be"),
        (lambda: insight.search_tree(models["bert-mlm"], TEXT), "has no search"),
        (lambda: insight.search_tree(gpt, TEXT, temperature=1.0), "a sample is no beam search"),
        (lambda: insight.sampling_steps(gpt, TEXT, beam_size=3), "is shown as a tree"),
        (lambda: insight.sampling_steps(gpt, TEXT, draft="lookup"), "with draft is not shown"),
        (
            lambda: insight.search_tree(gpt, TEXT, beam_size=2, require=["a"]),
            "with require is not shown; leave require out",
        ),
        (
            lambda: insight.search_tree(gpt, TEXT, beam_size=4, num_groups=2),
            "diverse beams are not shown; leave num_groups out",
        ),
        (lambda: insight.embedding_map(gpt, "layers"), "kind must be"),
        (lambda: insight.embedding_map(gpt, side="src"), "side must be source, target"),
        (lambda: insight.embedding_map(gpt, "sentences"), "needs a list of texts"),
        (lambda: insight.embedding_map(gpt, "tokens", limit=2), "limit must be at least 3"),
    ]:
        with pytest.raises(UserError, match=problem) as raised:
            call()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_results_are_drawn(models: dict[str, Any], name: str) -> None:
    """Hostile tokens are no markup of matplotlib, which would be an error when it is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    def hostile(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"\n$\\q${token}" for token in names)

    model = models[name]
    lens = insight.logit_lens(model, TEXT, **inputs_of(name))
    cells = tuple(tuple(hostile(cell) for cell in row) for row in lens.names)
    lens = replace(lens, positions=hostile(lens.positions), names=cells)
    occluded = insight.attributions(model, TEXT, **inputs_of(name), method="occlusion")
    tokens = {side: hostile(row) for side, row in occluded.tokens.items()}
    figures = [lens.plot(), replace(occluded, tokens=tokens).plot()]
    for part in insight.attention(model, TEXT, **inputs_of(name)).maps.values():
        part = replace(part, queries=hostile(part.queries), keys=hostile(part.keys))
        figures.append(part.plot(0, 1))
    for figure in figures:
        FigureCanvasAgg(figure).draw()
    texts = [text.get_text() for text in lens.plot().axes[0].texts]
    assert len(texts) == len(lens.layers) * len(lens.positions)
    assert not any("\n" in text for text in texts)
