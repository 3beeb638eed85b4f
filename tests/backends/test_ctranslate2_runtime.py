"""CTranslate2 has the net's own outputs, or lists the options that it does not support."""

import copy
import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backend_models import TEXTS, model_of
from chance import fits_outcomes
from heedful.backends.base import Settings
from heedful.backends.ctranslate2 import runtime
from heedful.backends.ctranslate2.refusals import option_reasons
from heedful.backends.ctranslate2.runtime import CTranslate2
from heedful.backends.registry import open_conversion
from heedful.deploy.convert import convert_model
from heedful.generation import Hypothesis
from heedful.generation.rules import apply_rules, sampling_rules
from heedful.generation.token_rules import Context
from heedful.pipelines import Generator
from heedful.pipelines.windows import Window

CLOSE = 1e-4
WRITERS = ["vaswani2017", "vaswani2017 rotary", "bart", "t5", "gpt2", "llama", "mistral"]


def backend_of(model: Any, folder: Path, **settings: Any) -> CTranslate2:
    """The model's float32 conversion, opened."""
    settings = {"threads": 1} | settings
    facts = convert_model(model, folder, "float32")
    return open_conversion(folder, folder, "ctranslate2", "float32", facts, Settings(**settings))


@pytest.fixture(scope="module", params=WRITERS)
def pair(request: Any, tmp_path_factory: Any) -> tuple[Any, CTranslate2]:
    """A model and its backend."""
    name, *positions = request.param.split()
    model = model_of(name, **({"positions": positions[0]} if positions else {}))
    return model, backend_of(model, tmp_path_factory.mktemp("form"))


def rows_of(lengths: tuple[int, ...] = (3, 1, 2, 3)) -> list[list[int]]:
    """Prompts that are not longer than any window."""
    generator = np.random.default_rng(0)
    return [generator.integers(6, 40, n).tolist() for n in lengths]


def supported_request(model: Generator, rows: list[list[int]], **options: Any) -> Any:
    """A request that both backends support."""
    return model.request(rows, **{"beam_size": 1, "max_new_tokens": 12} | options)


def ids_of(outputs: list[list[Hypothesis]]) -> list[list[list[int]]]:
    """The tokens of each output of each prompt."""
    return [[item.ids for item in of_row] for of_row in outputs]


def compare_outputs(pair: tuple[Any, CTranslate2], rows: Any, call: Any) -> list[tuple[Any, Any]]:
    """The outputs of both backends, which must have equal tokens and `finished` flags."""
    model, backend = pair
    if backend.facts.longest_prompt is not None and call.options.scores:
        [reason] = backend.unsupported_reasons(rows, call)
        assert "cannot score outputs beyond the window" in reason
        call = call._replace(options=replace(call.options, scores=False))
    assert backend.unsupported_reasons(rows, call) == []
    ours, reference = model.eager.outputs(rows, call), backend.outputs(rows, call)
    assert ids_of(ours) == ids_of(reference)
    pairs = []
    for row_outputs in zip(ours, reference, strict=True):
        pairs += zip(*row_outputs, strict=True)
    assert all(one.finished == other.finished for one, other in pairs)
    return pairs


@pytest.mark.parametrize("options", [{}, {"normalization": "gnmt", "length_penalty": 0.6}])
def test_greedy_outputs_equal_those_of_the_net(pair: Any, options: dict[str, Any]) -> None:
    rows = rows_of()
    for one, other in compare_outputs(pair, rows, supported_request(pair[0], rows, **options)):
        for ours, reference in ((one.log_prob, other.log_prob), (one.score, other.score)):
            close = CLOSE * max(1, len(one.ids))
            assert ours == pytest.approx(reference, abs=close, nan_ok=True)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"min_new_tokens": 5}, {}),
        ({"no_repeat_ngram_size": 2}, {}),
        ({"banned": [9, 10, 11, 30]}, {}),
        ({"top_k": 1}, {}),
        ({}, {"forced_bos_id": 9}),
        ({}, {"suppressed_ids": tuple(range(8, 24))}),
    ],
)
def test_tokens_under_rules_equal_those_of_the_net(pair: Any, options: Any, changes: Any) -> None:
    """The score is the net's, although other tokens share the probability of suppressed ones."""
    model, backend = pair
    if "forced_bos_id" in changes and backend.facts.family == "decoder_only":
        return
    rows = rows_of((3, 3) if "banned" in options else (3, 1, 2, 3))
    if "no_repeat_ngram_size" in options and backend.facts.family == "decoder_only":
        call = supported_request(model, rows, **options, scores=False)
        [reason] = backend.unsupported_reasons(rows, call)
        assert reason == "its option no_repeat_ngram_size does not see the prompt"
        return
    for scores in (True, False):
        call = supported_request(model, rows, **options, scores=scores)
        for one, other in compare_outputs(pair, rows, call.select([*range(len(rows))], **changes)):
            if scores and "top_k" not in options:
                close = CLOSE * len(one.ids)
                assert one.log_prob == pytest.approx(other.log_prob, abs=close, nan_ok=True)


