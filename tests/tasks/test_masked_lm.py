"""Masked language modeling: batches, their loss, and runs from files of text to a saved model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heedful
from encoder_runs import LEARNS, PreparedTask, random_net, saved, tiny, words
from heedful.data.collate import Batch
from heedful.data.columns import Sequences, pack_ids
from heedful.errors import UserError
from heedful.pipelines import MaskedLanguageModel, ModelMetadata, open_net
from heedful.run import train
from heedful.tasks.masked_lm import Masking, masked_batch
from heedful.training.events import Evaluated
from heedful.training.listeners import read_log

CIRCLE = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
TOKENIZER = words(CIRCLE)
SPECIAL, MASK = TOKENIZER.special_ids, TOKENIZER.specials.mask_id


def circle(count: int, length: int = 8, seed: int = 0) -> list[str]:
    """Cyclic counting texts: each word is determined by any other one."""
    starts = np.random.default_rng(seed).integers(len(CIRCLE), size=count)
    return [" ".join(CIRCLE[(s + i) % len(CIRCLE)] for i in range(length)) for s in starts]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "train.txt"
    # The last ones, which are held out, count down: none of them is in the training text.
    lines = circle(60, 6)
    lines[54:] = [" ".join(line.split()[::-1]) for line in lines[54:]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def store(lengths: list[int], seed: int = 0) -> Sequences:
    """Random texts of the given lengths, special tokens included."""
    rng = np.random.default_rng(seed)
    ordinary = sorted(set(range(TOKENIZER.vocab_size)) - SPECIAL)
    texts = [TOKENIZER.add_special_tokens(rng.choice(ordinary, n - 2).tolist()) for n in lengths]
    return pack_ids(texts, TOKENIZER.vocab_size)


def batch_of(rows: Sequences, indices: Any, masking: Any = None, **keys: Any) -> Batch:
    masking = masking or Masking(mlm_probability=0.4)
    return masked_batch(rows, np.array(indices), TOKENIZER, masking=masking, **{"seed": 1, **keys})


def selected(batch: Batch) -> torch.Tensor:
    """True at the target positions."""
    places = torch.zeros(batch.tokens.ids.numel(), dtype=torch.bool)
    places[batch.target_positions] = True
    return places.view_as(batch.tokens.ids)


def ready(folder: Path, **changes: Any) -> PreparedTask:
    return PreparedTask(tiny("masked_lm", **changes), folder, "bert")


def rows_of(run: PreparedTask, split: str = "train") -> Sequences:
    return run.task.rows(run.data, split)


# --- one batch ------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(3, 12), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    epoch=st.integers(0, 9),
    whole_word=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_the_mask_of_a_row_is_independent_of_its_batch(
    lengths: list[int], order: Any, epoch: int, whole_word: bool
) -> None:
    rows = store(lengths)
    masking = Masking(mlm_probability=0.4, mask_share=0.5, random_share=0.3, whole_word=whole_word)
    indices = order.sample(range(len(lengths)), len(lengths))
    batch = batch_of(rows, indices, masking, epoch=epoch)
    assert batch.num_targets == int(selected(batch).sum())
    assert batch.num_tokens == sum(lengths)
    start = 0
    for row, index in enumerate(indices):
        alone = batch_of(rows, [index], masking, epoch=epoch)
        width = lengths[index]
        assert torch.equal(batch.tokens.ids[row, :width], alone.tokens.ids[0])
        assert torch.equal(selected(batch)[row, :width], selected(alone)[0])
        assert not selected(batch)[row, width:].any()
        count = int(selected(alone).sum())
        assert torch.equal(batch.targets[start : start + count], alone.targets)
        start += count
        whole = torch.from_numpy(rows[index].astype(np.int64))
        assert torch.equal(alone.targets, whole[selected(alone)[0]])
        assert torch.equal(alone.tokens.ids[~selected(alone)], whole[~selected(alone)[0]])
        assert not SPECIAL & set(alone.targets.tolist())
        assert SPECIAL & set(alone.tokens.ids[selected(alone)].tolist()) <= {MASK}


def test_masks_depend_on_epoch_and_seed() -> None:
    rows = store([30] * 4)
    first = batch_of(rows, [0, 1, 2, 3])
    for keys in ({"epoch": 1}, {"seed": 2}):
        assert not torch.equal(selected(batch_of(rows, [0, 1, 2, 3], **keys)), selected(first))
    assert torch.equal(selected(batch_of(rows, [0, 1, 2, 3])), selected(first))
    assert not torch.equal(selected(first)[0], selected(first)[1])


# --- a job's data ---------------------------------------------------------------------------


def test_rows_are_texts_or_packed_texts(text: Path, tmp_path: Path) -> None:
    one = ready(tmp_path / "one", data__train={"text": str(text)})
    packed = ready(tmp_path / "more", data__train={"text": str(text)}, objective={"pack": True})
    texts, rows = rows_of(one), rows_of(packed)
    assert set(texts.lengths) == {8}  # six words in their marks
    assert set(rows.lengths) == {16}
    assert rows.ids.tolist() == texts.ids.tolist()
    assert (one.num_train, one.num_valid, packed.num_train) == (54, 6, 27)
    assert sum(map(len, packed.plan_epoch(3))) == 27


def test_evaluations_have_fixed_masks_and_use_no_random_numbers(text: Path, tmp_path: Path) -> None:
    jobs = [
        ready(tmp_path / str(seed), data__train={"text": str(text)}, training__seed=seed)
        for seed in (1, 2)
    ]
    state = torch.get_rng_state()
    actual = [job.evaluate() for job in (*jobs, jobs[0])]
    assert torch.equal(torch.get_rng_state(), state)
    assert actual[0] == actual[1] == actual[2]
    assert actual[0].value == -actual[0].loss
    masks = actual[0].samples[0].source.split().count("<mask>")
    assert masks == 1  # 15% of six words
    assert len(actual[0].samples) == 5


@pytest.mark.parametrize("metric", ["accuracy", "token_accuracy"])
def test_the_best_model_may_be_chosen_by_accuracy(text: Path, tmp_path: Path, metric: str) -> None:
    job = ready(tmp_path / "data", data__train={"text": str(text)}, evaluation__metric=metric)
    actual = job.evaluate()
    assert actual.value == actual.token_accuracy


def test_texts_of_labeled_files_are_read(text: Path, tmp_path: Path) -> None:
    labeled = tmp_path / "train.tsv"
    lines = text.read_text().splitlines()
    labeled.write_text("".join(f"label\t{line}\tmore {line}\n" for line in lines))
    fields = {"file": str(labeled), "text_field": 2, "label_field": 1}
    plain = ready(tmp_path / "plain", data__train={"text": str(text)})
    same = ready(tmp_path / "same", data__train=fields)
    for name in ("train", "valid"):
        assert rows_of(same, name).ids.tolist() == rows_of(plain, name).ids.tolist()
    both = ready(tmp_path / "both", data__train={**fields, "pair_field": 3})
    decoded = [both.tokenizers[0].decode(row.tolist()) for row in list(rows_of(both))[:2]]
    assert decoded == [lines[0], f"more {lines[0]}"]
    assert both.num_train + both.num_valid == 120


def test_a_text_of_unknown_words_is_left_out(text: Path, tmp_path: Path) -> None:
    valid = tmp_path / "valid.txt"
    valid.write_text("nothing known\none two\n")
    recipe = tiny("masked_lm", data__train={"text": str(text)}, data__valid={"text": str(valid)})
    job = PreparedTask(recipe, tmp_path / "data")
    assert job.num_valid == 1
    assert "1 dropped as empty" in job.printed_lines[-1]
    valid.write_text("nothing known\n")
    with pytest.raises(UserError, match="1 hold only unknown tokens"):
        PreparedTask(recipe, tmp_path / "data")


@pytest.mark.parametrize(("too_long", "count"), [("drop", 58), ("truncate", 60)])
def test_long_texts(text: Path, tmp_path: Path, too_long: str, count: int) -> None:
    lines = text.read_text().splitlines()
    lines[1], lines[58] = " ".join(CIRCLE * 3), " ".join(CIRCLE[::-1] * 3)
    text.write_text("\n".join(lines) + "\n")
    data = {"train": {"text": str(text)}, "max_length": 10, "truncation": too_long}
    job = ready(tmp_path / "data", data=data)
    assert job.num_train + job.num_valid == count
    rows = rows_of(job)
    assert rows.lengths.max() == (10 if too_long == "truncate" else 8)
    assert all((row[0], row[-1]) == (1, 2) for row in rows)


# --- refused input ---------------------------------------------------------------------------


def test_a_source_without_a_mask_is_refused(text: Path, tmp_path: Path) -> None:
    from heedful.data.tokenizer import train_tokenizer

    maskless = train_tokenizer([" ".join(CIRCLE)], kind="word", template="both")
    saved(tmp_path / "source", "bert", maskless)
    recipe = tiny("masked_lm", data__train={"text": str(text)}, model={})
    recipe = recipe.model_copy(update={"init_from": str(tmp_path / "source")})
    with pytest.raises(UserError, match="has no mask"):
        train(recipe, tmp_path / "run")


# --- runs -----------------------------------------------------------------------------------


def stories(count: int, seed: int) -> list[str]:
    """Texts with one of eight names three times, so that a masked name is also visible."""
    names = np.random.default_rng(seed).integers(len(CIRCLE), size=count)
    return ["the {0} saw the {0} near the {0} house".format(CIRCLE[name]) for name in names]


def test_a_run_learns_to_fill_in(tmp_path: Path) -> None:
    for seed, name in enumerate(("train", "valid", "test")):
        end = " too\n" if name == "train" else "\n"
        (tmp_path / name).write_text("".join(line + end for line in stories(60, seed)))
    files = {f"data__{name}": {"text": str(tmp_path / name)} for name in ("train", "valid", "test")}
    recipe = tiny(
        "masked_lm",
        **{**LEARNS, **files},
        objective={"mlm_probability": 0.25},
        training__max_steps=180,
        training__evaluate_every=90,
        training__log_every=30,
    )
    actual = train(recipe, tmp_path / "run")
    assert actual.scores is not None
    scores = actual.scores.values()
    assert scores["accuracy"] > 0.95
    assert scores["perplexity"] == pytest.approx(np.exp(scores["loss"]))
    assert scores["perplexity"] < 1.3
    written = json.loads((tmp_path / "run/scores.json").read_text())
    assert written["set"] == "test"
    assert written["scores"] == scores
    assert written["num_masked"] == 60 * 2
    model = heedful.load(tmp_path / "run", device="cpu")
    assert isinstance(model, MaskedLanguageModel)
    fillings = model.fill("the two <mask> the two near the <mask> house", top_k=2)
    assert [filling[0].token for filling in fillings] == ["saw", "two"]
    assert fillings[1][0].probability > 0.5
    assert fillings[1][0].text == "the two <mask> the two near the two house"
    assert model.embed(["the two saw the two"]).shape == (1, 64)
    last = [e for e in read_log(tmp_path / "run/log.jsonl") if isinstance(e, Evaluated)][-1]
    assert last.perplexity == pytest.approx(np.exp(last.loss))
    assert [sample.source.split().count("<mask>") for sample in last.samples] == [2] * 5
    assert [sample.reference for sample in last.samples] == stories(60, 1)[:5]
    assert sum(sample.output == sample.reference for sample in last.samples) >= 4


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_embeddings_are_independent_of_the_batch(tmp_path: Path, name: str) -> None:
    config, net = random_net(name, vocab_size=TOKENIZER.vocab_size, max_length=20, head="none")
    model = open_net(net, config, ModelMetadata(name, "imported"), TOKENIZER)
    texts = ["one two three", "eight", "four five six seven eight one two", "two two"]
    for pooling in ("mean", "first", "last"):
        together = model.embed(texts, pooling=pooling)
        for text, vector in zip(texts, together, strict=True):
            torch.testing.assert_close(
                model.embed([text], pooling=pooling)[0], vector, rtol=1e-5, atol=1e-6
            )
            states = net(torch.tensor([TOKENIZER.add_special_tokens(TOKENIZER.encode(text))]))[0]
            by_hand = {"mean": states.mean(0), "first": states[0], "last": states[-1]}
            torch.testing.assert_close(vector, by_hand[pooling].detach(), rtol=1e-5, atol=1e-6)
    assert (model.embed([texts[0]]) - model.embed([texts[1]])).abs().max() > 0.01
