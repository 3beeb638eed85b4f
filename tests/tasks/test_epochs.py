"""Subword sampling in every task: an epoch's batches are independent of the run's history."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encoder_runs import PreparedTask, assert_resumes, recipe_of
from heedful import plugins
from heedful.cost.batches import padded_tokens
from heedful.data import plans
from heedful.errors import UserError
from heedful.tasks.epochs import EpochBatches

TASKS = ("translation", "masked_lm", "denoising", "classification")
SAMPLED = {
    "tokenizer": {"kind": "bpe", "vocab_size": 35},
    "training__subword_sampling": 0.3,
}


def sampled(task: str, folder: Path, **changes: Any) -> Any:
    """A recipe with new subword splits in each epoch."""
    return recipe_of(task, folder, **SAMPLED | {"data__max_length": 40} | changes)


def batches(epochs: EpochBatches, epoch: int) -> list[dict[str, Any]]:
    actual = [epochs.load_batch(epoch, item) for item in epochs.plan_epoch(epoch)]
    return [{"ids": b.tokens.ids.tolist(), "targets": b.targets.tolist()} for b in actual]


@pytest.mark.parametrize("task", TASKS)
def test_an_epoch_is_independent_of_earlier_epochs(tmp_path, task):
    recipe = sampled(task, tmp_path)
    run = PreparedTask(recipe, tmp_path / "data")
    one, other = EpochBatches(run.task, run.data), EpochBatches(run.task, run.data)
    first, second = batches(one, 0), batches(one, 1)
    assert batches(other, 1) == second
    assert batches(other, 0) == first
    # A batch depends on no other: any process or resumed run may load any of them, in any order.
    planned = [(number, item) for number in (1, 0) for item in other.plan_epoch(number)]
    planned.sort(key=lambda pair: len(repr(pair)), reverse=True)
    loaded = {(number, str(item)): other.load_batch(number, item) for number, item in planned}
    for number, expected in ((0, first), (1, second)):
        plan = one.plan_epoch(number)
        assert len(plan) == len(expected) > 1
        for item, batch in zip(plan, expected, strict=True):
            if (key := (number, str(item))) in loaded:
                assert loaded[key].tokens.ids.tolist() == batch["ids"]
    plain = sampled(task, tmp_path, training__subword_sampling=None)
    assert batches(EpochBatches(PreparedTask(plain, tmp_path / "data").task, run.data), 0) != first


@pytest.mark.parametrize("task", [*TASKS, "packed"])
def test_no_batch_has_more_tokens_than_its_limit(tmp_path, task):
    """Padding included, and although samples are longer than the stored rows."""
    changes = {"packed": {"objective": {"pack": True}}}
    limit = 160
    recipe = sampled(
        {"packed": "masked_lm"}.get(task, task),
        tmp_path,
        training__batch_tokens=limit,
        training__batch_sentences=None,
        training__subword_sampling=0.4,
        **changes.get(task, {}),
    )
    run = PreparedTask(recipe, tmp_path / "data")
    epochs = EpochBatches(run.task, run.data)
    loaded = [
        epochs.load_batch(epoch, item) for epoch in (0, 1) for item in epochs.plan_epoch(epoch)
    ]
    sizes = [padded_tokens(batch) for batch in loaded]
    assert max(sizes) <= limit
    assert np.mean(sizes) > 0.5 * limit
    plain = EpochBatches(
        PreparedTask(recipe.replace({"training.subword_sampling": None}), tmp_path / "data").task,
        run.data,
    )
    assert len(loaded) / 2 > len(plain.plan_epoch(0))


def test_resampled_subwords_decode_to_the_same_text(tmp_path):
    run = PreparedTask(sampled("translation", tmp_path), tmp_path / "data")
    epochs, tokenizer = EpochBatches(run.task, run.data), run.tokenizer
    texts = [tokenizer.decode(ids.tolist()) for ids in run.data.ids("train", "src")]
    for batch in (epochs.load_batch(0, item) for item in epochs.plan_epoch(0)):
        read = batch.source.ids.tolist()
        for index, source in zip(batch.indices.tolist(), read, strict=True):
            assert tokenizer.decode(source) == texts[index]


@pytest.mark.parametrize("task", ["translation", "masked_lm", "classification"])
def test_a_resumed_run_has_the_same_subwords(tmp_path, task):
    packed = {"objective": {"pack": True}} if task == "masked_lm" else {}
    assert_resumes(sampled(task, tmp_path, **packed), tmp_path, ["scores.json"])


def test_language_modeling_refuses_subword_sampling(tmp_path):
    recipe = recipe_of("language_modeling", tmp_path, training__subword_sampling=0.1)
    with pytest.raises(UserError, match="task language_modeling does not support it; leave it"):
        plugins.task.get(recipe.task)(recipe).check()


def test_a_tokenizer_of_words_is_refused_before_the_first_step(tmp_path):
    recipe = recipe_of("translation", tmp_path, training__subword_sampling=0.1)
    run = PreparedTask(recipe, tmp_path / "data")
    with pytest.raises(UserError, match="subword_sampling: a tokenizer of kind word"):
        EpochBatches(run.task, run.data)


@pytest.mark.parametrize("task", [*TASKS, "language_modeling", "packed", "compiled"])
def test_an_epoch_of_several_buffers_reads_every_row_and_resumes(tmp_path, task, monkeypatch):
    monkeypatch.setattr(plans, "BLOCK_ROWS", 8)
    monkeypatch.setattr(plans, "BUFFER_BLOCKS", 2)
    changes = {}
    if task == "packed":
        changes = {"objective": {"pack": True}}
    if task == "compiled":
        changes = {"training__compile": True}
    name = {"packed": "masked_lm", "compiled": "translation"}.get(task, task)
    recipe = recipe_of(name, tmp_path, **changes)
    run = PreparedTask(recipe, tmp_path / "data")
    plan = run.plan_epoch(0)
    assert not isinstance(plan, list)
    assert isinstance(plan, Sequence)
    assert [*map(repr, plan)] == [repr(plan[i]) for i in range(len(plan))]
    if name == "language_modeling":
        texts = {int(row) for item in plan for row in item.order}
        assert texts == {*range(len(run.data.splits["train"]))}
        targets = sum(int(item.sizes.sum()) for item in plan)
        tokens = len(run.data.ids("train").ids)
        assert 0.6 * tokens < targets < tokens
    else:
        batches = [run.load_batch(item) for item in plan]
        rows = [int(i) for batch in batches for i in batch.indices]
        assert sorted(rows) == [*range(run.num_train)]
    if task == "translation":
        assert_resumes(recipe, tmp_path, ["scores.json"])
