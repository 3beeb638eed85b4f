"""Continuous batches: every output equals the one that its prompt has alone, whatever else runs."""

import random
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_models import model_of
from heedful.backends.torch import batch_rows
from heedful.backends.torch.batch_rows import PrefixStore, common_length
from heedful.errors import UserError
from heedful.parts.cache import Cache
from heedful.serve.batches import call_all
from heedful.serve.continuous import ContinuousBatch
from heedful.serve.outputs import GenerationJob, Output

OPTIONS: list[dict[str, Any]] = [
    {},
    {"scores": False},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 9, "seed": 6},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"frequency_penalty": 0.5, "presence_penalty": 0.2, "temperature": 2.0, "seed": 2**40},
    {"min_new_tokens": 3, "banned": ["cat", "the dog"]},
    {"stop": ["a", "o"], "stop_ids": [7, 9]},
    {"forced": {0: 8, 2: 9}, "min_p": 0.1, "seed": 1},
]
# Learned positions; rotary ones with a window; layers with and without a window.
MODELS = {name: model_of(name) for name in ("gpt2", "mistral", "gemma3")}
batch_rows.LEAST = 16  # so that rows change their group
for model in MODELS.values():
    model.net.double()  # rounding does not decide between two tokens


def batch_of(model: Any, prefix_tokens: int = 0) -> ContinuousBatch:
    return ContinuousBatch(model.eager, 1_000_000, call_all, prefix_tokens=prefix_tokens)


def opened(batch: ContinuousBatch, model: Any, row: list[int], **options: Any) -> Output:
    request = model.request([row], **{"beam_size": 1, "max_new_tokens": 12, **options})
    return batch.open(GenerationJob([row], request), 0)


def ended(outputs: list[Output]) -> list[Output]:
    return [output for output in outputs if output.reason]


def run(batch: ContinuousBatch) -> None:
    """Steps until all outputs have ended."""
    while True:
        batch.remove(ended(batch.outputs))
        if not batch.outputs:
            return
        lengths = batch._rows.lengths
        assert batch.num_cached == sum(map(batch._rows.num_cached, lengths))
        batch.step()