def frequent_token(model: Generator, rows: list[list[int]]) -> tuple[int]:
    """The most frequent token of greedy outputs; as EOS it ends outputs of random nets."""
    written = model.eager.outputs(rows, supported_request(model, rows))
    [(token, _)] = Counter(token for [output] in written for token in output.ids).most_common(1)
    return (token,)


@pytest.mark.parametrize("beam_size", [1, 2])
def test_scores_are_nan_unless_requested(pair: Any, beam_size: int) -> None:
    model, backend = pair
    if backend.facts.longest_prompt is not None:
        return
    rows = rows_of()
    calls = (
        supported_request(model, rows, scores=scores, beam_size=beam_size, max_new_tokens=30)
        for scores in (True, False)
    )
    changes = {"eos_ids": frequent_token(model, rows)} if beam_size > 1 else {}
    with_scores, without = (
        backend.outputs(rows, call.select([*range(len(rows))], **changes)) for call in calls
    )
    assert any(with_scores)
    for one, other in zip(with_scores, without, strict=True):
        if not one:
            assert not other
            continue
        assert one[0].ids == other[0].ids
        assert all(map(math.isfinite, (one[0].log_prob, one[0].score)))
        assert all(map(math.isnan, (other[0].log_prob, other[0].score)))


def test_a_batch_of_n_equals_n_batches_of_one(pair: Any) -> None:
    model, backend = pair
    rows = rows_of()
    all_options = [{"beam_size": 1}, {"beam_size": 3}]
    if backend.facts.family == "encoder_decoder":
        all_options.append({"no_repeat_ngram_size": 2})
    for options in all_options:
        together = backend.outputs(rows, supported_request(model, rows, **options))
        apart = [
            backend.outputs([row], supported_request(model, [row], **options))[0] for row in rows
        ]
        assert ids_of(together) == ids_of(apart)


def test_beam_full_outputs_equal_those_of_the_net_if_all_hypotheses_end(pair: Any) -> None:
    """CTranslate2 has the stop rule `beam_full`, except for outputs at the length limit."""
    model, backend = pair
    rows, compared = rows_of((3, 2, 3, 1, 2, 3, 3)), 0
    options: dict[str, Any] = {"beam_size": 3, "stop_rule": "beam_full"}
    options |= {"max_new_tokens": 30}
    options |= {"length_penalty": 0.7, "scores": backend.facts.longest_prompt is None}
    call = supported_request(model, rows, **options)
    call = call.select([*range(len(rows))], eos_ids=frequent_token(model, rows))
    assert backend.unsupported_reasons(rows, call) == []
    pairs = zip(model.eager.outputs(rows, call), backend.outputs(rows, call), strict=True)
    for ours, reference in pairs:
        if reference:
            compared += 1
            assert [item.ids for item in ours] == [item.ids for item in reference]
            for a, b in zip(ours, reference, strict=True):
                assert not call.options.scores or a.score == pytest.approx(b.score, abs=CLOSE)
    assert compared > 2


def test_each_row_has_its_own_length_limit_and_forced_eos(pair: Any) -> None:
    model, rows = pair[0], rows_of()
    ends = {"max_new_tokens": [2, 7, 4, 1], "forced_eos_id": model.end_ids()[0]}
    for scores in (True, False):
        call = supported_request(model, rows, scores=scores).select([0, 1, 2, 3], **ends)
        for (_, other), limit in zip(
            compare_outputs(pair, rows, call), call.max_new_tokens, strict=True
        ):
            assert len(other.ids) <= limit
            if pair[1].facts.longest_prompt is None:
                assert scores == math.isfinite(other.log_prob)


def test_streamed_tokens_equal_the_output(pair: Any) -> None:
    model, backend = pair
    for row in rows_of():
        for options in ({}, {"min_new_tokens": 4}):
            call = supported_request(model, [row], **options)
            ours = list(model.eager.stream_tokens(row, call))
            runs = list(backend.stream_tokens(row, call))
            assert [t for run, _ in runs for t in run] == [t for run, _ in ours for t in run]
            assert [ended for _, ended in runs][-1]
            assert not any(ended for _, ended in runs[:-1])


