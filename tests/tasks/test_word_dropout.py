"""Word dropout: only ordinary tokens are replaced, on both sides, only in training."""

import pytest
import torch
from torch import nn

from encoder_runs import PreparedTask, assert_resumes, recipe_of, sentences, words
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError
from heedful.parts.losses import LossSum
from heedful.tasks.word_dropout import WordDropoutLoss

TASKS = ("translation", "language_modeling", "sft", "masked_lm", "denoising", "classification")
NOTHING = LossSum(torch.zeros(()), torch.zeros(()), torch.zeros((), dtype=torch.long), 0)


def batches_before_and_after(task, folder, *, training=True):
    """Each batch of an epoch, before and after word dropout."""
    run, passed = PreparedTask(recipe_of(task, folder), folder / "data"), []
    loss = WordDropoutLoss(
        lambda net, batch: passed.append(batch) or NOTHING, run.tokenizers, 0.3, torch.device("cpu")
    )
    batches = [run.load_batch(item) for item in run.plan_epoch(0)]
    torch.manual_seed(0)
    for batch in batches:
        loss(nn.Identity().train(training), batch)
    return run, list(zip(batches, passed, strict=True))


@pytest.mark.parametrize("task", TASKS)
def test_only_ordinary_tokens_are_replaced_with_the_probability(tmp_path, task):
    run, actual = batches_before_and_after(task, tmp_path)
    hidden_id = run.tokenizer.specials.mask_id or run.tokenizer.unk_id
    special = torch.tensor(sorted(run.tokenizer.special_ids))
    for side in ("tokens", "source") if task in ("translation", "denoising") else ("tokens",):
        hidden = ordinary = 0
        for before, after in actual:
            assert torch.equal(after.targets, before.targets)
            old, new = getattr(before, side).ids, getattr(after, side).ids
            changed = old != new
            assert set(new[changed].tolist()) <= {hidden_id}
            assert not torch.isin(old[changed], special).any()
            hidden += int(changed.sum())
            ordinary += int((~torch.isin(old, special)).sum())
        assert hidden / ordinary == pytest.approx(0.3, abs=4 * (0.21 / ordinary) ** 0.5)


def test_nothing_is_replaced_in_eval_mode(tmp_path):
    _, actual = batches_before_and_after("translation", tmp_path, training=False)
    assert all(after is before for before, after in actual)


def test_both_sides_have_the_replacement_of_their_tokenizer():
    src, tgt = words(["a", "b"]), train_tokenizer(sentences(9), kind="word")
    loss = WordDropoutLoss(lambda net, batch: NOTHING, (src, tgt), 0.1, torch.device("cpu"))
    tables = [table.tolist() for table in loss._replacements]
    for tokenizer, table, hidden in zip(
        (src, tgt), tables, (src.specials.mask_id, tgt.unk_id), strict=True
    ):
        allowed = [i if i in tokenizer.special_ids else hidden for i in range(tokenizer.vocab_size)]
        assert table == allowed


@pytest.mark.parametrize("task", ["translation", "classification"])
def test_a_resumed_run_has_the_same_replacements(tmp_path, task):
    recipe = recipe_of(task, tmp_path, training__word_dropout=0.3)
    assert_resumes(recipe, tmp_path, ["scores.json"])


def test_a_tokenizer_without_a_replacement_is_refused():
    tokenizer = train_tokenizer(["a b"], kind="byte")
    tokenizer.specials, tokenizer.unk_id = type(tokenizer.specials)(), -1
    with pytest.raises(UserError, match="word_dropout needs a mask or an unknown token"):
        WordDropoutLoss(lambda net, batch: NOTHING, (tokenizer,) * 2, 0.1, torch.device("cpu"))