def prompts(model: Any) -> st.SearchStrategy[list[int]]:
    """Prompts, many with a beginning in common."""
    ids = st.integers(3, 39)
    shared = st.builds(lambda n, end: [*range(3, 39)][:n] + end, st.integers(0, 30), st.lists(ids))
    return shared.filter(lambda row: 0 < len(row) <= model.config.max_length - 12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prefix_tokens", [0, 200])
@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_an_output_equals_the_one_alone_under_random_arrival(
    name: str, prefix_tokens: int, data: st.DataObject
) -> None:
    model = MODELS[name]
    batch = batch_of(model, prefix_tokens)
    batch.prefixes.min_tokens = 4
    begun: list[tuple[Output, list[int], dict[str, Any]]] = []
    paused: list[Output] = []
    for _ in range(data.draw(st.integers(1, 14), "events")):
        event = data.draw(
            st.sampled_from(["add", "add", "step", "step", "cancel", "pause", "part"])
        )
        if event == "add":
            rows = data.draw(st.lists(prompts(model), min_size=1, max_size=3), "rows")
            options = [data.draw(st.sampled_from(OPTIONS)) for _ in rows]
            more = [
                opened(batch, model, row, **own) for row, own in zip(rows, options, strict=True)
            ]
            begun += zip(more, rows, options, strict=True)
            batch.begin(more)
        elif event == "part":
            [row], own = data.draw(st.lists(prompts(model), min_size=1, max_size=1)), OPTIONS[2]
            output = opened(batch, model, row, **own)
            begun.append((output, row, own))
            while not batch.read_part(output, 5):
                assert output not in batch.outputs
            batch.begin([output])
        elif event == "pause" and batch.outputs:  # out of the batch, and later read again
            paused.append(data.draw(st.sampled_from(batch.outputs), "paused"))
            batch.remove([paused[-1]])
        elif event == "step" and batch.outputs:
            batch.step()
        elif event == "cancel" and batch.outputs:
            gone = data.draw(st.sampled_from(batch.outputs), "gone")
            batch.remove([gone])
            begun = [entry for entry in begun if entry[0] is not gone]
        batch.remove(ended(batch.outputs))
    if paused:
        batch.begin(paused)
    run(batch)
    assert not batch._rows._groups
    assert not batch.num_cached
    for output, row, own in begun:
        [alone] = model.generate(
            [row], return_details=True, **{"beam_size": 1, "max_new_tokens": 12, **own}
        )
        assert output.error is None
        assert output.ids == alone[0].ids, (row, own)
        assert (output.reason in ("eos", "stop")) == alone[0].finished


def test_log_probabilities_samples_and_top_tokens_are_those_of_the_model() -> None:
    model = MODELS["gpt2"]
    batch, row = batch_of(model), [5, 6, 7]
    options: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_new_tokens": 6, "num_return": 3}
    [expected] = model.generate([row], return_details=True, **options)
    job = GenerationJob([row], model.request([row], **options), samples=3, num_top=4)
    samples = [batch.open(job, index) for index in range(3)]
    batch.begin(samples)
    while batch.outputs:
        for output in batch.outputs:
            ids = torch.tensor([[*row, *output.ids[:-1]]])
            log_probs = model.net(ids, torch.tensor([ids.size(1)]))[0, -1].log_softmax(-1)
            best = log_probs.topk(4)
            assert [token for token, _ in output.top[-1]] == best.indices.tolist()
            assert [value for _, value in output.top[-1]] == pytest.approx(best.values.tolist())
            assert output.log_probs[-1] == pytest.approx(log_probs[output.ids[-1]].item())
        batch.remove(ended(batch.outputs))
        if batch.outputs:
            batch.step()
    assert [sample.ids for sample in samples] == [sample.ids for sample in expected]
    for sample, other in zip(samples, expected, strict=True):
        assert sum(sample.log_probs) == pytest.approx(other.log_prob)


def test_a_shared_beginning_is_read_once() -> None:
    """From an output in progress, from one that has ended, and not for nets that forget."""
    model, sizes = MODELS["gpt2"], []
    batch = batch_of(model, 64)
    row = [*range(4, 24)]
    decode = model.net.decode

    def counting(tokens: Any, cache: Cache) -> Any:
        sizes.append(tokens.ids.size(1))
        return decode(tokens, cache)

    model.net.decode = counting
    try:
        first = opened(batch, model, row, max_new_tokens=4)
        batch.begin([first])
        other = opened(batch, model, [*row[:18], 30, 31, 32], max_new_tokens=2)
        again = opened(batch, model, row)
        assert batch.shared_length(other, [other]) > batch.shared_length(other, [again]) == 0
        assert batch.shared_length(again, [again]) == 0  # all but its last token is known
        batch.begin([other])
        run(batch)
        assert sizes[:2] == [20, 3]
        sizes.clear()
        more = [*row, *first.ids[:3], 9]  # a chat that goes on
        batch.begin([opened(batch, model, more, max_new_tokens=1)])
        run(batch)
        assert sizes == [1]
        assert len(batch.prefixes) == 2
        assert sum(len(tokens) for _, tokens in batch.prefixes._rows) <= 64
    finally:
        del model.net.decode
    assert not batch_of(MODELS["mistral"], 64).prefixes.max_tokens


def test_kept_beginnings_are_those_used_last() -> None:
    cache = MODELS["gpt2"].net.start(1, capacity=16)
    for group in cache.groups:
        group.num_read = 0
    store = PrefixStore(10, min_tokens=2)
    store.add([1, 2, 3, 4], lambda: cache)
    store.add([5, 6, 7], lambda: cache)
    store.add([8], lambda: cache)
    assert [tokens for _, tokens in store._rows] == [(1, 2, 3, 4), (5, 6, 7)]
    assert store.find([1, 2, 3])[0] == 2  # the last token is to be read
    assert store.find([1, 9]) == (0, None)
    store.add([9] * 5, lambda: cache)  # the total would be 12
    assert [tokens for _, tokens in store._rows] == [(1, 2, 3, 4), (9,) * 5]
    store.add([1, 2, 3, 4, 5], lambda: cache)
    assert [tokens for _, tokens in store._rows] == [(9,) * 5, (1, 2, 3, 4, 5)]
    store = PrefixStore(20, min_tokens=2)
    for tenant in ("", "other", "other"):
        store.add([1, 2, 3, 4], lambda: cache, tenant)
    assert len(store) == 2
    store.add([7, 7, 7], lambda: cache, "other")
    assert store.find([7, 7, 7, 7]) == (0, None)
    assert store.find([7, 7, 7, 7], "other")[0] == 3
    assert common_length([1, 2], [1, 2, 3]) == common_length([1, 2, 3], [1, 2]) == 2


def test_an_error_ends_one_output_alone() -> None:
    """A function that allows no id, and a model whose logits are NaN for one prompt."""
    model = MODELS["gpt2"]
    batch = batch_of(model)
    rows = [[5, 6], [7, 8, 9]]
    bad = opened(batch, model, rows[0], prefix_function=lambda number, ids: [-1])
    good = opened(batch, model, rows[1])
    batch.begin([bad, good])
    run(batch)
    assert "no token id" in str(bad.error)
    assert not bad.ids
    assert good.ids == model.generate(rows[1], max_new_tokens=12)
    head = model.net.head.forward
    model.net.head.forward = lambda states: head(states).index_fill(0, torch.tensor([1]), torch.nan)
    try:
        outputs = [opened(batch, model, row, scores=False) for row in rows]
        batch.begin(outputs)
    finally:
        del model.net.head.forward
    assert [output.reason for output in outputs] == [None, "dead_end"]
    assert "NaN at step 1" in str(outputs[1].error)
    batch.clear()


def test_a_beginning_is_shared_by_one_tenant_alone() -> None:
    """Of an output in progress, of one that has ended, and of two that would begin together."""
    model, row, read = MODELS["gpt2"], [*range(4, 24)], []
    batch = batch_of(model, 200)
    request = model.request([row], beam_size=1, max_new_tokens=4)
    decode = model.net.decode

    def counting(tokens: Any, cache: Cache) -> Any:
        read.append(tokens.ids.size(1))
        return decode(tokens, cache)

    def tokens_read(output: Output) -> int:
        read.clear()
        batch.begin([output])
        batch.remove(ended(batch.outputs))
        return sum(read)

    def of(tenant: str) -> Output:
        return batch.open(GenerationJob([row], request, tenant=tenant), 0)

    first, other = of("a"), of("b")
    assert batch.shared_length(other, [first]) == 0
    assert batch.shared_length(of("a"), [first]) == 19
    model.net.decode = counting
    try:
        assert tokens_read(first) == 20
        assert tokens_read(other) == 20  # beside the one of the other tenant
        assert tokens_read(of("b")) == 1
        while batch.outputs:
            batch.step()
            batch.remove(ended(batch.outputs))
        assert tokens_read(of("c")) == 20  # after their end
        assert tokens_read(of("a")) == 1
    finally:
        del model.net.decode


def test_memory_follows_the_outputs_in_progress() -> None:
    model = MODELS["gpt2"]
    batch, rng = batch_of(model), random.Random(0)
    outputs = [opened(batch, model, [5] * rng.randrange(1, 9)) for _ in range(20)]
    batch.begin(outputs)

    def slots() -> int:
        return sum(g.cache.num_texts * g.cache.capacity for g in batch._rows._groups.values())

    assert 20 * 8 <= slots() <= 32 * 16
    batch.remove(outputs[2:])
    assert batch.num_cached <= 2 * 8
    assert slots() <= 8 * 16
    long = opened(batch, model, [5] * 36)
    batch.begin([long])
    assert slots() <= 8 * 16 + 64  # the others are not padded to it
    with pytest.raises(UserError, match="greedy decoding and sampling"):
        opened(batch, model, [5], beam_size=2)
