"""Both encoder tasks: parity, new and resumed runs, refused recipes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heedful
from encoder_runs import assert_resumes, recipe_of, saved, sentences, words
from heedful.data.collate import collate_texts
from heedful.data.columns import pack_ids
from heedful.errors import UserError
from heedful.evaluation.likelihood import batch_loss
from heedful.run import train
from hf_parity import imported, random_hf, transformers

TASKS = {"masked_lm": "MaskedLM", "classification": "SequenceClassification"}
TOKENIZER = words(sentences(80))
both = pytest.mark.parametrize("task", TASKS)


@both
@pytest.mark.parametrize("name", ["Bert", "Roberta", "DistilBert"])
def test_loss_and_gradients_equal_transformers(tmp_path: Path, name: str, task: str) -> None:
    sizes = {"vocab_size": 19, "pad_token_id": 1, "num_labels": 3}
    if name == "DistilBert":
        sizes |= {"dim": 12, "n_heads": 3, "n_layers": 2, "hidden_dim": 20}
    else:
        sizes |= {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
        sizes |= {"intermediate_size": 20, "type_vocab_size": 2 if name == "Bert" else 1}
    config = getattr(transformers, f"{name}Config")(**sizes, max_position_embeddings=32)
    reference = random_hf(getattr(transformers, f"{name}For{TASKS[task]}"), config)
    net = imported(reference, tmp_path / "hf").net
    # The id 0 is an ordinary token: targets are selected by position, never by id.
    rng = np.random.default_rng(3)
    rows = pack_ids([[0, *rng.integers(2, 19, n - 1).tolist()] for n in (9, 4, 6)], 19)
    labels, second = np.array([0, 2, 1]), np.full(3, 2)
    batch = collate_texts(rows, np.arange(3), pad_id=1, labels=labels, second=second)
    labels, types = batch.targets, {}
    if task == "masked_lm":
        batch = collate_texts(rows, np.arange(3), pad_id=1)
        places, targets = (
            torch.tensor([0, 5, 9, 12, 18, 20]),
            torch.tensor([7, 3, 0, 18, 11, 4]),
        )
        labels = torch.full((27,), -100).index_copy(0, places, targets).view(3, 9)
        batch = replace(batch, targets=targets, target_positions=places)
    elif name == "Bert":
        types = {"token_type_ids": batch.types}
    mask = batch.tokens.real.long()
    expected = reference(batch.tokens.ids, attention_mask=mask, labels=labels, **types).loss
    expected = expected * batch.num_targets
    actual = batch_loss(net, batch)
    torch.testing.assert_close(actual.loss, expected, rtol=1e-5, atol=1e-5)
    actual.loss.backward()
    expected.backward()
    embedding = next(p for n, p in reference.named_parameters() if "word_embeddings" in n)
    torch.testing.assert_close(
        net.embedding.tokens.weight.grad, embedding.grad, rtol=1e-4, atol=1e-5
    )


@both
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_a_run_starts_from_an_encoder(tmp_path: Path, name: str, task: str) -> None:
    # Published models have more rows than their tokenizers have ids.
    keys = {"head": "none"} if task == "masked_lm" else {}
    source = saved(tmp_path / "source", name, TOKENIZER, vocab_size=30, **keys)
    targets: list[str] = []
    start = {"init_from": str(tmp_path / "source"), "model": {}, "training__max_steps": 1}
    train(recipe_of(task, tmp_path, **start), tmp_path / "run", print_line=targets.append)
    model = heedful.load(tmp_path / "run", device="cpu")
    assert (model.config.vocab_size, model.config.max_length) == (30, 20)
    assert model.tokenizer.content() == TOKENIZER.content()
    (new,) = [line for line in targets if "initialized" in line]
    unused = [line for line in targets if "not used" in line]
    if task == "classification":
        assert new.partition(": ")[2] == "head.dense (2), head.labels (2)"
    assert len(unused) == (task == "classification")
    for line in (new, *unused):
        assert all(item.startswith("head.") for item in line.partition(": ")[2].split(", "))
    # After a single step, whose rate is small, the weights are still near those of the source.
    moved = model.net.embedding.tokens.weight - source.net.embedding.tokens.weight
    assert 0 < moved.detach().abs().max().item() < 0.01


PACKED = {"objective": {"pack": True, "whole_word": True, "mlm_probability": 0.3}}


@pytest.mark.parametrize(
    ("task", "accumulate", "changes"),
    [("classification", 2, {}), ("masked_lm", 1, {}), ("masked_lm", 2, PACKED)],
)
def test_a_killed_and_resumed_run_is_equal(
    tmp_path: Path, task: str, accumulate: int, changes: dict[str, Any]
) -> None:
    recipe = recipe_of(task, tmp_path, training__gradient_accumulation=accumulate, **changes)
    output = ("valid.output.txt",) if task == "classification" else ()
    assert_resumes(recipe, tmp_path, ("scores.json", "config.json", "tokenizer.json", *output))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model__head": "mlm"}, "model.head is determined by the task TASK"),
    ({"model__num_labels": 3}, "model.num_labels is determined by the task"),
    ({"model__vocab_size": 9}, "model.vocab_size is determined by the tokenizer"),
    ({"model__max_length": 8}, "data.max_length 16 is more than the 8 tokens"),
    ({"model": {"architecture": "vaswani2017"}}, "vaswani2017 is not an encoder"),
    ({"model": {"architecture": "gpt2"}}, "gpt2 is not an encoder"),
    ({"evaluation__metric": "bleu"}, "evaluation.metric bleu is not supported"),
    ({"data__max_length": 2}, "max_length 2 leaves no tokens for text"),
    ({"data__valid": {"src": "x"}}, "data.valid.src is not read by the task TASK"),
]
OWN: dict[str, list[tuple[dict[str, Any], str]]] = {
    "classification": [
        (
            {"objective": {"mlm_probability": 0.2}},
            "unknown key objective.mlm_probability; known: problem",
        ),
        ({"data__train": {}}, "data.train is not given: add data.train.file=FILE"),
        ({"data__valid": {"text": "x"}}, "data.valid.text is not read by the task"),
        ({"data__train__pair_field": 3, "data__test": {"file": "x.tsv"}}, "must both be given"),
        ({"data__valid_size": 41}, "data.valid_size 41 of 80 texts would leave too few"),
    ],
    "masked_lm": [
        (
            {"objective": {"mlm_probabilty": 0.2}},
            "unknown key objective.mlm_probabilty; did you mean mlm_probability",
        ),
        (
            {"objective": {"mlm_probability": 0}},
            "objective.mlm_probability: input should be greater than 0",
        ),
        ({"objective": {"mask_share": 0.8, "random_share": 0.3}}, "sum to more than 1"),
        ({"objective": {"pack": "often"}}, "objective.pack"),
        ({"data__train": {}}, "data.train is not given: add data.train.text=FILE"),
        ({"data__train__file": "x.tsv"}, "data.train: give text or file, not both"),
    ],
}


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [(task, *each) for task in TASKS for each in (*WRONG, *OWN[task])],
)
def test_wrong_keys_are_refused(
    tmp_path: Path, task: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message.replace("TASK", task)):
        train(recipe_of(task, tmp_path, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
