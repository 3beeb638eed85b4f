"""Ensembles search the mean of their models' probabilities, as an exhaustive search finds it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from engine_models import TEXTS, all_scores, model_of
from heedful.engines.engine import Settings
from heedful.errors import UserError
from heedful.inference.ensembles import ensemble
from heedful.inference.forms import make_form, open_form

CHECK = {"max_new_tokens": 3, "length_penalty": 0.7}


def best_of_all(models: list[Any], weights: list[float], row: list[int]) -> tuple[Any, float]:
    """The best output of at most three tokens, by forming every one of them, and its score."""
    shares = torch.tensor(weights)[:, None, None, None] / sum(weights)

    def log_probs_of(source: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
        probs = torch.stack([model.net(source, ids).softmax(-1) for model in models])
        return (probs * shares).sum(0).log(), 0.0

    scores = all_scores(models[0], row, 3, 0.7, log_probs_of)
    return max(scores.items(), key=lambda each: each[1])


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """Of three architectures, with one tokenizer."""
    return [model_of("vaswani2017"), model_of("bart"), model_of("marian", num_encoder_layers=1)]


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 5.0, 2.0]])
def test_the_search_finds_the_best_by_the_mean_of_probabilities(
    models: list[Any], weights: list[float]
) -> None:
    joint = ensemble(models, weights)
    for row in joint.prompt_ids(TEXTS[:2]):
        ids, score = best_of_all(models, weights, row)
        [[found]] = joint.generations([row], beam_size=1500, num_return=1, **CHECK)
        assert found.ids == list(ids)
        assert found.score == pytest.approx(score, abs=1e-5)
    alone = models[0].generations([row], beam_size=1500, **CHECK)[0][0]
    assert alone.score != pytest.approx(score, abs=1e-3)


def test_a_model_with_itself_is_itself(models: list[Any]) -> None:
    joint = ensemble([models[0], models[0]], [0.2, 0.8])
    for options in ({"beam_size": 3}, {"beam_size": 1}, {"temperature": 1.0, "seed": 3}):
        ours, theirs = (m.translate(TEXTS, max_new_tokens=9, **options) for m in (joint, models[0]))
        assert ours == theirs
    [text] = models[0].translate(TEXTS[:1], beam_size=1, max_new_tokens=9)
    assert "".join(joint.stream(TEXTS[0], max_new_tokens=9)) == text


def test_language_models_write_together_and_as_far_as_the_shortest() -> None:
    pair = [model_of("gpt2"), model_of("llama", max_length=20)]
    joint = heedful.ensemble(pair)
    assert joint.config.max_length == 20
    assert pair[0].config.max_length == 48
    alone = [model.generate(TEXTS, max_new_tokens=6) for model in pair]
    assert joint.generate(TEXTS, max_new_tokens=6) not in alone


@pytest.mark.parametrize(
    ("others", "weights", "words"),
    [
        ([("gpt2", {})], None, "another kind"),
        ([("vaswani2017", {"tie_embeddings": "none", "tgt_vocab_size": 41})], None, "41 tokens"),
        ([("bart", {})], [1.0], "1 weights for 2 models"),
        ([("bart", {})], [1e23, 5e-324], "comparable numbers"),
        ([("bart", {})], [1.0, -2.0], "above 0, not -2"),
        ([("bart", {})], [1.0, math.inf], "finite"),
    ],
)
def test_what_cannot_write_together_is_refused(
    others: list[Any], weights: Any, words: str, models: list[Any]
) -> None:
    with pytest.raises(UserError, match=words):
        ensemble([models[0], *(model_of(name, **keys) for name, keys in others)], weights)


def test_other_tokenizers_of_the_same_size_are_refused(models: list[Any]) -> None:
    from heedful.data.tokenizer import train_tokenizer

    other = model_of("vaswani2017")
    lines = [text[::-1] for text in TEXTS]
    other._src_tokenizer = train_tokenizer(lines, kind="bpe", vocab_size=40)
    with pytest.raises(UserError, match="another tokenizer"):
        ensemble([models[0], other])
    with pytest.raises(UserError, match="at least one model"):
        ensemble([])


def test_a_draft_is_refused_not_taken_for_the_first_model_alone(models: list[Any]) -> None:
    with pytest.raises(UserError, match="no draft"):
        ensemble(models[:2]).translate(TEXTS, beam_size=1, draft="lookup")


def test_the_command_takes_several_models(commands: Any, tmp_path: Path, models: list[Any]) -> None:
    for name, model in zip("ab", models, strict=False):
        model.save(tmp_path / name)
    lines = "\n".join(TEXTS).encode()
    options = ("--beam", 2, "--max-new-tokens", 9)
    places = (tmp_path / "a", tmp_path / "b")
    done = commands.run("translate", *places, *options, "--weight", 1, "--weight", 3, stdin=lines)
    assert done.code == 0, done.err
    wanted = ensemble(models[:2], [1.0, 3.0]).translate(TEXTS, beam_size=2, max_new_tokens=9)
    assert done.out.splitlines() == wanted
    one = commands.run("translate", places[0], "--weight", 1, "--weight", 3, stdin=lines)
    assert one.code == 2
    assert "2 weights for 1 models" in one.err


@pytest.mark.parametrize("engine", [False, True])
def test_the_unknown_is_not_written_where_it_is_not_wanted(engine: bool, tmp_path: Path) -> None:
    """As if it were banned, also in the engine; the model here likes nothing better."""
    model = model_of("vaswani2017", tie_embeddings="none")
    unknown = model.tgt_tokenizer.unk_id
    with torch.no_grad():
        model.net.head.out.weight[unknown] *= 8
    if engine:
        facts = make_form(model, tmp_path, "float32")
        model.engine = open_form(tmp_path, facts, "float32", Settings(1))
    rows, options = model.prompt_ids(TEXTS), {"beam_size": 1, "max_new_tokens": 9}
    assert any(unknown in ids for ids in model.generate(rows, **options))
    found = model.generate(rows, no_unknown=True, **options)
    assert found == model.generate(rows, banned=[unknown], **options)
    assert not any(unknown in ids for ids in found)
