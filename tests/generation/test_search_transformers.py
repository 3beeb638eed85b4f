"""The `heuristic` stop rule against transformers' own beam search, on tiny random models."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heedful.generation import Hypothesis, beam_search, greedy_search
from heedful.generation.rules import BannedTokens, NoRepeatNgram, RepetitionPenalty

transformers = pytest.importorskip("transformers")

EOS, PAD, SIZE = 2, 1, 24


def set_eos_bias(layer: nn.Linear, bias: float, more: dict[int, float]) -> None:
    nn.init.zeros_(layer.bias)
    for token, value in ({EOS: bias} | more).items():
        layer.bias.data[token] = value


def gpt2(seed: int, eos_bias: float, more: dict[int, float]) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=SIZE, n_positions=32, n_embd=16, n_layer=1, n_head=2, initializer_range=0.6,
        bos_token_id=0, eos_token_id=EOS, pad_token_id=PAD, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    model.lm_head = nn.Linear(16, SIZE)
    nn.init.normal_(model.lm_head.weight, std=0.4)
    set_eos_bias(model.lm_head, eos_bias, more)
    return model


def encoder_decoder(family: str, seed: int, eos_bias: float) -> Any:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": SIZE, "d_model": 16, "max_position_embeddings": 32, "init_std": 0.4,
        "encoder_layers": 1, "encoder_ffn_dim": 16, "encoder_attention_heads": 2,
        "decoder_layers": 1, "decoder_ffn_dim": 16, "decoder_attention_heads": 2,
        "eos_token_id": EOS, "pad_token_id": PAD,
    }  # fmt: skip
    if family == "bart":
        config = transformers.BartConfig(
            **sizes, bos_token_id=0, decoder_start_token_id=EOS, forced_eos_token_id=None
        )
        model = transformers.BartForConditionalGeneration(config).eval()
    else:
        config = transformers.MarianConfig(
            **sizes, decoder_start_token_id=PAD, forced_eos_token_id=None
        )
        model = transformers.MarianMTModel(config).eval()
    model.final_logits_bias[0, EOS] = eos_bias
    return model


@dataclass
class Sources:
    """Which source each row belongs to."""

    ids: Tensor
    batch: int

    def follow(self, parents: Tensor) -> None:
        of_each = self.ids.unflatten(0, (len(parents), -1))[:, :1]
        self.ids = of_each.expand(-1, parents.shape[1], -1).flatten(0, 1)

    def select(self, sentences: Tensor) -> None:
        self.ids = self.ids.unflatten(0, (self.batch, -1))[sentences].flatten(0, 1)
        self.batch = len(sentences)


def theirs(model: Any, ids: Tensor, eos: set[int], **options: Any) -> list[list[list[int]]]:
    """The new tokens of each sentence's hypotheses, and nothing behind the first EOS."""
    asked = options.pop("num_return")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_return_sequences=asked,
        pad_token_id=PAD, eos_token_id=sorted(eos), **options,
    )  # fmt: skip
    prompt = 1 if model.config.is_encoder_decoder else ids.shape[1]
    found = []
    for row in out[:, prompt:].tolist():
        end = next((place + 1 for place, token in enumerate(row) if token in eos), len(row))
        found.append(row[:end])
    return [found[at : at + asked] for at in range(0, len(found), asked)]


def ours(model: Any, ids: Tensor, stop: str = "heuristic", **options: Any) -> Any:
    if model.config.is_encoder_decoder:
        first = torch.full((len(ids), 1), model.config.decoder_start_token_id)

        def next_log_probs(prefixes: Tensor, state: Sources) -> Tensor:
            logits = model(input_ids=state.ids, decoder_input_ids=prefixes).logits
            return logits[:, -1].log_softmax(dim=1)

        return beam_search(
            next_log_probs, first, state=Sources(ids, len(ids)), stop=stop, **options
        )
    return beam_search(
        lambda prefixes: model(input_ids=prefixes).logits[:, -1].log_softmax(dim=1),
        ids,
        stop=stop,
        **options,
    )


def ids_of(found: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[hypothesis.ids for hypothesis in sentence] for sentence in found]


