"""Logit rules: parity with transformers, exact tables, and properties of every rule."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.rules import (
    EpsilonCutoff,
    EtaCutoff,
    ExponentialDecay,
    FrequencyPenalty,
    MinP,
    PresencePenalty,
    Renormalize,
    RepetitionPenalty,
    SourcePenalty,
    Temperature,
    TopH,
    TopK,
    TopP,
    Typical,
    apply_rules,
    sampling_rules,
)
from heedful.generation.token_rules import (
    BannedAtBegin,
    BannedTokens,
    Context,
    ForcedTokens,
    NoRepeatNgram,
    NoSourceNgram,
    PrefixFunction,
    Rule,
    SequenceBias,
)

INF = math.inf
SIZE = 12


def context_of(generated: list[list[int]], prompts: list[list[int]] | None = None) -> Context:
    rows = torch.tensor(generated, dtype=torch.long).view(len(generated), -1)
    return Context(prompts or [[] for _ in generated], rows, torch.arange(len(generated)))


def log_probs_of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def possible_ids(log_probs: Tensor) -> list[list[int]]:
    """The ids of each row that are possible."""
    return [[i for i, value in enumerate(row) if value > -INF] for row in log_probs.tolist()]


NOTHING = context_of([[]])


# --- Parity -------------------------------------------------------------------------------------

rows = st.tuples(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 7))


def random_case(case: tuple[int, int, int], prompt: int = 0) -> tuple[Tensor, Tensor]:
    """Logits, some of them -inf or above zero, and tokens."""
    seed, n, t = case
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, SIZE, generator=generator, dtype=torch.float64) * 2
    logits[torch.rand(n, SIZE, generator=generator) < 0.1] = -INF
    logits[:, 0] = 0.0
    tokens = torch.randint(5, (n, prompt + t), generator=generator)
    return logits, tokens


@settings(max_examples=60, deadline=None)
@given(case=rows, strength=st.floats(0.05, 0.95))
def test_truncation_rules_equal_transformers(case: tuple[int, int, int], strength: float) -> None:
    """Also where many tokens have the same probability; of equal ones two rules keep the first."""
    from transformers.generation import logits_process as theirs

    log_probs, tokens = random_case(case)
    context = context_of(tokens.tolist())
    for keep in (1, 3):
        pairs: list[tuple[Rule, Any]] = [
            (MinP(strength, keep), theirs.MinPLogitsWarper(strength, min_tokens_to_keep=keep)),
            (
                Typical(strength, keep),
                theirs.TypicalLogitsWarper(strength, min_tokens_to_keep=keep),
            ),
            (
                EpsilonCutoff(strength, keep),
                theirs.EpsilonLogitsWarper(strength, min_tokens_to_keep=keep),
            ),
            (EtaCutoff(strength, keep), theirs.EtaLogitsWarper(strength, min_tokens_to_keep=keep)),
            (TopP(strength, keep), theirs.TopPLogitsWarper(strength, min_tokens_to_keep=keep)),
            (TopK(1, keep), theirs.TopKLogitsWarper(1, min_tokens_to_keep=keep)),
        ]
        for rule, processor in pairs:
            torch.testing.assert_close(
                rule(log_probs, context), processor(tokens, log_probs.clone())
            )
    tied = log_probs.round()  # whose logits are few whole numbers
    for rule, processor in pairs[1:4]:
        if isinstance(rule, Typical):  # of those tokens to keep, any of equal ones are kept there
            rule, processor = Typical(strength), theirs.TypicalLogitsWarper(strength)
        torch.testing.assert_close(rule(tied, context), processor(tokens, tied.clone()))
    for rule, processor in [
        (TopP(strength), theirs.TopPLogitsWarper(strength)),
        (TopH(strength), theirs.TopHLogitsWarper(strength)),
    ]:
        kept, of_them = rule(tied, context), processor(tokens, tied.clone())
        assert torch.equal(kept.sort(dim=1).values, of_them.sort(dim=1).values)
        assert torch.equal(kept.argmax(dim=1), tied.argmax(dim=1))
    pairs = [
        (Temperature(strength), theirs.TemperatureLogitsWarper(strength)),
        (TopK(1 + int(strength * 10)), theirs.TopKLogitsWarper(1 + int(strength * 10))),
        (TopP(strength), theirs.TopPLogitsWarper(strength)),
        (MinP(strength), theirs.MinPLogitsWarper(strength)),
        (Typical(strength), theirs.TypicalLogitsWarper(strength)),
        (TopH(strength), theirs.TopHLogitsWarper(strength)),
        (EpsilonCutoff(strength), theirs.EpsilonLogitsWarper(strength)),
        (EtaCutoff(strength), theirs.EtaLogitsWarper(strength)),
    ]
    for rule, processor in pairs:
        expected = log_probs.clone()
        torch.testing.assert_close(rule(log_probs, context), processor(tokens, log_probs.clone()))
        assert torch.equal(log_probs, expected)


@settings(max_examples=60, deadline=None)
@given(case=rows, prompt=st.integers(1, 4), penalty=st.floats(0.3, 3.0), size=st.integers(1, 4))
def test_token_rules_equal_transformers(
    case: tuple[int, int, int], prompt: int, penalty: float, size: int
) -> None:
    from transformers.generation import logits_process as theirs

    log_probs, tokens = random_case(case, prompt)
    context = context_of(tokens[:, prompt:].tolist(), tokens[:, :prompt].tolist())
    banned = [[3], [1, 2], [4, 4, 0], [2, 2]]
    allowed = {0: [1, 5], 1: [0, 2, 3], 2: [7, 0], 3: [11, 10, 0], 4: [4, 0]}
    pairs = [
        (RepetitionPenalty(penalty), theirs.RepetitionPenaltyLogitsProcessor(penalty)),
        (NoRepeatNgram(size, include_prompt=True), theirs.NoRepeatNGramLogitsProcessor(size)),
        (NoRepeatNgram(size), theirs.NoRepeatNGramLogitsProcessor(size)),
        (BannedTokens([3, *banned[1:]]), theirs.NoBadWordsLogitsProcessor(banned)),
        (
            PrefixFunction(lambda row, ids: allowed[([*tokens[row, :prompt].tolist(), *ids])[-1]]),
            theirs.PrefixConstrainedLogitsProcessor(lambda _row, ids: allowed[int(ids[-1])], 1),
        ),
    ]
    for rule, processor in pairs:
        unchanged = log_probs.clone()
        context_tokens = tokens[:, prompt:] if rule == NoRepeatNgram(size) else tokens
        ruled, expected = rule(log_probs, context), processor(context_tokens, log_probs.clone())
        # If no allowed token is possible, transformers has one with p = 1, heedful a dead end.
        if isinstance(rule, PrefixFunction):
            alive = ruled.isfinite().any(dim=1)
            ruled, expected = ruled[alive], expected[alive]
        torch.testing.assert_close(ruled.double(), expected.double())
        assert torch.equal(log_probs, unchanged)


@settings(max_examples=60, deadline=None)
@given(case=rows, prompt=st.integers(1, 4), strength=st.floats(0.3, 3.0), size=st.integers(1, 4))
def test_rules_of_sources_and_ends_equal_transformers(
    case: tuple[int, int, int], prompt: int, strength: float, size: int
) -> None:
    from transformers.generation import logits_process as theirs

    log_probs, tokens = random_case(case, prompt)
    log_probs = log_probs.log_softmax(dim=1)
    n, t = len(tokens), tokens.shape[1] - prompt
    source = torch.randint(5, (n, 9), generator=torch.Generator().manual_seed(case[0]))
    eos_ids = [3, 7]
    context = replace(
        context_of(tokens[:, prompt:].tolist(), tokens[:, :prompt].tolist()),
        sources=source.tolist(),
        eos_ids=eos_ids,
    )
    bias = [[[3], strength], [[4, 4, 0], -strength], [[2], -INF], [[1, 3], 0.5], [[0, 3], 0.25]]
    pairs: list[tuple[Rule, Any]] = [
        (SourcePenalty(strength), theirs.EncoderRepetitionPenaltyLogitsProcessor(strength, source)),
        (NoSourceNgram(size), theirs.EncoderNoRepeatNGramLogitsProcessor(size, source)),
        (SequenceBias(bias), theirs.SequenceBiasLogitsProcessor(bias)),  # type: ignore[arg-type]
        (
            ExponentialDecay(size, strength),
            theirs.ExponentialDecayLengthPenalty((size, strength), eos_ids, prompt),
        ),
        (
            BannedAtBegin([1, 3], size),
            theirs.SuppressTokensAtBeginLogitsProcessor([1, 3], prompt + size),
        ),
        (Renormalize(), theirs.LogitNormalization()),
    ]
    for rule, processor in pairs:
        unchanged = log_probs.clone()
        ruled = rule(log_probs, context)
        torch.testing.assert_close(ruled, processor(tokens, log_probs.clone()))
        assert torch.equal(log_probs, unchanged)
    assert torch.equal(pairs[4][0](log_probs, context), log_probs) == (t != size)


def test_rules_are_applied_in_the_order_of_transformers() -> None:
    """All that `generate` can have at once, on one distribution."""
    from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

    own: dict[str, Any] = {
        "sequence_bias": [[[2], 1.5], [[1, 3], -1.0], [[5], 3.0]], "repetition_penalty": 1.7,
        "encoder_repetition_penalty": 1.3, "no_repeat_ngram_size": 3,
        "encoder_no_repeat_ngram_size": 4, "exponential_decay_length_penalty": [1, 1.4],
        "begin_suppress_tokens": [6], "top_h": 0.9, "top_k": 9, "top_p": 0.95, "min_p": 0.02,
        "typical_p": 0.9, "epsilon_cutoff": 0.03, "eta_cutoff": 0.05, "temperature": 1.4,
        "renormalize_logits": True,
    }  # fmt: skip
    config = GenerationConfig(**own, do_sample=True, bad_words_ids=[[4], [3, 8]], eos_token_id=9)
    config._eos_token_tensor = torch.tensor([9])
    net = GPT2LMHeadModel(GPT2Config(vocab_size=SIZE, n_embd=4, n_layer=1, n_head=1))
    generator = torch.Generator().manual_seed(3)
    changed = 0
    for _ in range(40):
        prompt = torch.randint(SIZE, (1, 4), generator=generator)
        new = torch.randint(SIZE, (1, 3), generator=generator)
        processors = net._get_logits_processor(config, 4, prompt, device="cpu", model_kwargs={})
        assert len(processors) == len(own) + 1
        log_probs = torch.randn(1, SIZE, generator=generator).log_softmax(dim=1)
        rules = sampling_rules(**own, banned=[4, [3, 8]])
        context = replace(context_of(new.tolist(), prompt.tolist()), eos_ids=[9])
        rules = [
            NoRepeatNgram(3, include_prompt=True) if isinstance(rule, NoRepeatNgram) else rule
            for rule in rules
        ]
        ruled = apply_rules(rules, log_probs, context)
        expected = processors(torch.cat([prompt, new], dim=1), log_probs.clone())
        torch.testing.assert_close(ruled, expected)
        changed += 1 < len(possible_ids(ruled)[0]) < 8
    assert changed > 20


# --- Exact tables -------------------------------------------------------------------------------


def test_the_token_that_reaches_top_p_is_kept() -> None:
    log_probs = log_probs_of(0.125, 0.5, 0.25, 0.125)
    for p, ids in {
        1e-9: [1], 0.5: [1], 0.51: [1, 2], 0.75: [1, 2], 0.76: [0, 1, 2], 0.876: [0, 1, 2, 3],
        1.0: [0, 1, 2, 3],
    }.items():  # fmt: skip
        assert possible_ids(TopP(p)(log_probs, NOTHING)) == [ids]


def test_top_k_keeps_exactly_k_of_equal_values() -> None:
    log_probs = log_probs_of(0.1, 0.2, 0.2, 0.2, 0.2, 0.1)
    for k, ids in {1: [1], 2: [1, 2], 4: [1, 2, 3, 4], 5: [0, 1, 2, 3, 4], 9: range(6)}.items():
        assert possible_ids(TopK(k)(log_probs, NOTHING)) == [list(ids)]
    from transformers.generation import logits_process as theirs

    assert possible_ids(theirs.TopKLogitsWarper(2)(None, log_probs)) == [[1, 2, 3, 4]]


def test_top_p_one_keeps_the_longest_tail() -> None:
    log_probs = (torch.arange(50_000) * -0.01).log_softmax(dim=0)[None]
    assert torch.equal(TopP(1.0)(log_probs, NOTHING), log_probs)
    assert torch.equal(Typical(1.0)(log_probs, NOTHING), log_probs)


def test_min_p_is_relative_to_the_most_probable_token() -> None:
    log_probs = log_probs_of(0.04, 0.5, 0.06, 0.4)
    assert possible_ids(MinP(0.1)(log_probs, NOTHING)) == [[1, 2, 3]]
    assert possible_ids(MinP(1.0)(log_probs, NOTHING)) == [[1]]
    assert possible_ids(MinP(0.0)(log_probs, NOTHING)) == [[0, 1, 2, 3]]


def test_presence_and_frequency_count_new_tokens_alone() -> None:
    context = context_of([[2, 2, 0], [1, 1, 1]], prompts=[[3, 3], []])
    log_probs = torch.zeros(2, 4, dtype=torch.float64)
    present = PresencePenalty(0.25)(log_probs, context)
    assert present.tolist() == [[-0.25, 0.0, -0.25, 0.0], [0.0, -0.25, 0.0, 0.0]]
    frequent = FrequencyPenalty(-0.5)(log_probs, context)
    assert frequent.tolist() == [[0.5, 0.0, 1.0, 0.0], [0.0, 1.5, 0.0, 0.0]]


def test_counts_are_exact_in_16_bit_formats() -> None:
    log_probs = torch.zeros(1, 3, dtype=torch.bfloat16)
    ruled = FrequencyPenalty(1.0)(log_probs, context_of([[1] * 301]))
    assert ruled.tolist() == [[0.0, -301.0, 0.0]]


def test_prompt_tokens_outside_the_output_vocabulary_are_ignored() -> None:
    context = context_of([[1, 9, 1]], prompts=[[50]])
    log_probs = torch.full((1, 4), -1.0)
    assert RepetitionPenalty(2.0)(log_probs, context).tolist() == [[-1.0, -2.0, -1.0, -1.0]]
    assert possible_ids(NoRepeatNgram(2, include_prompt=True)(log_probs, context)) == [[0, 1, 2, 3]]


def test_a_forced_token_overrides_a_ban_and_keeps_its_value() -> None:
    log_probs = log_probs_of(0.5, 0.3, 0.2)
    rules = sampling_rules(banned=[1], forced={0: 1, 1: 2}, top_k=1)
    assert apply_rules(rules, log_probs, NOTHING).tolist() == [[-INF, math.log(0.3), -INF]]
    ruled = apply_rules(rules, log_probs, context_of([[0]]))
    assert ruled.tolist() == [[-INF, -INF, math.log(0.2)]]
    assert possible_ids(apply_rules(rules, log_probs, context_of([[0, 0]]))) == [[0]]


def test_prefix_function_sees_sentence_and_new_tokens() -> None:
    calls = []

    def allowed(sentence: int, ids: list[int]) -> list[int]:
        calls.append((sentence, ids))
        return [sentence, 3]

    generated, sentence = torch.tensor([[4], [5], [6]]), torch.tensor([1, 1, 0])
    context = Context([[8], [9]], generated, sentence)
    assert possible_ids(PrefixFunction(allowed)(torch.zeros(3, 4), context)) == [
        [1, 3],
        [1, 3],
        [0, 3],
    ]
    assert calls == [(1, [4]), (1, [5]), (0, [6])]


# --- Composition and properties -----------------------------------------------------------------


def test_sampling_rules_are_in_the_documented_order() -> None:
    def allowed(_sentence: int, _ids: list[int]) -> list[int]:
        return [0]

    everything = sampling_rules(
        typical_p=0.9, min_p=0.1, top_p=0.8, top_k=3, temperature=0.7, forced={1: 2},
        prefix_function=allowed, banned=[1], no_repeat_ngram_size=2, frequency_penalty=0.2,
        presence_penalty=0.1, repetition_penalty=1.2,
    )  # fmt: skip
    assert everything == [
        RepetitionPenalty(1.2), PresencePenalty(0.1), FrequencyPenalty(0.2), NoRepeatNgram(2),
        BannedTokens([1]), PrefixFunction(allowed), ForcedTokens({1: 2}), Temperature(0.7),
        TopK(3), TopP(0.8), MinP(0.1), Typical(0.9),
    ]  # fmt: skip
    assert sampling_rules() == []


def test_later_rules_see_renormalized_probabilities() -> None:
    """After the cut to 2 of (.4, .3, .2, .1) the first has 4/7, so a nucleus of .55 is it alone."""
    log_probs = log_probs_of(0.4, 0.3, 0.2, 0.1)
    assert possible_ids(apply_rules([TopK(2), TopP(0.55)], log_probs, NOTHING)) == [[0]]
    assert possible_ids(apply_rules([TopP(0.55), TopK(2)], log_probs, NOTHING)) == [[0, 1]]
    # Ten times as hot all are about equal, and a nucleus of .55 needs three of them.
    hot = [Temperature(10.0), TopP(0.55)]
    assert possible_ids(apply_rules(hot, log_probs, NOTHING)) == [[0, 1, 2]]
    assert possible_ids(apply_rules(hot[::-1], log_probs, NOTHING)) == [[0, 1]]


RULES: list[Callable[[float], Rule]] = [
    lambda x: Temperature(0.1 + x),
    lambda x: TopK(1 + int(8 * x)),
    TopP,
    MinP,
    Typical,
    TopH,
    EpsilonCutoff,
    EtaCutoff,
    lambda x: Typical(x, 3),
    lambda x: SourcePenalty(0.5 + x),
    lambda x: NoSourceNgram(1 + int(3 * x)),
    lambda x: SequenceBias([([1], x), ([2, 3], -x)]),
    lambda x: ExponentialDecay(1, 0.5 + x),
    lambda x: BannedAtBegin([1, int(8 * x)], 2),
    lambda _x: Renormalize(),
    lambda x: RepetitionPenalty(0.5 + x),
    lambda x: PresencePenalty(x - 0.5),
    lambda x: FrequencyPenalty(x - 0.5),
    lambda x: NoRepeatNgram(1 + int(3 * x), include_prompt=x > 0.5),
    lambda x: BannedTokens([1, [2, 3], [0, int(8 * x)]]),
    lambda x: ForcedTokens({0: 1, 2: int(8 * x)}),
    lambda x: PrefixFunction(lambda sentence, ids: [len(ids), sentence, int(8 * x)]),
]


@settings(max_examples=120, deadline=None)
@given(case=rows, which=st.sampled_from(range(len(RULES))), strength=st.floats(0.01, 0.99))
def test_rows_are_independent_and_the_input_is_unchanged(
    case: tuple[int, int, int], which: int, strength: float
) -> None:
    rule, (log_probs, tokens) = RULES[which](strength), random_case(case)
    prompts = [[(3 * i + j) % 6 for j in range(i)] for i in range(len(tokens))]
    original, sentence = log_probs.clone(), torch.arange(len(tokens))
    together = rule(log_probs, Context(prompts, tokens, sentence, eos_ids=[0, 3]))
    assert torch.equal(log_probs, original)
    assert together.shape == log_probs.shape
    assert not together.isnan().any()
    for row in range(len(tokens)):
        at = slice(row, row + 1)
        context = Context(
            [prompts[row]], tokens[at], torch.zeros_like(sentence[at]), eos_ids=[0, 3]
        )
        alone = rule(log_probs[at], context)
        if not isinstance(rule, PrefixFunction):  # which may tell sentences apart
            torch.testing.assert_close(alone, together[at], rtol=0, atol=0)


# --- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Temperature(0.0), "temperature"),
        (lambda: Temperature(math.nan), "temperature"),
        (lambda: Temperature(INF), "temperature"),
        (lambda: TopK(0), "top_k"),
        (lambda: TopP(0.0), "top_p"),
        (lambda: TopP(1.1), "top_p"),
        (lambda: MinP(-0.1), "min_p"),
        (lambda: MinP(1.1), "min_p"),
        (lambda: Typical(0.0), "typical_p"),
        (lambda: Typical(math.nan), "typical_p"),
        (lambda: RepetitionPenalty(0.0), "repetition_penalty"),
        (lambda: RepetitionPenalty(INF), "repetition_penalty"),
        (lambda: RepetitionPenalty(10**400), "repetition_penalty"),
        (lambda: PresencePenalty(-(10**400)), "presence_penalty must be a finite number"),
        (lambda: PresencePenalty(math.nan), "presence_penalty"),
        (lambda: FrequencyPenalty(INF), "frequency_penalty"),
        (lambda: NoRepeatNgram(0), "no_repeat_ngram_size"),
        (lambda: NoSourceNgram(0), "encoder_no_repeat_ngram_size"),
        (lambda: sampling_rules(encoder_no_repeat_ngram_size=-1), "encoder_no_repeat_ngram_size"),
        (lambda: TopP(0.5, 0), "min_tokens_to_keep"),
        (lambda: EpsilonCutoff(0.0), "epsilon_cutoff"),
        (lambda: EtaCutoff(1.0), "eta_cutoff"),
        (lambda: TopH(0.0), "top_h"),
        (lambda: SourcePenalty(0.0), "encoder_repetition_penalty"),
        (lambda: SequenceBias([([], 1.0)]), "no sequence of token ids"),
        (lambda: SequenceBias([([1], INF)]), "finite"),
        (lambda: SequenceBias([([1], math.nan)]), "finite"),
        (lambda: ExponentialDecay(-1, 1.0), "exponential_decay_length_penalty"),
        (lambda: ExponentialDecay(1, 0.0), "exponential_decay_length_penalty"),
        (lambda: BannedAtBegin([-1]), "no token id"),
        (lambda: sampling_rules(no_repeat_ngram_size=-1), "no_repeat_ngram_size"),
        (lambda: BannedTokens([[]]), "empty"),
        (lambda: BannedTokens([-1]), "no token id"),
        (lambda: ForcedTokens({-1: 2}), "0 or more"),
        (lambda: ForcedTokens({1: -2}), "0 or more"),
    ],
)
def test_settings_out_of_range_are_refused(build: Callable[[], Rule], says: str) -> None:
    with pytest.raises(UserError, match=says):
        build()


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (BannedTokens([[1, 4]]), "outside the vocabulary"),
        (BannedAtBegin([4]), "outside the vocabulary"),
        (SequenceBias([([4, 1], 1.0)]), "outside the vocabulary"),
        (ForcedTokens({0: 4}), "outside the vocabulary"),
        (PrefixFunction(lambda _sentence, _ids: [4]), "outside the vocabulary"),
        (PrefixFunction(lambda _sentence, _ids: [-1]), "no token id"),
        (lambda log_probs, _: log_probs[:, :2], "must keep"),
    ],
)
def test_wrong_calls_are_refused(rule: Rule, says: str) -> None:
    with pytest.raises(UserError, match=says):
        apply_rules([rule], torch.zeros(1, 4), NOTHING)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-40, 1e-38, 1e-20])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    """The quotients were all -inf, or NaN, so that the output was empty."""
    log_probs = torch.tensor([[-9.0, -1.0, -INF, -1.0001], [-3.0, -8.0, -2.0, -INF]])
    out = Temperature(temperature)(log_probs, context_of([[]] * 2))
    expected = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    assert torch.equal(out.softmax(-1), expected)


@pytest.mark.parametrize("temperature", [1e38, 1e40, 1e308])
def test_a_huge_temperature_makes_all_possible_tokens_equal(temperature: float) -> None:
    out = Temperature(temperature)(torch.tensor([[-9.0, -1.0, -INF]]), NOTHING)
    assert torch.equal(out.softmax(-1), torch.tensor([[0.5, 0.5, 0.0]]))