def test_samples_differ(pair: Any) -> None:
    model, backend = pair
    rows = rows_of()
    call = supported_request(model, rows, temperature=3.0, num_return=4, scores=False)
    assert backend.unsupported_reasons(rows, call) == []
    several = backend.outputs(rows, call)
    assert all(len(outputs) == 4 for outputs in several)
    assert len({tuple(o.ids) for o in several[0]}) > 1


@pytest.mark.parametrize("name", ["vaswani2017", "gpt2"])
def test_samples_have_the_probabilities_of_the_net_under_each_option(
    name: str, tmp_path: Path
) -> None:
    """Alone and together, in the order of the net's rules."""
    import ctranslate2

    model = model_of(name)
    backend, [row] = backend_of(model, tmp_path), rows_of((3,))
    sides = [[row], [list(model.ids.decoder_start_ids)]][: 2 if name == "vaswani2017" else 1]
    with torch.no_grad():
        log_probs = model.net(*map(torch.tensor, sides))[:, -1].double().log_softmax(-1)
    context = Context([[]], torch.zeros(1, 0, dtype=torch.long), torch.tensor([0]))
    plain = dict(enumerate(log_probs[0].exp().tolist()))
    both = {"top_k": 4, "top_p": 0.6}
    for options in ({}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.6}, both):
        rules: dict[str, Any] = {"temperature": 1.5 if options == both else 1.0} | options
        ctranslate2.set_random_seed(1)
        rows = [row] * 40
        call = supported_request(
            model, rows, num_return=40, max_new_tokens=1, scores=False, **rules
        )
        assert backend.unsupported_reasons(rows, call) == []
        counts = Counter(item.ids[0] for of_row in backend.outputs(rows, call) for item in of_row)
        ruled = apply_rules(sampling_rules(**rules), log_probs, context).softmax(-1)[0]
        assert fits_outcomes(counts, dict(enumerate(ruled.tolist()))), rules
        assert fits_outcomes(counts, plain) == (options == {}), "the option has an effect"


