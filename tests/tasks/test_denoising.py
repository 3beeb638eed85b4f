"""Denoising: batches, plans and seeds, special tokens, and runs."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import encoder_runs
import heedful
from encoder_runs import TWO_STACKS, PreparedTask, assert_resumes
from heedful.data.collate import Batch
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError
from heedful.run import train
from heedful.tasks.denoising import noise_tokens
from heedful.tasks.masked_lm import decode_with_specials, example_rng
from heedful.tasks.noise import BartNoise, T5Noise
from heedful.training.events import Evaluated
from heedful.training.listeners import read_log

WORDS = "red old big dog cat cow sees the a ."
KINDS: dict[str, dict[str, Any]] = {
    "bart": {"kind": "bart", "permute_sentences": False},
    "t5": {"kind": "t5"},
}


def recipe_of(folder: Path, kind: str = "bart", **changes: Any) -> Any:
    keys: dict[str, Any] = {"objective": KINDS[kind], "evaluation__num_samples": 2}
    return encoder_runs.recipe_of("denoising", folder, **(keys | changes))


def ready(folder: Path, kind: str = "bart", **changes: Any) -> PreparedTask:
    return PreparedTask(recipe_of(folder, kind, **changes), folder / "data")


def sides(batch: Batch, row: int) -> tuple[list[int], ...]:
    """The encoder input, the decoder input and the targets of a row."""
    source, heard = (real_ids(tokens, row) for tokens in (batch.source, batch.tokens))
    rows = batch.target_positions // batch.tokens.ids.size(1)
    return source, heard, batch.targets[rows == row].tolist()


def real_ids(tokens: Any, row: int) -> list[int]:
    ids = tokens.ids[row]
    return (ids if tokens.real is None else ids[tokens.real[row]]).tolist()


# --- batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_the_noise_of_each_text(kind, tmp_path):
    job = ready(tmp_path, kind)
    tokenizer, store = job.tokenizer, job.data.ids("train")
    for item in job.plan_epoch(3):
        batch = job.load_batch(item, 3)
        assert batch.indices.tolist() == item.tolist()
        for row, index in enumerate(item.tolist()):
            source, heard, target = sides(batch, row)
            rng = example_rng(job.recipe.training.seed, 3, index)
            corrupted = job.task.noise.corrupt(store[index], rng, noise_tokens(tokenizer))
            assert [source, target] == [ids.tolist() for ids in corrupted]
            assert source != store[index].tolist()
            assert heard == [tokenizer.bos_id, *target[:-1]]


def test_noise_of_held_out_texts_is_independent_of_the_seed(tmp_path):
    job = ready(tmp_path)
    before = job.task.held_out_pairs(job.data, "valid").src.ids.tolist()
    (tmp_path / "b").mkdir()
    other = ready(tmp_path / "b", training__seed=9)
    assert other.task.held_out_pairs(other.data, "valid").src.ids.tolist() == before


@pytest.mark.parametrize("kind", KINDS)
def test_batches_keep_to_the_budget(kind, tmp_path):
    job = ready(tmp_path, kind, training__batch_sentences=None, training__batch_tokens=60)
    sizes = []
    for item in job.plan_epoch(0):
        batch = job.load_batch(item)
        sizes.append(batch.source.ids.numel() + batch.tokens.ids.numel())
    if kind == "t5":  # of bart a span of no tokens may add a mask
        assert max(sizes) <= 60
    assert sorted(sizes)[len(sizes) // 2] > 30


# --- lengths and tokens ---------------------------------------------------------------------


@pytest.mark.parametrize("roll", [False, True])
@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.5, 1.0), (0.3, 1.5), (0.8, 4.0)])
def test_no_text_exceeds_its_length_bound(roll, density, mean):
    noise = T5Noise(noise_density=density, mean_span_length=mean, random_roll=roll)
    longest = noise.max_side_lengths(40)
    count = len(noise.specials(40))
    tokenizer = train_tokenizer([WORDS], kind="word", extra_specials=noise.specials(40))
    tokens = noise_tokens(tokenizer)
    assert len(tokens.sentinel_ids) == count
    reached = np.zeros((2, 41), dtype=bool)
    used = 0
    lengths = [2, 5, 12, 40]
    for length in lengths:
        text = np.array([60] * (length - 1) + [tokenizer.eos_id])
        for seed in range(130):
            pair = noise.corrupt(text, np.random.default_rng(seed), tokens, 1000)
            for side, (ids, bound) in enumerate(zip(pair, longest, strict=True)):
                assert len(ids) <= bound[length]
                reached[side, length] |= len(ids) == bound[length]
            used = max(used, len(set(pair[1].tolist()) & set(tokens.sentinel_ids)))
    assert used == count
    assert reached[:, lengths].all()


def test_a_source_that_masks_make_too_long_is_truncated_before_eos():
    tokenizer = train_tokenizer([WORDS], kind="word", extra_specials=("<mask>",))
    tokens = noise_tokens(tokenizer)
    noise = BartNoise(infilling=0.9, mean_span_length=1.0, permute_sentences=False)
    text = np.array([6] * 11 + [tokenizer.eos_id])
    cut = 0
    for seed in range(50):
        free, _ = noise.corrupt(text, np.random.default_rng(seed), tokens, 1000)
        source, target = noise.corrupt(text, np.random.default_rng(seed), tokens, 12)
        assert target.tolist() == text.tolist()
        assert len(source) <= 12
        assert source[-1] == tokenizer.eos_id
        assert source[:-1].tolist() == free[: len(source) - 1].tolist()
        cut += len(free) > 12
    assert cut > 10


def test_stops_are_the_tokens_that_end_a_sentence():
    for kind in ("word", "char", "byte"):
        tokenizer = train_tokenizer(["it is . is it ? so !"], kind=kind)
        stops = noise_tokens(tokenizer).full_stop_ids
        assert {tokenizer.decode([index]).strip() for index in stops} == {".", "?", "!"}


def test_decoded_samples_show_masks_and_sentinels():
    specials = ("<mask>", "<extra_0>", "<extra_1>")
    tokenizer = train_tokenizer([WORDS], kind="word", extra_specials=specials)
    the, dog = tokenizer.encode("the dog")
    mask, (first, second) = tokenizer.specials.mask_id, tokenizer.specials.sentinel_ids
    ids = [tokenizer.bos_id, the, mask, dog, first, second, tokenizer.eos_id]
    assert decode_with_specials(tokenizer, ids) == "the <mask> dog <extra_0> <extra_1>"


def test_missing_special_tokens_are_named():
    bare = noise_tokens(train_tokenizer(["a b"], kind="word"))
    with pytest.raises(UserError, match=r"bart needs a mask"):
        BartNoise(permute_sentences=False).check(bare, 20)
    BartNoise(infilling=0.0, deletion=0.1, permute_sentences=False).check(bare, 20)
    with pytest.raises(UserError, match=r"no token of the vocabulary ends a sentence"):
        BartNoise(infilling=0.0, deletion=0.1).check(bare, 20)
    with pytest.raises(UserError, match=r"needs 3 sentinels .* has 0"):
        T5Noise().check(bare, 20)


# --- runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_and_resumed_run_is_equal(kind, tmp_path):
    recipe = recipe_of(tmp_path, kind)
    assert_resumes(recipe, tmp_path, ("scores.json", "samples.txt", "config.json"))
    model = heedful.load(tmp_path / "whole", device="cpu")
    tokenizer = model.tokenizer
    scores = json.loads((tmp_path / "whole/scores.json").read_text())
    assert scores["scores"]["perplexity"] == pytest.approx(np.exp(scores["scores"]["loss"]))
    never = set(model.ids.suppressed_ids)
    assert {tokenizer.pad_id, tokenizer.bos_id} <= never
    assert tokenizer.eos_id not in never
    samples = (tmp_path / "whole/samples.txt").read_text()
    # The reference of an output is its target: for t5 the missing spans only.
    targets = re.findall("^target: +(.*)", samples, re.MULTILINE)
    assert targets
    assert all(("extra" in target) == (kind == "t5") for target in targets)
    if kind == "t5":
        assert not never & set(tokenizer.specials.sentinel_ids)
    else:
        assert tokenizer.specials.mask_id in never


def test_a_model_learns_to_restore_texts(tmp_path):
    # Pairs of four phrases that share no word: the rest of a phrase determines what is missing.
    phrases = ["a b c d e f", "g h i j k l", "m n o p q r", "s t u v w x"]
    pairs = {(i, j): f"{phrases[i]} {phrases[j]}" for i in range(4) for j in range(4)}
    texts = [text for (i, j), text in pairs.items() if j == (i + 1) % 4]
    others = [text for text in pairs.values() if text not in texts]
    for name, lines in (("lines", others * 4), ("held-out", texts)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    recipe = recipe_of(
        tmp_path,
        data__train__text=str(tmp_path / "lines"),
        data__valid__text=str(tmp_path / "held-out"),
        model={"architecture": "vaswani2017", **TWO_STACKS, "d_model": 48, "dropout": 0.0},
        model__num_encoder_layers=1,
        model__num_decoder_layers=1,
        training__max_steps=120,
        training__evaluate_every=120,
        training__log_every=120,
        training__schedule={"name": "constant", "learning_rate": 0.005, "warmup_steps": 5},
    )
    train(recipe, tmp_path / "run")
    event = [e for e in read_log(tmp_path / "run/log.jsonl") if isinstance(e, Evaluated)][-1]
    assert event.token_accuracy > 0.9
    assert any("<mask>" in sample.source for sample in event.samples)
    assert all(sample.reference in texts for sample in event.samples)
    assert any(sample.output == sample.reference for sample in event.samples)


def test_a_translation_run_starts_from_a_denoising_model(tmp_path):
    """The joint vocabulary is kept; mask and sentinels are never generated."""
    for kind in KINDS:
        start = {"init_from": str(tmp_path / kind), "model": {}, "training__max_steps": 2}
        translation = encoder_runs.recipe_of("translation", tmp_path, **start)
        names = [translation.data.train.src, translation.data.train.tgt]
        recipe = recipe_of(tmp_path, kind, data__train__text=names, training__max_steps=2)
        train(recipe, tmp_path / kind)
        printed_lines: list[str] = []
        train(translation, tmp_path / f"{kind}-pairs", print_line=printed_lines.append)
        source, model = (
            heedful.load(tmp_path / name, device="cpu") for name in (kind, f"{kind}-pairs")
        )
        assert model.config == source.config
        assert model.src_tokenizer is model.tgt_tokenizer
        assert model.tokenizer.content() == source.tokenizer.content()
        tokenizer = model.tokenizer
        specials = {*tokenizer.specials.sentinel_ids, tokenizer.specials.mask_id} - {None}
        assert specials
        assert specials <= set(model.ids.suppressed_ids)
        count = len(list(source.net.parameters()))
        assert any(f"{count} tensors" in line for line in printed_lines)
        assert not any("initialized" in line for line in printed_lines)
        never_generated(model, specials)


def never_generated(model: Any, specials: set[int]) -> None:
    """Suppressed tokens are never generated, by greedy or beam search, even if preferred."""
    with torch.no_grad():
        weight = model.net.head.out.weight
        weight[sorted(specials)] = 0.0
        states = torch.zeros(weight.size(1)).add_(5.0)
        weight[sorted(specials)] = states
    for beam_size in (1, 3):
        actual = model.generate(
            ["the dog"], beam_size=beam_size, max_new_tokens=6, return_details=True
        )[0][0]
        assert actual.ids
        assert not specials & set(actual.ids)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"objective": {"kind": "brat"}}, ["objective", "brat", "'bart', 't5'"]),
        (
            {"objective": {"kind": "t5", "noise_density": 0.95}, "data__max_length": 8},
            ["lower noise_density"],
        ),
        ({"data__train": {"src": "x", "tgt": "y"}}, ["data.train.src"]),
        ({"data__train": {}}, ["data.train"]),
        ({"evaluation__metric": "bleu"}, ["evaluation.metric bleu"]),
        ({"model": {"architecture": "gpt2"}}, ["gpt2", "not an encoder-decoder"]),
        (
            {"distillation__teacher": "x"},
            ["distillation.teacher is not read by the task denoising"],
        ),
    ],
)
def test_errors_name_the_wrong_key(changes, parts, tmp_path):
    with pytest.raises(UserError) as error:
        train(recipe_of(tmp_path, **changes), tmp_path / "run")
    for part in parts:
        assert part in str(error.value)
    assert not (tmp_path / "run").exists()


def test_without_an_objective_it_is_bart(tmp_path):
    assert ready(tmp_path, objective={}).task.noise == BartNoise(permute_sentences=False)
