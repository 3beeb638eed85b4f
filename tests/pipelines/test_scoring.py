"""Scores of texts: one definition, in fp32 at least, independent of the batch."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from architectures import SIZES, config_of
from backend_models import TEXTS, VOCAB, model_of
from heedful.backends.torch.eager import Eager
from heedful.data.collate import Batch
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError
from heedful.evaluation import likelihood
from heedful.pipelines import GenerationIds, ModelMetadata, open_net
from heedful.pipelines.scoring import TextScore
from heedful.zoo import architecture

WRITERS = ["vaswani2017", "t5", "gpt2", "llama"]
TWO_STACKS = {"vaswani2017", "t5"}
ROWS = st.lists(st.lists(st.integers(4, VOCAB - 1), min_size=2, max_size=9), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: model_of(name) for name in WRITERS}


def reference(model: Any, row: list[int], target: list[int]) -> torch.Tensor:
    """Log-probabilities in fp64 of one target, or of one text without its first token."""
    if not target and len(row) < 2:  # nothing precedes the only token
        return torch.zeros(0)
    with torch.inference_mode():
        if not target:
            logits = model.net(torch.tensor([row[:-1]]))[0]
            ids = row[1:]
        else:
            ids, start = [*target, model.end_ids()[0]], list(model.ids.decoder_start_ids)
            logits = model.net(torch.tensor([row]), torch.tensor([[*start, *target]]))[0]
            logits = logits[len(start) - 1 :]
    return logits.double().log_softmax(-1)[range(len(ids)), ids]


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=15, deadline=None)
@given(rows=ROWS, batch_tokens=st.integers(1, 60), data=st.data())
def test_a_score_depends_on_neither_the_batch_nor_its_size(
    models: dict[str, Any], name: str, rows: list[list[int]], batch_tokens: int, data: st.DataObject
) -> None:
    model = models[name]
    texts = [model.src_tokenizer.decode(row) for row in rows]
    order = data.draw(st.permutations(range(len(rows))))
    # Shuffled, in batches of any size; the reference is each text alone.
    given_texts: list[Any] = [[texts[i] for i in order]]
    alone = []
    for i in order:
        source = model.src_tokenizer.encode_target(model.src_tokenizer.encode(texts[i]))
        if name in TWO_STACKS:
            alone.append(reference(model, source, source[:-1]))
        else:
            alone.append(reference(model, model.prompt_ids([texts[i]])[0], []))
    if name in TWO_STACKS:
        given_texts *= 2
    actual = model.score(*given_texts, batch_tokens=batch_tokens)
    assert [item.num_tokens for item in actual] == [len(item) for item in alone]
    expected = [float(item.sum()) for item in alone]
    assert [item.log_prob for item in actual] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("batch_tokens", [1, 40, 10**6])
def test_a_scored_batch_has_at_most_batch_tokens_or_one_text(
    models: dict[str, Any], name: str, batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes, plain = models[name], [], Eager.target_scores

    def noted(backend: Eager, batch: Batch) -> Any:
        sides = [batch.tokens] if batch.source is None else [batch.tokens, batch.source]
        sizes.append(sum(side.ids.numel() for side in sides))
        return plain(backend, batch)

    monkeypatch.setattr(Eager, "target_scores", noted)
    texts, num_sides = TEXTS * 3, 2 if name in TWO_STACKS else 1
    model.score(*[texts] * num_sides, batch_tokens=batch_tokens)
    longest = num_sides * max(len(row) + 1 for row in model.src_tokenizer.encode_batch(texts))
    assert max(sizes) <= max(batch_tokens, longest)
    assert (len(sizes) == 1) is (batch_tokens == 10**6)


@pytest.mark.parametrize("name", WRITERS)
def test_a_bf16_models_scores_are_summed_in_fp32(name: str) -> None:
    model = model_of(name)
    model.net.bfloat16()
    texts = [" ".join(TEXTS)] * 2
    source = model.src_tokenizer.encode_target(model.src_tokenizer.encode(texts[0]))
    row = source if name in TWO_STACKS else model.prompt_ids(texts)[0]
    # The logits are those of bf16; everything after them is exact.
    expected = float(reference(model, row, source[:-1] if name in TWO_STACKS else []).sum())
    actual = model.score(*([texts] * (2 if name in TWO_STACKS else 1)))
    assert [item.log_prob for item in actual] == pytest.approx([expected] * 2, rel=2e-3)
    assert all(float(torch.tensor(item.log_prob).bfloat16()) != item.log_prob for item in actual)


@pytest.mark.parametrize("name", WRITERS)
def test_score_and_the_backends_log_probs_are_the_same_numbers(
    models: dict[str, Any], name: str
) -> None:
    model = models[name]
    tokenizer = model.src_tokenizer
    if name in TWO_STACKS:
        scores = model.score(TEXTS, TEXTS)
        rows = [tokenizer.encode_target(tokenizer.encode(text)) for text in TEXTS]
        targets = [row[:-1] for row in rows]
        actual = model.eager.log_probs(rows, targets, model.request(rows))
        expected = [reference(model, *both) for both in zip(rows, targets, strict=True)]
    else:
        scores = model.score(TEXTS)
        rows = model.prompt_ids(TEXTS)
        actual = model.eager.log_probs(rows, None, model.request(rows))
        expected = [reference(model, row, []) for row in rows]
    for ours, expected_row, score in zip(actual, expected, scores, strict=True):
        np.testing.assert_allclose(ours, expected_row, rtol=1e-4, atol=1e-5)
        assert score.log_prob == pytest.approx(float(ours.sum(dtype=np.float64)), rel=1e-5)


@pytest.mark.parametrize("name", ["vaswani2017", "gpt2"])
def test_distributions_over_the_vocabulary_are_formed_a_bounded_number_at_a_time(
    models: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models[name]
    whole = model.score(*([TEXTS] * (2 if name in TWO_STACKS else 1)))
    monkeypatch.setattr(likelihood, "SCORED_ROWS", 3)
    sizes: list[int] = []
    hook = model.net.head.out.register_forward_hook(
        lambda module, inputs, logits: sizes.append(logits[..., 0].numel())
    )
    with hook:
        actual = model.score(*([TEXTS] * (2 if name in TWO_STACKS else 1)))
        rows = [model.src_tokenizer.encode(text) for text in TEXTS]
        model.eager.log_probs(rows, rows if name in TWO_STACKS else None, model.request(rows))
        if name in TWO_STACKS:
            model.teacher_forced(TEXTS, TEXTS)
    assert max(sizes) == 3
    assert sum(sizes) > sum(item.num_tokens for item in actual)
    assert [item.log_prob for item in actual] == pytest.approx(
        [item.log_prob for item in whole], rel=1e-5
    )


def test_a_decoder_with_two_start_ids_reads_both_before_a_scored_target() -> None:
    model = model_of("vaswani2017")
    before = model.score(TEXTS, TEXTS)
    [start], [end] = model.ids.decoder_start_ids, model.ids.eos_ids
    model.metadata.__dict__["generation"] = GenerationIds((7, start), (end,))
    rows = [model.src_tokenizer.encode_target(model.src_tokenizer.encode(t)) for t in TEXTS]
    expected = [float(reference(model, row, row[:-1]).sum()) for row in rows]
    actual = [item.log_prob for item in model.score(TEXTS, TEXTS)]
    assert actual == pytest.approx(expected, rel=1e-4)
    assert actual != pytest.approx([item.log_prob for item in before], rel=1e-3)


def test_a_target_is_truncated_to_the_positions_and_keeps_eos() -> None:
    model = model_of("vaswani2017")
    [start], [end] = model.ids.decoder_start_ids, model.ids.eos_ids
    model.metadata.__dict__["generation"] = GenerationIds((7, start), (end,))
    longest, long = model.config.max_length - 1, " ".join(TEXTS * 9)
    ids = model.tgt_tokenizer.encode(long)[: longest - 1]
    source = model.src_tokenizer.encode_target(model.src_tokenizer.encode(TEXTS[0]))
    [actual] = model.score([TEXTS[0]], [long], too_long="truncate")
    assert actual.num_tokens == longest
    assert actual.log_prob == pytest.approx(float(reference(model, source, ids).sum()), rel=1e-4)
    with pytest.raises(UserError, match=f"target line 1 has .*allows {longest}"):
        model.score([TEXTS[0]], [long])


def test_a_long_texts_windows_score_each_token_once_with_at_least_half_the_context(
    models: dict[str, Any],
) -> None:
    model = models["gpt2"]
    context = model.config.max_length
    row = torch.randint(4, VOCAB, (3 * context + 2,), generator=torch.Generator().manual_seed(0))
    ids = row.tolist()
    stride = context // 2
    expected = reference(model, ids[: context + 1], []).sum().item()
    for place in range(context + 1, len(ids)):
        window = -(-(place - context) // stride) * stride  # the first that reaches it
        expected += reference(model, ids[window : place + 1], [])[-1].item()
    [actual] = model.score([ids])
    assert (actual.num_tokens, actual.log_prob) == (
        len(ids) - 1,
        pytest.approx(expected, rel=1e-4),
    )


def test_texts_without_a_scored_token_have_none(models: dict[str, Any]) -> None:
    actual = models["gpt2"].score([[5], [5, 6], [7]])
    assert [item.num_tokens for item in actual] == [0, 1, 0]
    assert [item.log_prob for item in actual][::2] == [0, 0]
    assert models["gpt2"].score([[5]])[0].num_tokens == 0


def test_a_perplexity_that_overflows_is_infinite() -> None:
    """It was an OverflowError, for the texts of a net whose training diverged."""
    assert TextScore(-1e6, 2).perplexity == math.inf


def test_a_pair_with_a_side_left_out_has_no_score() -> None:
    model = model_of("vaswani2017")
    long = " ".join(TEXTS * 9)
    alone = model.score([TEXTS[0]], [TEXTS[1]])
    sources, targets = [long, TEXTS[0], TEXTS[0]], [TEXTS[0], TEXTS[1], long]
    actual = model.score(sources, targets, too_long="leave_out")
    assert [item.num_tokens for item in actual] == [0, alone[0].num_tokens, 0]
    assert actual[1].log_prob == pytest.approx(alone[0].log_prob, rel=1e-5)
    assert model.num_left_out == 2
    forced = model.teacher_forced(sources, targets, too_long="leave_out")
    assert forced == pytest.approx(model.teacher_forced([TEXTS[0]], [TEXTS[1]]), rel=1e-5)
    with pytest.raises(UserError, match="all pairs were left out"):
        model.teacher_forced([long], [long], too_long="leave_out")


@pytest.mark.parametrize("options", [{"stride": 0}, {"stride": 10**6}, {"batch_tokens": 0}])
def test_sizes_out_of_range_are_refused(models: dict[str, Any], options: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        models["gpt2"].score(TEXTS, **options)
    if "batch_tokens" in options:
        with pytest.raises(UserError, match="batch_tokens"):
            models["t5"].teacher_forced(TEXTS, TEXTS, **options)


@pytest.mark.parametrize("kind", ["char", "bpe", "byte_bpe"])
def test_bits_are_per_character_of_the_tokens_that_are_predicted(kind: str) -> None:
    """A uniform net over V characters has log2(V) bits for each, also without BOS."""
    texts = ["the cat sat on the mat", "\u00e9t\u00e9 the dog", "  a dog"]
    size = {"char": None, "bpe": 60, "byte_bpe": 300}[kind]
    tokenizer = train_tokenizer(texts, kind=kind, vocab_size=size, template="none", or_fewer=True)
    sizes = SIZES | {"d_model": 16, "vocab_size": tokenizer.vocab_size}
    config = config_of("gpt2", sizes, {})
    net = architecture("gpt2").build(config)
    for weight in net.parameters():
        weight.data.zero_()
    ids = GenerationIds(eos_ids=(tokenizer.eos_id,))
    model: Any = open_net(net, config, ModelMetadata("gpt2", "test", generation=ids), tokenizer)
    bits = math.log2(tokenizer.vocab_size)
    for text in texts:
        rows = model.prompt_ids([text])
        shown = text.lstrip() if kind != "byte_bpe" else text
        first = len(text) - len(shown) + len(tokenizer.decode(rows[0][:1]))
        score = model.score([text])[0]
        predicted = text[first:]
        total = bits * score.num_tokens
        assert score.bits_per_character(text) == pytest.approx(total / len(predicted))
        assert score.bits_per_byte(text) == pytest.approx(total / len(predicted.encode()))
        if kind == "char":
            assert score.bits_per_character(text) == pytest.approx(bits)