def test_the_smallest_temperatures_sample_the_most_probable_tokens(pair: Any) -> None:
    """In single precision a subnormal temperature has no finite inverse."""
    model, backend = pair
    rows = rows_of()
    greedy = ids_of(backend.outputs(rows, supported_request(model, rows, scores=False)))
    for temperature in (1e-40, 1e-300):
        call = supported_request(model, rows, temperature=temperature, scores=False)
        assert ids_of(backend.outputs(rows, call)) == greedy


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize("name", ["vaswani2017", "gpt2"])
def test_samples_are_not_repeated_for_the_limits_of_other_rows(
    name: str, scores: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EOS has probability 1/2 at each step.

    Repeated sampling of outputs above their limit would favor outputs that end early.
    """
    import ctranslate2

    model = model_of(name, tie_embeddings="none") if name == "vaswani2017" else model_of(name)
    with torch.no_grad():
        model.net.head.out.weight.zero_()
    backend = backend_of(model, tmp_path)
    rows_passed = []
    whole = backend._results

    def counted(rows: list[list[int]], *rest: Any) -> list[Any]:
        rows_passed.extend(rows)
        return whole(rows, *rest)

    monkeypatch.setattr(backend, "_results", counted)
    ctranslate2.set_random_seed(0)
    count, limits = 300, (1, 8)
    rows = rows_of((2,)) * (count * len(limits))
    call = supported_request(model, rows, temperature=1.0, num_return=2, scores=scores)
    ends = tuple(range(0, model.eager.vocab_size, 2))
    places = [*range(len(rows))]
    call = call.select(
        places,
        max_new_tokens=[*limits] * count,
        eos_ids=ends,
        suppressed_ids=(),
        forced_bos_id=None,
        forced_eos_id=None,
    )
    assert backend.unsupported_reasons(rows, call) == []
    actual = backend.outputs(rows, call)
    assert len(rows_passed) == len(rows)
    for place, limit in enumerate(limits):
        samples = [item for of_row in actual[place :: len(limits)] for item in of_row]
        lengths = Counter((len(item.ids), item.finished) for item in samples)
        expected = {(length, True): 0.5**length for length in range(1, limit + 1)}
        assert fits_outcomes(lengths, expected | {(limit, False): 0.5**limit})
        if scores:
            size = -math.log(model.eager.vocab_size)
            assert [item.log_prob for item in samples] == pytest.approx(
                [size * len(item.ids) for item in samples], abs=CLOSE * limit
            )


def test_submitted_batches_run_on_workers(tmp_path: Path) -> None:
    model = model_of("vaswani2017")
    backend = backend_of(model, tmp_path, workers=2)
    rows = rows_of()
    waiting = [backend.submit([row], supported_request(model, [row])) for row in rows]
    actual = [wait()[0][0].ids for wait in waiting]
    assert actual == [o[0].ids for o in model.eager.outputs(rows, supported_request(model, rows))]


@pytest.mark.parametrize(("budget", "calls"), [(None, 2), (6, 4)])
def test_workers_run_batches_in_parallel(
    budget: int | None, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("bert", head="classify")
    expected = model.class_logits(TEXTS)
    model.backend = backend = backend_of(model, tmp_path, workers=2)
    read, rows_passed, done = backend.logits, [], []

    def logits(rows: Any, types: Any = None) -> Any:
        rows_passed.append(len(rows))
        return read(rows, types)

    monkeypatch.setattr(backend, "logits", logits)
    actual = model.class_logits(TEXTS, batch_tokens=budget, progress=done.append)
    assert np.allclose(actual, expected, atol=CLOSE)
    assert (len(rows_passed), sum(rows_passed), sum(done)) == (calls, len(TEXTS), len(TEXTS))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"stop": ["."]}, "stop"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"prefix_function": lambda number, ids: [5]}, "prefix_function"),
        ({"draft": "lookup"}, "draft"),
        ({"forced": {0: 9}}, "forced"),
        ({"temperature": 1.0, "min_p": 0.1, "seed": 3}, "min_p"),
        ({"temperature": 1.0, "top_h": 0.5, "seed": 3}, "top_h"),
        ({"temperature": 1.0, "epsilon_cutoff": 0.1, "seed": 3}, "epsilon_cutoff"),
        ({"temperature": 1.0, "eta_cutoff": 0.1, "seed": 3}, "eta_cutoff"),
        ({"top_k": 1, "min_tokens_to_keep": 2, "seed": 3}, "min_tokens_to_keep"),
        ({"encoder_repetition_penalty": 1.5}, "encoder_repetition_penalty"),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size"),
        ({"sequence_bias": [[[9], 1.0]]}, "sequence_bias"),
        ({"exponential_decay_length_penalty": (2, 1.5)}, "exponential_decay_length_penalty"),
        ({"begin_suppress_tokens": [9]}, "begin_suppress_tokens"),
        ({"temperature": 1.0, "seed": 3}, "seed"),
        ({"beam_size": 4, "num_groups": 2}, "num_groups"),
        ({"beam_size": 4, "require": ["dog"]}, "require"),
        ({"beam_size": 4, "stop_rule": "optimal"}, "stop_rule optimal"),
        ({"beam_size": 4, "normalization": "gnmt"}, "gnmt"),
        ({"max_new_tokens": 100}, "may exceed"),
    ],
)
def test_unsupported_options_are_reported_and_run_eager(
    options: dict[str, Any], word: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("gpt2")
    model.backend = backend_of(model, tmp_path)
    texts = ["the cat", "a dog"]
    rows = model.prompt_ids(texts)
    reasons = model.backend.unsupported_reasons(rows, model.request(rows, **options))
    assert any(word in reason for reason in reasons), reasons
    all_options = {"max_new_tokens": 6} | options
    actual = [model.generate(texts, **all_options) for _ in range(2)]
    assert len([r for r in caplog.records if word in r.getMessage()]) == 1
    model.backend = None
    assert actual[0] == model.generate(texts, **all_options)


def test_a_source_without_words_is_no_output_at_the_length_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CTranslate2 does not decode it; the note on length limits was printed for it."""
    model = model_of("marian")
    model.backend = backend_of(model, tmp_path)
    [row] = model.prompt_ids(["the cat"])
    end = [id_ for id_ in row if id_ in model.src_tokenizer.special_ids]
    options = model.options(beam_size=2, max_new_tokens=3)

    def completed(prompt: list[int]) -> list[Any]:
        """The outputs of a prompt for which the backend gives none."""
        window = Window(model, [prompt], 0, options, waits=True)
        window._batches = [batch._replace(wait=lambda: [[]]) for batch in window._batches]
        [outputs] = window.generations()
        return outputs

    assert completed(end)
    assert not [one for one in caplog.records if "length limit" in one.getMessage()]
    assert completed(row)
    assert "ends beams at the length limit" in caplog.text


def test_a_prompt_beyond_the_window_runs_eager(tmp_path: Path) -> None:
    model = model_of("mistral")
    backend = backend_of(model, tmp_path)
    rows = rows_of((4,))
    call = supported_request(model, rows, scores=False)
    [reason] = backend.unsupported_reasons(rows, call)
    assert "window of 3" in reason


@pytest.mark.parametrize("head", ["classify", "none"])
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_encoder_outputs_equal_those_of_the_net(name: str, head: str, tmp_path: Path) -> None:
    """States and logits, with token types of both texts of a pair."""
    model = model_of(name, head=head)
    backend = backend_of(model, tmp_path)
    assert ("logits" in backend.capabilities) is (head == "classify")
    rows = rows_of((5, 2, 7))
    types = [[0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2) for row in rows]
    for kinds in (None, types):
        for ours, reference in zip(
            model.eager.states(rows, kinds), backend.states(rows, kinds), strict=True
        ):
            assert np.allclose(ours, reference, atol=CLOSE)
        if head == "classify":
            actual = np.array(backend.logits(rows, kinds))
            assert np.allclose(np.array(model.eager.logits(rows, kinds)), actual, atol=CLOSE)


def test_target_log_probs_equal_those_of_the_net(pair: Any) -> None:
    model, backend = pair
    rows = rows_of()
    targets = rows_of((4, 2, 3, 1)) if backend.facts.family == "encoder_decoder" else None
    call = supported_request(model, rows)
    ours, reference = (e.log_probs(rows, targets, call) for e in (model.eager, backend))
    for one, other in zip(ours, reference, strict=True):
        assert len(one) == len(other)
        assert np.allclose(one, other, atol=CLOSE * 10)


def test_cached_arguments_are_not_used_for_other_requests(pair: Any) -> None:
    """They are cached for the last options and ids only."""
    model, backend = copy.copy(pair[0]), pair[1]
    model.backend, rows, metadata = backend, rows_of(), model.metadata
    plain = {"beam_size": 1, "max_new_tokens": 6}
    [likely] = {row[0] for row in model.generate(rows[:1], **plain)}
    never = replace(metadata, generation=replace(model.ids, suppressed_ids=(likely,)))
    calls = [
        (metadata, plain),
        (metadata, plain | {"max_new_tokens": 3}),
        (metadata, plain | {"banned": [[likely]]}),
        (metadata, plain),
        (never, plain),
        (replace(metadata, options={"max_new_tokens": 2}), {"beam_size": 2}),
        (metadata, plain | {"no_repeat_ngram_size": 1, "beam_size": 2}),
        (metadata, plain),
    ]
    actual = []
    for model.metadata, options in calls:
        written = model.generate(rows, **options)
        fresh = copy.copy(model)
        fresh._last = fresh._last_asked = backend._last = None
        assert fresh.generate(rows, **options) == written
        actual.append(written)
    assert actual[0] == actual[3] == actual[-1]
    assert all(one != actual[0] for one in (actual[1], actual[2], actual[4], actual[5]))


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ({"avx2", "avx512f", "avx512_vnni"}, {}, "AVX512"),
        ({"avx2", "avx512f"}, {}, None),
        (set(), {}, None),
        ({"avx512_vnni"}, {"CT2_FORCE_CPU_ISA": "AVX2"}, "AVX2"),
    ],
)
def test_avx512_is_used_on_processors_with_vnni_unless_the_user_names_another(
    flags: set[str],
    environment: dict[str, str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ctranslate2

    monkeypatch.setattr(runtime, "cpu_flags", lambda: flags)
    monkeypatch.setattr(os, "environ", environment)
    found = []

    def encoder(*arguments: Any, **options: Any) -> None:
        found.append(os.environ.get("CT2_FORCE_CPU_ISA"))

    monkeypatch.setattr(ctranslate2, "Encoder", encoder)
    runtime._open(Path("model"), "encoder_only", "int8", Settings(1), "cpu")
    assert found == [expected]  # known before the first model is opened


def test_a_normalization_of_scores_that_it_does_not_have_is_refused() -> None:
    """Also one that the search gains later: its scores would be those of `average`."""
    model = model_of("gpt2")
    request = model.request(model.prompt_ids(["the cat"]), beam_size=4)
    for name, is_refused in (("average", False), ("gnmt", True), ("root", True)):
        options = copy.copy(request.options)
        object.__setattr__(options, "normalization", name)
        reasons = option_reasons(request._replace(options=options), "decoder_only")
        expected = f"it has no option normalization of the model {name}"
        assert (expected in reasons) == is_refused