@pytest.mark.parametrize("family", ["gpt2", "bart", "marian"])
def test_heuristic_finds_what_transformers_finds(family: str) -> None:
    """Also that hypotheses finish early, that limits cut some off and that other rules differ."""
    cases = random.Random(family)
    early = cut_off = others = 0
    for seed in range(34):
        bias = cases.choice([1.0, 2.0, 3.0, 4.0])
        model = gpt2(seed, bias, {}) if family == "gpt2" else encoder_decoder(family, seed, bias)
        beam = cases.choice([2, 3, 4, 5])
        batch, width = cases.randint(1, 3), cases.randint(1, 4)
        ids = torch.tensor([[cases.randrange(3, SIZE) for _ in range(width)] for _ in range(batch)])
        shared = {
            "length_penalty": cases.choice([-1.0, 0.0, 0.6, 1.0, 2.0]),
            "max_new_tokens": cases.choice([4, 6, 9]),
            "num_return": cases.randint(1, beam),
        }
        least = cases.choice([0, 0, 3])  # theirs is without EOS
        expected = theirs(model, ids, {EOS}, num_beams=beam, min_new_tokens=least, **shared)
        asked = shared | {"beam_size": beam, "eos_id": EOS, "min_new_tokens": least and least + 1}
        found = ours(model, ids, **asked)
        assert ids_of(found) == expected
        hypotheses = [hypothesis for sentence in found for hypothesis in sentence]
        early += sum(h.finished and len(h.ids) < shared["max_new_tokens"] for h in hypotheses)
        cut_off += sum(not h.finished for h in hypotheses)
        if seed % 3 == 0:
            others += ids_of(ours(model, ids, "optimal", **asked)) != expected
    assert early >= 20
    assert cut_off >= 20
    assert others >= 2


def test_scores_are_those_of_transformers() -> None:
    model = gpt2(7, 3.0, {})
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=4, num_return_sequences=4,
        max_new_tokens=8, length_penalty=0.6, pad_token_id=PAD, do_sample=False,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    found = ours(
        model, ids, beam_size=4, num_return=4, max_new_tokens=8, length_penalty=0.6, eos_id=EOS
    )
    scores = [hypothesis.score for sentence in found for hypothesis in sentence]
    assert scores == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)


def test_several_ends_and_rules_as_in_transformers() -> None:
    cases = random.Random(3)
    ended_by = set()
    for seed in range(16):
        model = gpt2(seed, 2.0, {5: 2.0, 9: 1.5})
        eos = cases.choice([[EOS, 5], [9, EOS, 5], [5]])
        beam, width = cases.choice([2, 3, 4]), cases.randint(2, 6)
        ids = torch.tensor([[cases.randrange(10, SIZE) for _ in range(width)] for _ in range(2)])
        shared = {"max_new_tokens": 8, "num_return": beam, "length_penalty": 0.7}
        expected = theirs(
            model, ids, set(eos), num_beams=beam, repetition_penalty=1.3, no_repeat_ngram_size=2,
            bad_words_ids=[[13], [14, 15]], **shared,
        )  # fmt: skip
        rules = [
            RepetitionPenalty(1.3),
            NoRepeatNgram(2, include_prompt=True),
            BannedTokens([13, [14, 15]]),
        ]
        found = ours(
            model, ids, beam_size=beam, eos_id=eos, rules=rules, prompts=ids.tolist(), **shared
        )
        assert ids_of(found) == expected
        ended_by |= {h.ids[-1] for sentence in found for h in sentence if h.finished}
    assert ended_by == {EOS, 5, 9}


def test_greedy_is_that_of_transformers() -> None:
    for seed in range(5):
        model = gpt2(seed, 1.0, {})
        ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
        expected = theirs(model, ids, {EOS}, num_beams=1, max_new_tokens=10, num_return=1)
        found = greedy_search(
            lambda prefixes, model=model: model(prefixes).logits[:, -1].log_softmax(dim=1),
            ids, eos_id=EOS, max_new_tokens=10,
        )  # fmt: skip
        assert ids_of(found) == expected


def test_beam_full_differs_from_early_stopping_only_in_the_last_step() -> None:
    """Where one step finds more than there is room for, transformers keeps the best of all."""
    same = different = 0
    for seed in range(24):
        model = gpt2(seed, 3.0, {})
        ids = torch.tensor([[5, 6, 7]])
        shared = {"max_new_tokens": 20, "num_return": 3, "length_penalty": 1.0}
        [expected] = theirs(model, ids, {EOS}, num_beams=3, early_stopping=True, **shared)
        options = shared | {"beam_size": 3, "eos_id": EOS, "force_eos": False}
        [found] = ours(model, ids, "beam_full", **options)
        assert all(hypothesis.finished for hypothesis in found)
        last = max(len(hypothesis.ids) for hypothesis in found)
        ours_only = [h.ids for h in found if h.ids not in expected]
        theirs_only = [one for one in expected if one not in [h.ids for h in found]]
        assert len(ours_only) == len(theirs_only)
        assert all(len(one) == last for one in theirs_only)
        assert all(len(one) < last for one in ours_only)
        same += not ours_only
        different += bool(ours_only)
    assert same > different > 0
