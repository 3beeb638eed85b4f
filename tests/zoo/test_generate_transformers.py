"""Greedy and beam search of imported models equal `generate` of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decoder_parity import DecoderCase
from heedful.export.hf import export_hf, import_hf
from hf_parity import random_hf, random_rows
from parity_cases import CASES
from seq2seq_parity import Seq2SeqCase

VOCAB = 37
SMALL = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
DECODERS = [name for name, case in CASES.items() if isinstance(case, DecoderCase)]
ENCODER_DECODERS = [name for name, case in CASES.items() if isinstance(case, Seq2SeqCase)]
# What the decoder begins with, and must end with, is another one for each.
BEGIN_AND_END: dict[str, dict[str, Any]] = {
    "bart": {"decoder_start_token_id": 1, "forced_eos_token_id": 1},
    "m2m100": {"decoder_start_token_id": 1, "forced_bos_token_id": 9},
    "marian": {"decoder_start_token_id": 0, "forced_eos_token_id": 1},
    "mbart": {"decoder_start_token_id": 1, "forced_bos_token_id": 9, "forced_eos_token_id": 1},
    "pegasus": {"decoder_start_token_id": 0, "forced_eos_token_id": 1},
    "t5": {"decoder_start_token_id": 0},
}
LONG = ("n_positions", "max_position_embeddings")
NEW = 9
ENDS = [1, 5, 11, 17, 23]  # several, so that outputs of random weights do end


def random_hf_model(name: str, seed: int) -> Any:
    """A random model of transformers with different outputs, some of which end."""
    case = CASES[name]
    long = {key: 64 for key in LONG if key in case.sizes}
    keys = case.sizes | SMALL | long | BEGIN_AND_END.get(name, {})
    model = random_hf(case.hf_class, case.hf_config(**keys), seed)
    with torch.no_grad():
        # At these sizes most logits are nearly equal: sharper ones leave no ties to rounding.
        model.get_input_embeddings().weight.mul_(2)
    model.generation_config.eos_token_id = ENDS
    return model


def trimmed(ids: list[int]) -> list[int]:
    """The ids up to the first EOS, included."""
    ends = [place for place, token in enumerate(ids) if token in ENDS]
    return ids[: ends[0] + 1] if ends else ids


OPTIONS: list[dict[str, Any]] = [
    {},
    {"beam_size": 2},
    {"beam_size": 4, "length_penalty": 0.6},
    {"beam_size": 3, "num_return": 3, "length_penalty": 2.0},
    {"beam_size": 5, "num_return": 2, "length_penalty": 0.1, "max_new_tokens": 4},
    {"beam_size": 4, "num_return": 4, "length_penalty": -1.0, "min_new_tokens": 4},
    {"beam_size": 3, "repetition_penalty": 1.3, "banned": [13, [14, 15]]},
]  # the stop rule of an imported model is transformers' own


def hf_outputs(model: Any, text: Any, options: dict[str, Any]) -> Any:
    """The outputs of transformers for a text, with the scores of beams."""
    names = {"beam_size": "num_beams", "num_return": "num_return_sequences"}
    keys = {"max_new_tokens": NEW} | {names.get(key, key): options[key] for key in options}
    keys |= {"min_new_tokens": options.get("min_new_tokens", 1) - 1}  # without the end
    if banned := keys.pop("banned", ()):
        keys["bad_words_ids"] = [item if isinstance(item, list) else [item] for item in banned]
    mask = torch.ones_like(text[None])
    keys |= {"return_dict_in_generate": True, "output_scores": True, "do_sample": False}
    return model.generate(text[None], attention_mask=mask, **keys)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
@torch.no_grad()
def test_generation_equals_transformers_for_texts_of_unequal_lengths(
    name: str, tmp_path: Path
) -> None:
    """Also if hypotheses finish early or fill the limit, and with another stop rule."""
    early = full = others = 0
    for seed in (2, 3):  # of which some end early and some do not
        model = random_hf_model(name, seed)
        model.save_pretrained(tmp_path / f"hf{seed}")
        ours = import_hf(tmp_path / f"hf{seed}", tmp_path / f"ours{seed}")
        texts = random_rows(VOCAB, [4, 7, 1], seed, low=3)
        for options in OPTIONS[seed % 2 :: 2]:
            arguments = {"max_new_tokens": NEW} | options
            actual = ours.generate(
                [row.tolist() for row in texts], **arguments, return_details=True
            )
            for text, outputs in zip(texts, actual, strict=True):
                # One at a time: in transformers left padding shifts positions of GPT and GPT-Neo.
                expected = hf_outputs(model, text, options)
                start = 1 if name in ENCODER_DECODERS else len(text)
                ids = [trimmed(row[start:].tolist()) for row in expected.sequences]
                assert [output.ids for output in outputs] == ids, (seed, options)
                if options:
                    scores = expected.sequences_scores.tolist()
                    assert [output.score for output in outputs] == pytest.approx(scores, abs=1e-4)
                early += min(len(output.ids) for output in outputs) < arguments["max_new_tokens"]
                full += len(outputs[0].ids) == arguments["max_new_tokens"]
            rows = [row.tolist() for row in texts]
            options = {**arguments, "stop_rule": "optimal", "return_details": True}
            others += ours.generate(rows, **options) != actual
    assert min(early, full, others) > 0


@pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
@pytest.mark.parametrize("size", [2, 3])
@torch.no_grad()
def test_ngrams_of_a_prompt_do_not_occur_again(name: str, size: int, tmp_path: Path) -> None:
    """A prompt of which the n-grams are likely to be repeated, beside one of another length."""
    model = random_hf_model(name, 3)
    model.save_pretrained(tmp_path / "hf")
    ours = import_hf(tmp_path / "hf", tmp_path / "ours")
    [first] = random_rows(VOCAB, [4], 3, low=3)
    continued = [*first.tolist(), *ours.generate([first.tolist()], max_new_tokens=5)[0]]
    rows = [torch.tensor([*continued, first[0].item()]), first]
    for options in ({}, {"beam_size": 3, "num_return": 2}):
        options = options | {"no_repeat_ngram_size": size}
        found = ours.generate(
            [row.tolist() for row in rows], max_new_tokens=NEW, return_details=True, **options
        )
        for row, outputs in zip(rows, found, strict=True):
            start = 1 if name in ENCODER_DECODERS else len(row)
            expected = hf_outputs(model, row, options).sequences
            ids = [trimmed(sequence[start:].tolist()) for sequence in expected]
            assert [output.ids for output in outputs] == ids, options


# Rules of `generation_config.json`; those that scale values equal transformers' in beams alone.
OF_TOKENS: dict[str, Any] = {
    "sequence_bias": [[[5], 1.0], [[7, 9], -4.0], [[6], 2.0], [[6, 6], -9.0]],
    "bad_words_ids": [[13], [6, 8], [20, 21]],
    "begin_suppress_tokens": [6, 30],
    "encoder_no_repeat_ngram_size": 2,
    "no_repeat_ngram_size": 3,
    "min_new_tokens": 2,
}
OF_VALUES = {
    "repetition_penalty": 1.2,
    "encoder_repetition_penalty": 1.4,
    "exponential_decay_length_penalty": [3, 1.2],
    "renormalize_logits": True,
}
SETTINGS: list[dict[str, Any]] = [
    {"num_beams": 3, "length_penalty": 0.4, "no_repeat_ngram_size": 2},
    {},
    OF_TOKENS,
    {"num_beams": 3, **OF_TOKENS},
    {"num_beams": 3, **OF_TOKENS, **OF_VALUES},
    {"num_beams": 2, "early_stopping": True, **OF_VALUES},
]


@pytest.mark.parametrize("name", ["gpt2", "bart", "marian"])
@torch.no_grad()
def test_default_options_come_from_the_generation_config(name: str, tmp_path: Path) -> None:
    """Equal to transformers with `generation_config.json`, also after a round trip."""
    expected_before: list[list[int]] = []
    for number, own in enumerate(SETTINGS):
        model = random_hf_model(name, 4)
        for key, value in own.items():
            setattr(model.generation_config, key, value)
        model.save_pretrained(tmp_path / f"hf{number}")
        ours = import_hf(tmp_path / f"hf{number}", tmp_path / f"ours{number}")
        export_hf(ours, tmp_path / f"back{number}")
        again = import_hf(tmp_path / f"back{number}", tmp_path / f"again{number}")
        assert again.metadata.options == ours.metadata.options
        assert again.metadata.generation == ours.metadata.generation
        [prompt] = random_rows(VOCAB, [6], 2, low=3)
        reference = model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=NEW
        )[0]
        start = 1 if name in ENCODER_DECODERS else len(prompt)
        expected = trimmed(reference[start:].tolist())
        assert ours.generate([prompt.tolist()], max_new_tokens=NEW) == [expected], own
        if number in (2, 3, 4):  # the rules have an effect
            assert expected not in expected_before
        expected_before.append(expected)
        # Drawing, and greedy decoding, put the beam aside.
        plain = ours.generate([prompt.tolist()], max_new_tokens=NEW, beam_size=1)
        assert ours.generate([prompt.tolist()], max_new_tokens=NEW, temperature=0) == plain
        assert ours.generate([prompt.tolist()], temperature=1.5, seed=1, return_details=True)


@pytest.mark.parametrize(
    "own",
    [
        {"epsilon_cutoff": 0.03, "top_k": 0},
        {"eta_cutoff": 0.1, "top_k": 20, "temperature": 1.3},
        {"top_h": 0.6, "top_k": 0},
        {"sequence_bias": [[[5], 1.0]], "begin_suppress_tokens": [6], "top_k": 9, "min_p": 0.1},
    ],
)
@torch.no_grad()
def test_samples_have_the_distribution_of_transformers(own: dict[str, Any], tmp_path: Path) -> None:
    model = random_hf_model("gpt2", 4)
    for key, value in {"do_sample": True, **own}.items():
        setattr(model.generation_config, key, value)
    model.save_pretrained(tmp_path / "hf")
    ours = import_hf(tmp_path / "hf", tmp_path / "ours")
    [prompt] = random_rows(VOCAB, [6], 2, low=3)
    keys = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 1}
    output = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **keys)
    expected = output.scores[0][0].softmax(0)
    count = 4_000
    outputs = ours.generate(
        [prompt.tolist()], max_new_tokens=1, num_return=count, seed=1, return_details=True
    )
    counts = torch.zeros(VOCAB)
    for sample in outputs[0]:
        counts[sample.ids[0]] += 1 / count
    assert not (counts > 0)[expected == 0].any()
    assert (counts - expected).abs().sum() < 0.06


@torch.no_grad()
def test_the_models_own_lengths_and_stop_texts_yield_to_those_of_a_call(tmp_path: Path) -> None:
    """A short source, or a smaller limit, is no error because of the model's least length."""
    model = random_hf_model("bart", 4)
    for key, value in {"max_length": 31, "min_length": 30}.items():
        setattr(model.generation_config, key, value)
    model.save_pretrained(tmp_path / "hf")
    ours = import_hf(tmp_path / "hf", tmp_path / "ours")
    assert ours.metadata.options["max_new_tokens"] == ours.metadata.options["min_new_tokens"] == 30
    [output] = ours.generate([[5, 6, 1]])
    [expected] = model.generate(torch.tensor([[5, 6, 1]])).tolist()
    assert output == expected[1:]
    assert len(output) == 30
    assert len(ours.generate([[5, 6, 1]], max_new_tokens=4)[0]) == 4
